//! A changed plugin configuration with requests in flight.

use crate::stand::{
    assert_quiet, bare, charged, chat, decoding, endings, engine_error, finish, last_pending,
    prefill_ok, prefilled, status_at,
};
use pd_wasm_tests::{CallState, Gateway, PluginId};

fn reconfigure(gateway: &mut Gateway, plugin: &str) {
    gateway
        .reconfigure(PluginId::default(), plugin.as_bytes())
        .unwrap();
}

#[test]
fn requests_in_flight_finish_under_their_own_settings() {
    let mut gateway = bare(2, r#"{"prefillRequestTimeout":100}"#);
    let prefilling = gateway.send(chat(true));
    let streaming = decoding(&mut gateway, chat(true).worker(1));
    let uploading = gateway.begin(chat(true));
    reconfigure(&mut gateway, r#"{"prefillRequestTimeout":1}"#);
    let fresh = gateway.send(chat(true).worker(1));
    assert_eq!(gateway.drain_old_roots(), 2);
    gateway.body(uploading, crate::stand::chat_body(true).as_bytes(), true);
    let calls = gateway.pending_calls();
    assert_eq!(calls.len(), 3);
    for call in calls {
        gateway.answer(call.id, prefilled());
    }
    for flight in [prefilling, streaming, uploading, fresh] {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    assert_eq!(gateway.drain_old_roots(), 0);
    assert_eq!(status_at(&mut gateway, 0).knobs["prefillRequestTimeout"], 1);
    let after = decoding(&mut gateway, chat(true));
    finish(&mut gateway, after);
    assert_quiet(&mut gateway, 2);
    assert_eq!(endings(&mut gateway), 5);
}

#[test]
fn a_call_whose_root_is_gone_is_missed_in_time_and_its_charges_given_back() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
    let flight = gateway.send(chat(true));
    let call = last_pending(&gateway);
    gateway.disconnect(flight);
    reconfigure(&mut gateway, "");
    assert_eq!(gateway.drain_old_roots(), 0);
    assert_eq!(gateway.calls()[call.id.0].state, CallState::Abandoned);
    assert_eq!(charged(&mut gateway).prefill_requests, 1);
    gateway.advance(9000);
    assert_quiet(&mut gateway, 1);
    assert_eq!(endings(&mut gateway), 1);
}

#[test]
fn a_freeing_call_whose_root_is_gone_is_missed_too() {
    let mut gateway = bare(1, "");
    let flight = gateway.send(chat(true));
    gateway.disconnect(flight);
    prefill_ok(&mut gateway);
    reconfigure(&mut gateway, "");
    gateway.drain_old_roots();
    gateway.advance(11_000);
    assert_quiet(&mut gateway, 1);
}

/// The tick that finds a prefill leg late may be another root's: the retry must not depend on
/// that root, which may be the one to go.
#[test]
fn a_retry_outlives_the_root_whose_tick_found_the_first_leg_late() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
    // Keeps the old root alive for a while.
    let old = decoding(&mut gateway, chat(true));
    gateway.advance(50);
    reconfigure(&mut gateway, r#"{"prefillRequestTimeout":3}"#);
    // Late at a time when the old root ticks first.
    gateway.advance(20);
    let flight = gateway.send(chat(true));
    let first = last_pending(&gateway);
    gateway.advance(3060);
    assert_eq!(last_pending(&gateway).id, first.id);
    // The flow's own root sends the retry.
    gateway.advance(100);
    let second = last_pending(&gateway);
    assert_ne!(first.id, second.id);
    finish(&mut gateway, old);
    assert_eq!(gateway.drain_old_roots(), 0);
    assert_eq!(gateway.calls()[second.id.0].state, CallState::Pending);
    gateway.answer(second.id, prefilled());
    assert!(gateway.outcome(flight).upstream.is_some());
    finish(&mut gateway, flight);
    gateway.outcome(flight).expect(200);
    gateway.advance(10_000);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn many_changes_under_load_lose_nothing() {
    let mut gateway = bare(2, "");
    let mut flights = Vec::new();
    for round in 0..20_usize {
        flights.push(gateway.send(chat(true).worker(round % 2)));
        if round % 3 == 0 {
            reconfigure(&mut gateway, "");
        }
        if let Some(call) = gateway.pending_calls().first() {
            let script = if round % 5 == 0 {
                engine_error(503)
            } else {
                prefilled()
            };
            gateway.answer(call.id, script);
        }
        gateway.advance(70);
        gateway.drain_old_roots();
    }
    for _ in 0..100 {
        let Some(call) = gateway.pending_calls().pop() else {
            break;
        };
        gateway.answer(call.id, prefilled());
    }
    for flight in &flights {
        finish(&mut gateway, *flight);
        gateway.outcome(*flight).expect(200);
    }
    assert_eq!(gateway.drain_old_roots(), 0);
    assert_quiet(&mut gateway, 2);
    assert_eq!(endings(&mut gateway), 20);
}

#[test]
fn a_second_listener_with_the_same_config_changes_nothing() {
    let mut gateway = bare(2, "");
    let second = gateway.add_plugin(b"").unwrap();
    let one = decoding(&mut gateway, chat(true));
    let two = decoding(&mut gateway, chat(true).plugin(second));
    gateway.advance(5000);
    assert_eq!(charged(&mut gateway).decode_running, 2);
    for flight in [one, two] {
        finish(&mut gateway, flight);
    }
    assert_quiet(&mut gateway, 2);
}

/// A VM is judged dead by twenty ticks of its observer, and the roots of one VM tick one by one.
#[test]
fn more_roots_do_not_make_a_vm_judge_sooner() {
    let mut gateway = bare(2, "");
    gateway.advance(1000);
    for _ in 0..3 {
        gateway.advance(25);
        gateway.add_plugin(b"").unwrap();
    }
    let flight = decoding(&mut gateway, chat(true).worker(1));
    gateway.advance(500);
    gateway.freeze_vm(1);
    gateway.advance(1700);
    gateway.unfreeze_vm(1);
    gateway.advance(300);
    assert!(!crate::stand::logged(&gateway, "taken for dead"));
    finish(&mut gateway, flight);
    assert_quiet(&mut gateway, 2);
}
