//! Every way a request can end counts one ending and leaves nothing behind.

use crate::stand::{
    ERROR, ROLE, TOKEN, assert_quiet, bare, chat, counter, decoding, endings, engine_error, finish,
    freed, healthy, last_pending, one_pair, prefilled, stream_headers,
};
use pd_wasm_tests::{Ending, Exchange, Gateway, Script};

type Way = fn(&mut Gateway);

/// Ways to end, with the labels each is counted under.
const WAYS: &[(&str, Way, &str)] = &[
    (
        "an answer",
        |gateway| {
            let flight = decoding(gateway, chat(true));
            finish(gateway, flight);
        },
        "success_total{model=m,status=gateway_request_success,status_code=200}",
    ),
    (
        "an answer without a body",
        |gateway| {
            let flight = decoding(gateway, chat(false));
            gateway.respond_headers(flight, &[(":status", "204")], true);
        },
        "success_total{model=m,status=gateway_request_success,status_code=204}",
    ),
    (
        "an engine's error",
        |gateway| {
            let flight = decoding(gateway, chat(false));
            gateway.respond_headers(flight, &[(":status", "500")], false);
            gateway.respond_data(flight, b"{}", true);
            freed(gateway);
        },
        "fail_total{model=m,status=engine_error,status_code=500}",
    ),
    (
        "a bad body",
        |gateway| {
            gateway.run(Exchange::post("/v1/completions", "{"));
        },
        "fail_total{model=,status=bad_request,status_code=400}",
    ),
    (
        "an unknown model",
        |gateway| {
            gateway.run(Exchange::post("/v1/completions", r#"{"model":"x"}"#));
        },
        "fail_total{model=,status=model_not_found,status_code=404}",
    ),
    (
        "a failed prefill",
        |gateway| {
            gateway.send(chat(true));
            let call = last_pending(gateway);
            gateway.answer(call.id, engine_error(400));
        },
        "fail_total{model=m,status=pd_prefill_failure,status_code=400}",
    ),
    (
        "a lost prefill",
        |gateway| {
            gateway.send(chat(true));
            let call = last_pending(gateway);
            gateway.answer(call.id, Script::reset());
        },
        "fail_total{model=m,status=pd_prefill_failure,status_code=503}",
    ),
    (
        "a lost decode leg",
        |gateway| {
            let flight = decoding(gateway, chat(true));
            gateway.respond_reset(flight);
            freed(gateway);
        },
        "fail_total{model=m,status=pd_decode_failure,status_code=503}",
    ),
    (
        "a hand-over that failed",
        |gateway| {
            let flight = decoding(gateway, chat(true));
            stream_headers(gateway, flight);
            gateway.respond_data(flight, ERROR.as_bytes(), false);
            freed(gateway);
        },
        "fail_total{model=m,status=pd_decode_failure,status_code=502}",
    ),
    (
        "a client that left while the prompt was computed",
        |gateway| {
            let flight = gateway.send(chat(true));
            gateway.disconnect(flight);
            let call = last_pending(gateway);
            gateway.answer(call.id, engine_error(500));
        },
        "fail_total{model=m,status=client_gone,status_code=499}",
    ),
    (
        "a client that left the stream",
        |gateway| {
            let flight = decoding(gateway, chat(true));
            stream_headers(gateway, flight);
            gateway.respond_data(flight, TOKEN.as_bytes(), false);
            gateway.disconnect(flight);
        },
        "fail_total{model=m,status=client_gone,status_code=499}",
    ),
    (
        "a silent engine",
        |gateway| {
            let flight = decoding(gateway, chat(true));
            gateway.advance(901_000);
            assert_eq!(gateway.outcome(flight).ending, Ending::Complete);
            freed(gateway);
        },
        "fail_total{model=m,status=pd_decode_watchdog,status_code=504}",
    ),
];

#[test]
fn each_way_counts_one_ending_under_its_own_label() {
    for (name, way, label) in WAYS {
        let mut gateway = one_pair("");
        way(&mut gateway);
        let name_of_counter = format!("gateway_request_model_{label}");
        assert_eq!(
            counter(&mut gateway, &name_of_counter),
            1,
            "{name}: {:#?}",
            gateway.meters().names()
        );
        assert_eq!(endings(&mut gateway), 1, "{name}");
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn a_stream_broken_by_its_engine_counts_once() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    gateway.respond_reset(flight);
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    assert_eq!(endings(&mut gateway), 1);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn two_thousand_requests_leave_no_memory_and_no_flow_behind() {
    let mut gateway = healthy(1, "");
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "a".repeat(8 << 10));
    let mut pages = 0;
    for number in 0..2000 {
        let flight = gateway.send(Exchange::post("/v1/completions", body.clone()));
        if number % 7 == 0 {
            gateway.disconnect(flight);
        } else {
            gateway.settle(flight, 1000);
        }
        gateway.advance(10);
        if number == 600 {
            pages = gateway.memory_pages(0);
        }
    }
    assert_eq!(gateway.memory_pages(0), pages);
    assert_eq!(gateway.live_streams(0), 0);
    assert_eq!(endings(&mut gateway), 2000);
    gateway.advance(1000);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn ids_are_never_used_twice_by_any_worker() {
    let mut gateway = bare(3, "");
    let mut ids = std::collections::BTreeSet::new();
    for number in 0..60 {
        gateway.send(chat(true).worker(number % 3).header("x-request-id", "same"));
        let call = last_pending(&gateway);
        assert!(ids.insert(call.header("x-request-id").unwrap().to_owned()));
        if number % 2 == 0 {
            gateway.answer(call.id, engine_error(503));
        } else {
            gateway.answer(call.id, prefilled());
        }
    }
}
