//! One ledger of several workers.

use crate::stand::{
    assert_quiet, bare, charged, chat, decoding, endings, finish, healthy, last_pending,
    ledgers_at, logged, prefill_ok, status_at,
};
use pd_wasm_tests::{Gateway, GatewayConfig};
use pd_wire::control::Charged;

const FENCED: &str = "taken for dead";

/// One request decoding on each worker.
fn one_each(gateway: &mut Gateway, workers: usize) -> Vec<pd_wasm_tests::Flight> {
    (0..workers)
        .map(|worker| decoding(gateway, chat(true).worker(worker)))
        .collect()
}

#[test]
fn every_worker_sees_what_the_others_have_charged() {
    let mut gateway = bare(3, "");
    let flights = one_each(&mut gateway, 3);
    // A charge is seen at once, what becomes of it at the next tick.
    gateway.advance(100);
    let body = crate::stand::chat_body(true).len() as u64;
    let all = Charged {
        kv_tokens: 3 * (3500 + body / 4),
        decode_running: 3,
        decode_tokens: 3 * (body / 4),
        ..Charged::default()
    };
    for worker in 0..3 {
        let seen = ledgers_at(&mut gateway, worker);
        assert_eq!(seen.total, all);
        assert_eq!(seen.models[0].model, "m");
    }
    for flight in flights {
        finish(&mut gateway, flight);
    }
    assert_quiet(&mut gateway, 3);
}

