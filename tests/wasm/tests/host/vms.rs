//! Lives of VMs and roots: refusals, traps, kills, reloads, upgrades, plugins.

use pd_wasm_tests::{Ending, Exchange, Fault, Gateway, GatewayConfig, Script};

use crate::{config, fixture, gateway, logged};

#[test]
fn a_refused_or_trapping_configuration_does_not_start() {
    let refused = Gateway::try_new(config("refuse")).err().unwrap();
    assert!(
        refused
            .logs
            .iter()
            .any(|line| line.text.contains("configured \"refuse\""))
    );
    assert!(Gateway::try_new(config("trap")).is_err());
    let vm_config = b"refuse".to_vec();
    assert!(
        Gateway::try_new(GatewayConfig {
            vm_config,
            ..config("")
        })
        .is_err()
    );
}

#[test]
fn a_refused_change_keeps_the_old_root() {
    let mut gateway = gateway("good");
    assert!(gateway.reconfigure(Default::default(), b"refuse").is_err());
    assert_eq!(gateway.live_roots(0), 1);
    assert_eq!(gateway.run(Exchange::get("/config")).text(), "good");
}

#[test]
fn a_trap_takes_every_stream_of_its_worker_without_callbacks() {
    let mut gateway = Gateway::new(GatewayConfig {
        vm_count: 2,
        ..config("")
    });
    gateway.other_engines(|_| Script::stream(10, &["one", "two"]).then_stall());
    let streaming = gateway.send(Exchange::get("/stream"));
    let waiting = gateway.send(Exchange::post("/pause", "x"));
    let elsewhere = gateway.send(Exchange::get("/stream").worker(1));
    gateway.advance(10);
    gateway.run(Exchange::get("/trap")).expect(503);
    // The running stream is cut when its next chunk comes; the paused one hangs.
    gateway.advance(10);
    assert_eq!(gateway.outcome(streaming).ending, Ending::VmLost);
    assert_eq!(gateway.outcome(waiting).ending, Ending::Open);
    gateway.disconnect(waiting);
    let waiting = gateway.outcome(waiting);
    assert_eq!(waiting.ending, Ending::Disconnected);
    assert!(!waiting.callbacks.contains(&"log") && !waiting.deleted);
    assert_eq!(gateway.outcome(elsewhere).ending, Ending::Open);
    assert!(gateway.is_lost(0));
    gateway.run(Exchange::get("/config")).expect(503);
    assert!(matches!(
        &gateway.take_faults()[..],
        [Fault::Trap { vm: 0, .. }]
    ));
    assert!(logged(&gateway, "asked to"));
    gateway.reload_vm(0).unwrap();
    gateway.run(Exchange::get("/config")).expect(200);
}

#[test]
fn a_killed_vm_leaves_its_shared_data_and_its_calls_die() {
    let mut gateway = gateway("");
    gateway.run(Exchange::get("/add"));
    let flight = gateway.send(Exchange::post("/prefill", "{}"));
    gateway.kill_vm(0);
    gateway.body(flight, b"more", true);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        outcome.expect(503).code_details.as_deref(),
        Some("wasm_fail_stream")
    );
    assert!(gateway.pending_calls().is_empty());
    gateway.reload_vm(0).unwrap();
    assert_eq!(gateway.run(Exchange::get("/add")).text(), "2 after 1");
}

#[test]
fn a_root_may_finish_later() {
    let mut gateway = gateway("late-done");
    gateway.reconfigure(Default::default(), b"new").unwrap();
    assert_eq!(gateway.live_roots(0), 2);
    // Its own queue still reaches it while it is not done.
    gateway.drain_old_roots();
    assert_eq!(gateway.live_roots(0), 1);
    assert!(logged(&gateway, "root 1 done") && logged(&gateway, "root 1 deleted"));
}

#[test]
fn plugins_have_roots_of_their_own_in_one_vm() {
    let mut gateway = gateway("first");
    let second = gateway.add_plugin(b"second").unwrap();
    assert_eq!(gateway.live_roots(0), 2);
    assert_eq!(gateway.run(Exchange::get("/config")).text(), "first");
    assert_eq!(
        gateway.run(Exchange::get("/config").plugin(second)).text(),
        "second"
    );
}

#[test]
fn an_upgrade_runs_both_modules_on_one_store_until_the_old_one_drains() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::stream(10, &["one", "two"]));
    gateway.run(Exchange::get("/add"));
    let old = gateway.send(Exchange::get("/stream"));
    gateway.upgrade(fixture()).unwrap();
    assert_eq!(gateway.run(Exchange::get("/add")).text(), "2 after 1");
    assert_eq!(gateway.drain_old_vms(), 1);
    gateway.settle(old, 1000);
    assert_eq!(gateway.outcome(old).expect(200).text(), "onetwo");
    assert_eq!(gateway.drain_old_vms(), 0);
    assert!(logged(&gateway, "root 1 deleted"));
}

#[test]
fn linear_memory_is_readable_and_never_shrinks() {
    let mut gateway = gateway("");
    let before = gateway.memory_pages(0);
    gateway.run(Exchange::get("/grow"));
    let after = gateway.memory_pages(0);
    assert!(after >= before + 128, "{before} {after}");
    gateway.run(Exchange::get("/config"));
    assert_eq!(gateway.memory_pages(0), after);
}
