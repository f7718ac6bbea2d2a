//! Clients that leave: the work goes on, its KV is freed, its charges end with it.

use crate::stand::{
    D0, PARAMS, ROLE, TOKEN, assert_quiet, bare, charged, chat, config, counter, decoding, endings,
    engine_error, last_pending, one_pair, prefilled, push, status_at, stream_headers, target,
    topology, total, two_pairs,
};
use pd_wasm_tests::{Gateway, Script};
use pd_wire::control::Charged;

const GONE: &str = "gateway_request_model_fail_total{model=m,status=client_gone,status_code=499}";

#[test]
fn during_the_upload_or_the_wait_for_a_snapshot_nothing_is_left() {
    let mut gateway = Gateway::new(config(1, ""));
    let waiting = gateway.send(chat(true));
    let uploading = gateway.begin(chat(true));
    gateway.advance(500);
    gateway.disconnect(waiting);
    gateway.disconnect(uploading);
    push(&mut gateway, &topology(1, &two_pairs())).expect(200);
    gateway.advance(3000);
    assert!(gateway.calls().is_empty());
    assert_eq!(endings(&mut gateway), 2);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn during_the_prefill_the_late_reply_is_seen_and_its_kv_freed() {
    let mut gateway = one_pair("");
    let flight = gateway.send(chat(true).header("authorization", "Bearer client"));
    let call = last_pending(&gateway);
    gateway.advance(200);
    gateway.disconnect(flight);
    assert_eq!(counter(&mut gateway, GONE), 1);
    // The engine still works on it.
    let held = charged(&mut gateway);
    assert_eq!((held.prefill_requests, held.decode_pending), (1, 1));
    gateway.advance(5000);
    assert_eq!(status_at(&mut gateway, 0).live_flows, 1);

    gateway.answer(call.id, prefilled());
    let freeing = last_pending(&gateway);
    assert_eq!(target(&freeing), D0);
    assert_eq!(freeing.path(), "/v1/chat/completions");
    assert_eq!(freeing.header("authorization"), Some("Bearer client"));
    assert_ne!(freeing.header("x-request-id"), call.header("x-request-id"));
    let text = String::from_utf8(freeing.body.clone()).unwrap();
    assert!(
        text.contains(&format!("\"kv_transfer_params\":{PARAMS}")),
        "{text}"
    );
    assert_eq!(
        (&freeing.json()["temperature"], &freeing.json()["model"]),
        (&(-1).into(), &"m".into())
    );
    // The prompt is computed, its KV is not free yet.
    let held = charged(&mut gateway);
    assert_eq!((held.prefill_requests, held.active_tokens), (0, 0));
    assert!(held.kv_tokens > 0);

    gateway.answer(freeing.id, engine_error(400));
    assert_quiet(&mut gateway, 1);
    assert_eq!(endings(&mut gateway), 1);
    let freed = "gateway_pd_orphan_total{model=m,result=freed}";
    assert_eq!(counter(&mut gateway, freed), 1);
}

#[test]
fn whatever_becomes_of_the_work_the_charges_end_with_it() {
    let nothing_held = Script::answer(200, "{}");
    for (script, result) in [
        (engine_error(500), "prefill_failed"),
        (engine_error(503), "prefill_failed"),
        (Script::reset(), "prefill_failed"),
        (Script::answer(200, "no json"), "nothing_held"),
        (nothing_held, "nothing_held"),
    ] {
        let mut gateway = bare(1, "");
        let flight = gateway.send(chat(true));
        let call = last_pending(&gateway);
        gateway.disconnect(flight);
        gateway.answer(call.id, script);
        assert!(gateway.pending_calls().is_empty());
        let orphans = format!("gateway_pd_orphan_total{{model=m,result={result}}}");
        assert_eq!(counter(&mut gateway, &orphans), 1);
        assert_eq!(endings(&mut gateway), 1);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn a_prefill_that_never_answers_is_let_go_in_the_end() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
    gateway.other_engines(|_| Script::stall());
    let flight = gateway.send(chat(true));
    gateway.disconnect(flight);
    gateway.advance(2900);
    assert_ne!(charged(&mut gateway), Charged::default());
    gateway.advance(6000);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_freeing_call_that_hangs_or_fails_ends_too() {
    for script in [Script::stall(), Script::reset(), Script::refuse()] {
        let mut gateway = bare(1, "");
        let flight = gateway.send(chat(true));
        let call = last_pending(&gateway);
        gateway.disconnect(flight);
        gateway.other_engines(move |_| script.clone());
        gateway.answer(call.id, prefilled());
        gateway.advance(11_000);
        assert_quiet(&mut gateway, 1);
        assert_eq!(total(&mut gateway, "gateway_pd_orphan_total"), 1);
        assert_eq!(endings(&mut gateway), 1);
    }
}

#[test]
fn what_a_freeing_call_is_answered_is_not_read() {
    let mut gateway = bare(1, "");
    let flight = gateway.send(chat(true));
    let call = last_pending(&gateway);
    gateway.disconnect(flight);
    gateway.answer(call.id, prefilled());
    let freeing = last_pending(&gateway);
    let before = gateway.memory_pages(0);
    gateway.answer(freeing.id, Script::answer(400, vec![b' '; 20 << 20]));
    assert_eq!(gateway.memory_pages(0), before);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn orphans_are_capped_and_those_beyond_are_let_go_at_once() {
    let mut gateway = bare(1, r#"{"maxOrphans":2}"#);
    for _ in 0..4 {
        let flight = gateway.send(chat(true));
        gateway.disconnect(flight);
    }
    assert_eq!(charged(&mut gateway).prefill_requests, 2);
    assert_eq!(endings(&mut gateway), 4);
    for call in gateway.pending_calls() {
        gateway.answer(call.id, engine_error(500));
    }
    assert_quiet(&mut gateway, 1);
    // The cap is free again.
    let flight = gateway.send(chat(true));
    gateway.disconnect(flight);
    assert_eq!(charged(&mut gateway).prefill_requests, 1);
}

#[test]
fn during_the_decode_the_leg_is_cut_and_all_is_given_back() {
    for step in 0..4 {
        let mut gateway = one_pair("");
        let flight = decoding(&mut gateway, chat(true));
        assert_eq!(charged(&mut gateway).decode_running, 1);
        if step > 0 {
            stream_headers(&mut gateway, flight);
        }
        if step > 1 {
            gateway.respond_data(flight, ROLE.as_bytes(), false);
        }
        if step > 2 {
            gateway.respond_data(flight, TOKEN.as_bytes(), false);
        }
        gateway.disconnect(flight);
        assert!(gateway.outcome(flight).upstream().cut);
        assert_eq!(counter(&mut gateway, GONE), 1);
        assert!(gateway.pending_calls().is_empty());
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn a_client_that_leaves_during_the_retry_orphans_the_retry() {
    let mut gateway = bare(1, "");
    let flight = gateway.send(chat(true));
    let first = last_pending(&gateway);
    gateway.answer(first.id, engine_error(503));
    gateway.disconnect(flight);
    assert_eq!(charged(&mut gateway).prefill_requests, 1);
    let second = last_pending(&gateway);
    gateway.answer(second.id, prefilled());
    let freeing = last_pending(&gateway);
    gateway.answer(freeing.id, engine_error(400));
    assert_quiet(&mut gateway, 1);
    assert_eq!(endings(&mut gateway), 1);
}