#[test]
fn a_choice_minds_the_charges_of_other_workers() {
    let mut gateway = bare(2, r#"{"tieSeed":1,"prefillScorePolicy":"least_request"}"#);
    let first = gateway.send(chat(true));
    let one = crate::stand::target(&last_pending(&gateway));
    let second = gateway.send(chat(true).worker(1));
    let two = crate::stand::target(&last_pending(&gateway));
    assert_ne!(one, two);
    for flight in [first, second] {
        gateway.disconnect(flight);
    }
}

#[test]
fn what_a_dead_vm_held_is_given_back_within_five_seconds() {
    for main_thread in [false, true] {
        let mut gateway = Gateway::new(GatewayConfig {
            main_thread,
            ..crate::stand::config(2, "")
        });
        let pairs = crate::stand::topology(1, &crate::stand::two_pairs());
        crate::stand::push(&mut gateway, &pairs).expect(200);
        let alive = decoding(&mut gateway, chat(true));
        decoding(&mut gateway, chat(true).worker(1));
        gateway.send(chat(true).worker(1));
        gateway.advance(1000);
        assert_eq!(charged(&mut gateway).decode_running, 2);
        gateway.kill_vm(1);
        gateway.advance(5000);
        let left = charged(&mut gateway);
        assert_eq!(
            (
                left.decode_running,
                left.decode_pending,
                left.prefill_requests
            ),
            (1, 0, 0)
        );
        finish(&mut gateway, alive);
        assert_quiet(&mut gateway, 1);
        assert!(!logged(&gateway, FENCED));
    }
}

#[test]
fn a_reloaded_vm_gives_back_what_the_one_before_held_even_alone() {
    let mut gateway = bare(1, "");
    decoding(&mut gateway, chat(true));
    gateway.advance(300);
    gateway.reload_vm(0).unwrap();
    gateway.advance(5000);
    assert_quiet(&mut gateway, 1);
    let flight = decoding(&mut gateway, chat(true));
    finish(&mut gateway, flight);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_paused_process_fences_nobody() {
    let mut gateway = bare(3, "");
    let flights = one_each(&mut gateway, 3);
    gateway.advance(500);
    let before = charged(&mut gateway);
    let slots = |gateway: &mut Gateway| -> Vec<(u32, u32)> {
        let vms = status_at(gateway, 0).vms;
        vms.iter().map(|vm| (vm.slot, vm.generation)).collect()
    };
    let owned = slots(&mut gateway);
    gateway.freeze_all(true);
    gateway.advance(10_000);
    gateway.freeze_all(false);
    gateway.advance(3000);
    assert_eq!(charged(&mut gateway), before);
    assert_eq!(slots(&mut gateway), owned);
    assert!(!logged(&gateway, FENCED));
    for flight in flights {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    assert_quiet(&mut gateway, 3);
}

#[test]
fn a_vm_that_was_taken_for_dead_publishes_again_and_ends_at_zero() {
    let mut gateway = bare(2, "");
    let flight = decoding(&mut gateway, chat(true).worker(1));
    let waiting = gateway.send(chat(true).worker(1));
    gateway.advance(500);
    let before = charged(&mut gateway);
    gateway.freeze_vm(1);
    gateway.advance(5000);
    assert_eq!(charged(&mut gateway), Charged::default());
    gateway.unfreeze_vm(1);
    gateway.advance(300);
    assert!(logged(&gateway, FENCED));
    assert_eq!(charged(&mut gateway), before);
    prefill_ok(&mut gateway);
    for flight in [flight, waiting] {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    assert_quiet(&mut gateway, 2);
    assert_eq!(endings(&mut gateway), 2);
}

#[test]
fn a_fenced_vm_that_ends_its_work_before_its_tick_leaves_nothing() {
    let mut gateway = bare(2, "");
    let flight = decoding(&mut gateway, chat(true).worker(1));
    gateway.advance(500);
    gateway.freeze_vm(1);
    gateway.advance(5000);
    // Another VM takes the slot that became free.
    gateway.reload_vm(0).unwrap();
    gateway.advance(500);
    gateway.unfreeze_vm(1);
    finish(&mut gateway, flight);
    let other = decoding(&mut gateway, chat(true).worker(1));
    gateway.advance(5000);
    assert_eq!(charged(&mut gateway).decode_running, 1);
    finish(&mut gateway, other);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn lost_races_lose_no_charge() {
    for races in [1, 3, 7, 8, 9, 20, 100] {
        let mut gateway = bare(2, "");
        gateway.shared().race_next_writes(races);
        let flight = decoding(&mut gateway, chat(true));
        let orphan = gateway.send(chat(true).worker(1));
        gateway.shared().race_next_writes(0);
        gateway.advance(200);
        let held = charged(&mut gateway);
        assert_eq!(
            (held.decode_running, held.prefill_requests),
            (1, 1),
            "{races}"
        );
        gateway.shared().race_next_writes(races);
        finish(&mut gateway, flight);
        gateway.disconnect(orphan);
        let call = last_pending(&gateway);
        gateway.answer(call.id, crate::stand::engine_error(500));
        gateway.outcome(flight).expect(200);
        gateway.shared().race_next_writes(0);
        gateway.advance(200);
        assert_quiet(&mut gateway, 2);
    }
}

#[test]
fn a_record_that_another_writer_broke_costs_no_request() {
    let mut gateway = healthy(2, "");
    gateway.run(chat(true)).expect(200);
    let keys = gateway.shared().keys(pd_wire::names::VM_ID);
    let ledger = keys.iter().find(|key| key.contains(".ledger.")).unwrap();
    for broken in [&b""[..], b"\xff", &[0; 4096]] {
        let key = ledger.clone();
        gateway
            .shared()
            .set(pd_wire::names::VM_ID, &key, broken, 0)
            .unwrap();
        gateway.run(chat(true).worker(1)).expect(200);
        gateway.shared().intrude_before_next_write(&key, broken);
        gateway.run(chat(true)).expect(200);
        assert_quiet(&mut gateway, 2);
    }
    let broken = *b"\xff\xff";
    gateway
        .shared()
        .set(pd_wire::names::VM_ID, "pd1.vms", &broken, 0)
        .unwrap();
    let flight = gateway.run(chat(true));
    flight.expect(200);
    gateway.advance(5000);
    assert_quiet(&mut gateway, 2);
}
