//! Several VMs on one store: shared data, races, queues, ticks.

use pd_wasm_tests::{Exchange, Gateway, GatewayConfig};

use crate::{config, logged};

fn two(plugin: &str) -> Gateway {
    Gateway::new(GatewayConfig {
        vm_count: 2,
        ..config(plugin)
    })
}

#[test]
fn vms_share_one_counter() {
    let mut gateway = two("");
    assert_eq!(gateway.run(Exchange::get("/add")).text(), "1 after 1");
    assert_eq!(
        gateway.run(Exchange::get("/add").worker(1)).text(),
        "2 after 1"
    );
    assert_eq!(gateway.shared_value("count").unwrap(), b"2");
    assert_eq!(gateway.shared().keys("vm"), ["count"]);
}

#[test]
fn a_lost_race_is_a_mismatch_and_is_tried_again() {
    let mut gateway = two("");
    gateway.shared().intrude_before_next_write("count", b"40");
    assert_eq!(gateway.run(Exchange::get("/add")).text(), "41 after 2");
    gateway.shared().race_next_writes(3);
    assert_eq!(gateway.run(Exchange::get("/add")).text(), "42 after 4");
    assert_eq!(gateway.shared().counts.mismatches, 4);
}

#[test]
fn a_queue_notice_goes_to_the_root_that_registered_last() {
    let mut gateway = two("");
    // Both VMs registered "fixed-name": the second silently took it over, so the first one's
    // stream is dispatched by a VM that knows no such stream, and nothing answers it.
    let outcome = gateway.run(Exchange::get("/fixed-queue"));
    assert_eq!(outcome.expect(200).text(), "None");
    assert_eq!(gateway.calls()[0].vm, 1);
    assert_eq!(gateway.queue_len("fixed-name"), Some(0));
}

#[test]
fn every_vm_ticks_and_a_frozen_one_does_not() {
    let mut gateway = two("tick=100");
    let ticks = |gateway: &Gateway, vm| {
        let lines = gateway.logs();
        lines
            .iter()
            .filter(|line| line.vm == vm && line.text.starts_with("tick"))
            .count()
    };
    gateway.advance(250);
    assert_eq!((ticks(&gateway, 0), ticks(&gateway, 1)), (2, 2));
    gateway.freeze_vm(1);
    gateway.advance(500);
    assert_eq!((ticks(&gateway, 0), ticks(&gateway, 1)), (7, 2));
    gateway.unfreeze_vm(1);
    gateway.advance(0);
    gateway.advance(99);
    assert_eq!((ticks(&gateway, 0), ticks(&gateway, 1)), (8, 3));
    gateway.freeze_all(true);
    gateway.advance(1000);
    assert_eq!((ticks(&gateway, 0), ticks(&gateway, 1)), (8, 3));
}

#[test]
fn envoys_start_configures_a_canary_and_a_main_thread_vm() {
    let mut gateway = Gateway::new(GatewayConfig {
        vm_count: 2,
        main_thread: true,
        ..config("tick=100")
    });
    let configured = gateway
        .logs()
        .iter()
        .filter(|l| l.text.starts_with("configured"))
        .count();
    assert_eq!(configured, 4);
    gateway.advance(100);
    let ticks = gateway
        .logs()
        .iter()
        .filter(|l| l.text.starts_with("tick"))
        .count();
    assert_eq!(ticks, 3);
}

#[test]
fn environment_variables_reach_the_guest_and_random_numbers_differ() {
    let env = vec![
        ("FIXTURE".to_owned(), "yes".to_owned()),
        ("B".to_owned(), "2".to_owned()),
    ];
    let gateway = Gateway::new(GatewayConfig {
        vm_count: 2,
        env,
        ..config("plain")
    });
    assert!(logged(&gateway, "configured \"plain\" env \"yes\""));
}
