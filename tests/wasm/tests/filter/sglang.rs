//! SGLang: both legs at once, as the proxy sees them.

use crate::stand::{
    DONE, ROLE, TOKEN, assert_quiet, chat, chat_body, config, endings, engine_error, good,
    pairs_of, prefilled, push, stream_headers, topology, two_pairs,
};
use pd_wasm_tests::{Ending, Flight, Gateway, GatewayConfig, PluginId, Script};
use serde_json::json;

/// A request both of whose legs are out.
fn both_out(gateway: &mut Gateway, stream: bool) -> Flight {
    let flight = gateway.send(chat(stream));
    assert_eq!(gateway.pending_calls().len(), 1);
    assert!(gateway.outcome(flight).upstream().ended);
    flight
}

/// Answers every call well until nothing is left.
fn settle(gateway: &mut Gateway) {
    for _ in 0..16 {
        match gateway.pending_calls().pop() {
            Some(call) => gateway.answer(call.id, good(&call)),
            None => gateway.advance(700),
        }
    }
    assert_quiet(gateway, 1);
}

#[test]
fn both_legs_are_out_before_either_is_answered() {
    let mut gateway = pairs_of(1, "sglang", "");
    let flight = both_out(&mut gateway, true);
    let call = gateway.pending_calls().pop().unwrap();
    let decode = gateway.outcome(flight).upstream().clone();
    let sent = String::from_utf8(decode.body.clone()).unwrap();
    let (members, rest) = sent.split_once(r#","model":"#).unwrap();
    assert_eq!(format!(r#"{{"model":{rest}"#), chat_body(true));
    assert!(
        members.starts_with(r#"{"bootstrap_host":"10.0."#),
        "{members}"
    );
    let (prefill, decode_body) = (call.json(), decode.json());
    for member in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
        assert_eq!(prefill[member], decode_body[member], "{member}");
    }
    assert_eq!(
        (&prefill["max_tokens"], &prefill["stream"]),
        (&1.into(), &false.into())
    );
    assert_eq!(
        decode.header("content-length").unwrap(),
        sent.len().to_string()
    );
    gateway.answer(call.id, prefilled());
    crate::stand::finish(&mut gateway, flight);
    gateway.outcome(flight).expect(200);
    assert_quiet(&mut gateway, 1);
    assert_eq!(gateway.calls().len(), 1);
}

#[test]
fn an_answer_that_is_no_http_is_a_broken_connection_and_not_the_engines_status() {
    let mut gateway = pairs_of(1, "sglang", "");
    let flight = both_out(&mut gateway, true);
    let call = gateway.pending_calls().pop().unwrap();
    // The proxy's own words, so without the time that an engine took.
    let body = "upstream connect error or disconnect/reset before headers. \
                reset reason: protocol error";
    gateway.answer(call.id, Script::answer(502, body));
    let outcome = gateway.outcome(flight).clone();
    assert_eq!(outcome.status, Some(503), "{outcome:#?}");
    assert_eq!(outcome.header("x-error-pd-prefill"), Some("true"));
    let text = String::from_utf8(outcome.body()).unwrap();
    assert!(!text.contains("upstream"), "{text}");
    settle(&mut gateway);
}

#[test]
fn headers_wait_for_the_first_chunk_so_that_a_failed_prefill_has_a_status() {
    for stream in [false, true] {
        let mut gateway = pairs_of(1, "sglang", "");
        let flight = both_out(&mut gateway, stream);
        if stream {
            stream_headers(&mut gateway, flight);
            gateway.respond_data(flight, ROLE.as_bytes(), false);
        } else {
            let headers = [(":status", "200"), ("content-type", "application/json")];
            gateway.respond_headers(flight, &headers, false);
        }
        assert_eq!(gateway.outcome(flight).status, None);
        let call = gateway.pending_calls().pop().unwrap();
        gateway.answer(call.id, engine_error(400));
        let outcome = gateway.outcome(flight);
        outcome.expect(400);
        assert_eq!(outcome.header("x-error-pd-prefill"), Some("true"));
        assert_eq!(outcome.json()["error"]["message"], "engine says no");
        settle(&mut gateway);
        assert_eq!(endings(&mut gateway), 1);
    }
}

/// How the error answer of a decode engine comes: its headers at the end of it, its body with
/// its end, or its body without.
const FAILS: [fn(&mut Gateway, Flight); 3] = [
    |gateway, flight| gateway.respond_headers(flight, &[(":status", "500")], true),
    |gateway, flight| {
        gateway.respond_headers(flight, &[(":status", "500")], false);
        gateway.respond_data(flight, b"{}", true);
    },
    |gateway, flight| {
        gateway.respond_headers(flight, &[(":status", "500")], false);
        gateway.respond_data(flight, b"{}", false);
    },
];

#[test]
fn of_two_failed_legs_the_client_hears_of_the_prefill() {
    for fail in FAILS {
        let mut gateway = pairs_of(1, "sglang", "");
        let flight = both_out(&mut gateway, false);
        fail(&mut gateway, flight);
        assert_eq!(gateway.outcome(flight).status, None);
        let call = gateway.pending_calls().pop().unwrap();
        gateway.answer(call.id, engine_error(429));
        let outcome = gateway.outcome(flight);
        outcome.expect(429);
        assert_eq!(outcome.header("x-error-pd-prefill"), Some("true"));
        settle(&mut gateway);
        assert_eq!(endings(&mut gateway), 1);
    }
}

#[test]
fn an_error_of_the_decode_engine_alone_passes_after_a_moment() {
    for (way, fail) in FAILS.into_iter().enumerate() {
        for prefill_answers in [false, true] {
            let mut gateway = pairs_of(1, "sglang", "");
            let flight = both_out(&mut gateway, false);
            fail(&mut gateway, flight);
            assert_eq!(gateway.outcome(flight).status, None);
            if prefill_answers {
                let call = gateway.pending_calls().pop().unwrap();
                gateway.answer(call.id, prefilled());
            } else {
                gateway.advance(350);
            }
            assert_eq!(gateway.outcome(flight).status, Some(500));
            if way == 2 {
                gateway.respond_data(flight, b"!", true);
            }
            let outcome = gateway.outcome(flight);
            assert_eq!(outcome.ending, Ending::Complete);
            assert_eq!(outcome.text(), ["", "{}", "{}!"][way]);
            assert_eq!(outcome.header("x-error-pd-prefill"), None);
            settle(&mut gateway);
            assert_eq!(endings(&mut gateway), 1);
        }
    }
}

#[test]
fn a_stream_that_has_begun_is_cut() {
    let mut gateway = pairs_of(1, "sglang", "");
    let flight = both_out(&mut gateway, true);
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    assert_eq!(gateway.outcome(flight).status, Some(200));
    let call = gateway.pending_calls().pop().unwrap();
    gateway.answer(call.id, Script::reset());
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    settle(&mut gateway);
    assert_eq!(endings(&mut gateway), 1);
}

#[test]
fn a_call_that_cannot_leave_keeps_the_request_too() {
    let mut gateway = Gateway::new(GatewayConfig {
        clusters: Some(Vec::new()),
        ..config(1, "")
    });
    let mut pods = two_pairs();
    for pod in &mut pods {
        pod["engine"] = json!("sglang");
    }
    push(&mut gateway, &topology(1, &pods)).expect(200);
    let flight = gateway.send(chat(true));
    let outcome = gateway.outcome(flight);
    outcome.expect(503);
    assert_eq!(outcome.header("x-error-pd-prefill"), Some("true"));
    assert!(outcome.upstream.is_none());
    settle(&mut gateway);
    assert_eq!(endings(&mut gateway), 1);
}

#[test]
fn a_root_that_is_drained_meanwhile_still_hears_of_both_legs() {
    let mut gateway = pairs_of(1, "sglang", "");
    let flight = both_out(&mut gateway, true);
    gateway.reconfigure(PluginId::default(), b"{}").unwrap();
    assert_eq!(gateway.drain_old_roots(), 1);
    let call = gateway.pending_calls().pop().unwrap();
    stream_headers(&mut gateway, flight);
    gateway.answer(call.id, prefilled());
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}{DONE}").as_bytes(), true);
    gateway.outcome(flight).expect(200);
    assert_eq!(gateway.drain_old_roots(), 0);
    settle(&mut gateway);
    assert_eq!(endings(&mut gateway), 1);
}
