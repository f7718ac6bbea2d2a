//! Prefill failures: retried once on another roleset, then the fallback, then the right answer.

use crate::stand::{
    P0, P1, assert_quiet, bare, chat, counter, decoding, endings, engine_error, finish, healthy,
    last_pending, one_pair, prefill_ok, push, target, total, with_combined,
};
use pd_wasm_tests::{CallId, Gateway, Script};

/// The failures after which another pair is tried, with the class each is counted by.
fn retriable() -> Vec<(Script, &'static str)> {
    vec![
        (Script::refuse(), "transport"),
        (Script::reset(), "transport"),
        (engine_error(429), "http_status"),
        (engine_error(502), "http_status"),
        (engine_error(503), "http_status"),
    ]
}

fn other(pod: &str) -> &'static str {
    if pod == P0 { P1 } else { P0 }
}

#[test]
fn a_failed_prefill_is_sent_again_to_the_other_roleset() {
    for (script, class) in retriable() {
        let mut gateway = bare(1, "");
        let flight = gateway.send(chat(true));
        let first = last_pending(&gateway);
        gateway.answer(first.id, script);
        let second = last_pending(&gateway);
        assert_eq!(target(&second), other(&target(&first)));
        assert_ne!(first.header("x-request-id"), second.header("x-request-id"));
        assert_eq!(first.body, second.body);
        prefill_ok(&mut gateway);
        let outcome = gateway.outcome(flight);
        let leg = outcome.upstream();
        assert_eq!(leg.header("x-request-id"), second.header("x-request-id"));
        assert_eq!(
            leg.header("target-pod")
                .unwrap()
                .rsplit_once('.')
                .unwrap()
                .0,
            target(&second).rsplit_once('.').unwrap().0,
        );
        finish(&mut gateway, flight);
        let outcome = gateway.outcome(flight);
        assert_eq!(
            outcome.expect(200).header("request-id"),
            second.header("x-request-id")
        );
        assert_eq!(total(&mut gateway, "gateway_pd_prefill_retry_total"), 1);
        let failure = format!(
            "gateway_pd_prefill_failure_total{{model=m,class={class},stage=before_response}}"
        );
        assert_eq!(
            counter(&mut gateway, &failure),
            1,
            "{:#?}",
            gateway.meters().names()
        );
        assert_eq!(endings(&mut gateway), 1);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn when_every_roleset_failed_the_answer_is_a_503_with_the_marker() {
    for (script, _) in retriable() {
        let mut gateway = bare(1, "");
        let again = script.clone();
        gateway.other_engines(move |_| again.clone());
        let outcome = gateway.run(chat(true));
        assert_eq!(
            outcome.expect(503).header("x-error-pd-prefill"),
            Some("true")
        );
        assert!(outcome.json()["error"]["message"].is_string());
        assert!(outcome.upstream.is_none());
        assert_eq!(outcome.calls.len(), 2);
        assert_eq!(endings(&mut gateway), 1);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn with_one_roleset_there_is_no_retry() {
    let mut gateway = one_pair("");
    gateway.other_engines(|_| Script::refuse());
    let outcome = gateway.run(chat(true));
    assert_eq!(outcome.expect(503).calls.len(), 1);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn retries_can_be_switched_off() {
    let mut gateway = bare(1, r#"{"prefillRetries":0}"#);
    gateway.other_engines(|_| Script::refuse());
    assert_eq!(gateway.run(chat(true)).expect(503).calls.len(), 1);
}

#[test]
fn after_the_retry_a_combined_pod_serves_unless_strict() {
    for (plugin, status) in [("", 200), (r#"{"prefillFallback":"strict"}"#, 503)] {
        let mut gateway = bare(1, plugin);
        push(&mut gateway, &with_combined(2)).expect(200);
        gateway.other_engines(|sent| {
            if sent.cluster.is_some() {
                Script::reset()
            } else {
                Script::answer(200, "{}")
            }
        });
        let outcome = gateway.run(chat(false));
        outcome.expect(status);
        assert_eq!(outcome.calls.len(), 2);
        let combined = (status == 200).then_some("c");
        assert_eq!(outcome.header("target-pod"), combined);
        assert_quiet(&mut gateway, 1);
    }
    let mut gateway = bare(1, r#"{"prefillFallback":"decode"}"#);
    gateway.other_engines(|sent| {
        if sent.cluster.is_some() {
            Script::reset()
        } else {
            Script::answer(200, "{}")
        }
    });
    let outcome = gateway.run(chat(false));
    assert!(
        outcome
            .expect(200)
            .header("target-pod")
            .unwrap()
            .ends_with("-d")
    );
    assert_eq!(
        outcome.upstream().body,
        crate::stand::chat_body(false).as_bytes()
    );
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_silent_prefill_is_given_up_in_time_and_the_last_answer_is_a_504() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
    gateway.other_engines(|_| Script::stall());
    let sent_at = gateway.now_ms();
    let outcome = gateway.run(chat(true));
    assert_eq!(
        outcome.expect(504).header("x-error-pd-prefill"),
        Some("true")
    );
    let took = outcome.ended_at_ms - sent_at;
    assert!((6000..=6300).contains(&took), "{took}");
    assert_eq!(outcome.calls.len(), 2);
    assert_ne!(target(&outcome.calls[0]), target(&outcome.calls[1]));
    gateway.advance(10_000);
    assert_eq!(endings(&mut gateway), 1);
    assert_quiet(&mut gateway, 1);
}

/// A reply that comes after its leg was given up belongs to nobody: never to the next attempt.
fn late_reply_is_not_taken_for_the_next_ones(gateway: &mut Gateway, late: Script) {
    let flight = gateway.send(chat(true));
    let first = last_pending(gateway);
    gateway.advance(3100);
    let second = last_pending(gateway);
    assert_ne!(first.id, second.id);
    gateway.answer(first.id, late);
    let outcome = gateway.outcome(flight);
    assert_eq!((outcome.status, outcome.upstream.is_some()), (None, false));
    gateway.answer(second.id, crate::stand::prefilled());
    assert!(gateway.outcome(flight).upstream().ended);
    finish(gateway, flight);
    gateway.outcome(flight).expect(200);
}

#[test]
fn a_late_reply_is_not_taken_for_the_retrys() {
    for late in [
        crate::stand::prefilled(),
        engine_error(500),
        Script::reset(),
    ] {
        let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
        late_reply_is_not_taken_for_the_next_ones(&mut gateway, late);
        // The call that frees the late leg's KV is the only one left, if any.
        for call in gateway.pending_calls() {
            assert_eq!(call.json()["temperature"], -1);
            gateway.answer(call.id, engine_error(400));
        }
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn nor_when_there_are_too_many_orphans_already() {
    for late in [
        crate::stand::prefilled(),
        engine_error(500),
        Script::reset(),
    ] {
        let mut gateway = bare(1, r#"{"prefillRequestTimeout":3,"maxOrphans":1}"#);
        let left = gateway.send(chat(true));
        gateway.advance(1);
        gateway.disconnect(left);
        let stuck: CallId = last_pending(&gateway).id;
        late_reply_is_not_taken_for_the_next_ones(&mut gateway, late);
        gateway.answer(stuck, engine_error(500));
        assert_quiet(&mut gateway, 1);
        assert_eq!(endings(&mut gateway), 2);
    }
}

#[test]
fn any_other_prefill_answer_is_the_clients_answer() {
    for status in [400, 401, 404, 413, 422, 500, 501] {
        let mut gateway = bare(1, "");
        gateway.other_engines(move |_| engine_error(status));
        let outcome = gateway.run(chat(true));
        assert_eq!(
            outcome.expect(status).header("x-error-pd-prefill"),
            Some("true")
        );
        assert_eq!(outcome.json()["error"]["message"], "engine says no");
        assert_eq!(outcome.calls.len(), 1);
        assert!(outcome.upstream.is_none());
        assert_eq!(endings(&mut gateway), 1);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn a_prefill_answer_that_is_no_object_is_a_502() {
    for reply in ["", "[]", "null", "{", "<html>", "{}x"] {
        let mut gateway = bare(1, "");
        gateway.other_engines(move |_| Script::answer(200, reply));
        let outcome = gateway.run(chat(true));
        assert_eq!(
            outcome.expect(502).header("x-error-pd-prefill"),
            Some("true")
        );
        assert_eq!(outcome.calls.len(), 1);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn a_model_that_leaves_during_its_prefill_is_still_a_failed_prefill() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":3}"#);
    let refused = gateway.send(chat(true));
    let call = last_pending(&gateway);
    let late = gateway.send(chat(true));
    let mut empty = crate::stand::topology(2, &[]);
    empty["models"] = serde_json::json!([]);
    push(&mut gateway, &empty).expect(200);
    gateway.advance(200);
    gateway.answer(call.id, engine_error(503));
    gateway.advance(3000);
    for (flight, status) in [(refused, 503), (late, 504)] {
        let outcome = gateway.outcome(flight);
        let marker = outcome.expect(status).header("x-error-pd-prefill");
        assert_eq!(marker, Some("true"));
    }
    gateway.advance(10_000);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn retries_stay_within_their_budget() {
    let mut gateway = bare(1, r#"{"prefillRequestTimeout":600}"#);
    let flights: Vec<_> = (0..10).map(|_| gateway.send(chat(true))).collect();
    for call in gateway.pending_calls() {
        gateway.answer(call.id, engine_error(503));
    }
    // Three at a time: 20 % of ten would be two.
    assert_eq!(total(&mut gateway, "gateway_pd_prefill_retry_total"), 3);
    let refused = flights
        .iter()
        .filter(|flight| gateway.outcome(**flight).status == Some(503));
    assert_eq!(refused.count(), 7);
    for call in gateway.pending_calls() {
        gateway.answer(call.id, crate::stand::prefilled());
    }
    // The budget is free again.
    gateway.send(chat(true));
    let call = last_pending(&gateway);
    gateway.answer(call.id, engine_error(503));
    assert_eq!(total(&mut gateway, "gateway_pd_prefill_retry_total"), 4);
}

#[test]
fn a_cluster_that_takes_no_call_is_a_503_not_a_hang() {
    let mut config = crate::stand::config(1, "");
    config.clusters = Some(vec!["other".into()]);
    let mut gateway = Gateway::new(config);
    push(
        &mut gateway,
        &crate::stand::topology(1, &crate::stand::two_pairs()),
    )
    .expect(200);
    let outcome = gateway.run(chat(true));
    assert_eq!(
        outcome.expect(503).header("x-error-pd-prefill"),
        Some("true")
    );
    assert_eq!(outcome.ended_at_ms, outcome.headers_at_ms);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_request_after_a_failure_is_served_as_before() {
    let mut gateway = healthy(1, "");
    gateway.engine(P0, |_| Script::reset());
    for _ in 0..20 {
        gateway.run(chat(true)).expect(200);
    }
    assert_eq!(endings(&mut gateway), 20);
    let flight = {
        gateway.engine(P0, crate::stand::vllm);
        gateway.run(chat(true))
    };
    flight.expect(200);
    assert_quiet(&mut gateway, 1);
    let mut gateway = bare(1, "");
    let flight = decoding(&mut gateway, chat(false));
    gateway.disconnect(flight);
    assert_quiet(&mut gateway, 1);
}
