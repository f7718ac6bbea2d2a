//! A next release beside this one, on the same shared store.

use crate::stand::{
    assert_quiet, bare, charged, chat, decoding, endings, finish, last_pending, ledgers_at, logged,
    prefilled, status_at, variant,
};
use pd_wasm_tests::{Gateway, Module};
use pd_wire::control::Charged;

fn upgraded(workers: usize) -> Gateway {
    let mut gateway = bare(workers, "");
    gateway.advance(300);
    gateway.upgrade(Module::load(&variant("next"))).unwrap();
    gateway
}

#[test]
fn the_snapshot_goes_over_and_requests_of_both_finish() {
    let mut gateway = bare(2, "");
    gateway.advance(300);
    let prefilling = gateway.send(chat(true));
    let call = last_pending(&gateway);
    let streaming = decoding(&mut gateway, chat(true).worker(1));
    gateway.upgrade(Module::load(&variant("next"))).unwrap();
    gateway.advance(300);
    assert_eq!(status_at(&mut gateway, 0).format, 2);
    assert_eq!(status_at(&mut gateway, 0).topology.unwrap().sequence, 1);
    let fresh = decoding(&mut gateway, chat(true));
    // Each sees what the other has charged.
    assert_eq!(charged(&mut gateway).decode_running, 2);
    assert_eq!(charged(&mut gateway).decode_pending, 1);
    assert_eq!(gateway.drain_old_vms(), 2);
    gateway.answer(call.id, prefilled());
    for flight in [prefilling, streaming, fresh] {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    assert_eq!(gateway.drain_old_vms(), 0);
    gateway.advance(5000);
    assert_quiet(&mut gateway, 2);
    assert_eq!(endings(&mut gateway), 3);
    assert!(!logged(&gateway, "taken for dead"));
}

#[test]
fn what_old_vms_leave_behind_is_ignored_once_none_of_them_beats() {
    let mut gateway = bare(2, "");
    let left = gateway.send(chat(true));
    gateway.advance(300);
    gateway.disconnect(left);
    gateway.upgrade(Module::load(&variant("next"))).unwrap();
    gateway.advance(300);
    assert_eq!(charged(&mut gateway).prefill_requests, 1);
    // The orphan has no stream: the old VM goes with its call.
    assert_eq!(gateway.drain_old_vms(), 0);
    gateway.advance(5000);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn back_to_the_former_release_works_as_well() {
    let mut gateway = upgraded(2);
    let next = decoding(&mut gateway, chat(true));
    gateway.upgrade(Module::filter()).unwrap();
    gateway.advance(300);
    let old = decoding(&mut gateway, chat(true).worker(1));
    gateway.advance(100);
    for worker in 0..2 {
        assert_eq!(ledgers_at(&mut gateway, worker).total.decode_running, 2);
    }
    for flight in [next, old] {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    gateway.drain_old_vms();
    gateway.advance(5000);
    assert_eq!(charged(&mut gateway), Charged::default());
    assert_quiet(&mut gateway, 2);
}
