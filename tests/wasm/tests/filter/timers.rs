//! The three decode timers on a driven clock: never early, late by a tick and 250 ms at most.

use crate::stand::{
    DONE, ROLE, TOKEN, assert_quiet, chat, counter, decoding, endings, freed, one_pair, pod, push,
    stream_headers, topology, total, two_pairs,
};
use pd_wasm_tests::{Ending, Exchange, Flight, Gateway, Script};
use pd_wire::profile::ModelConfig;
use serde_json::json;

/// How much later than its limit a timer may fire, in ms.
const LATE_MS: u64 = 100 + 250;

/// Asserts that the request goes on for `limit_ms`, and is over soon after.
fn assert_ends_at(gateway: &mut Gateway, flight: Flight, limit_ms: u64) {
    let from = gateway.now_ms();
    gateway.advance(limit_ms - 1);
    assert_eq!(gateway.outcome(flight).ending, Ending::Open, "early");
    gateway.advance(LATE_MS + 1);
    let outcome = gateway.outcome(flight);
    assert_ne!(outcome.ending, Ending::Open, "late");
    println!("{limit_ms} ms: {} ms", outcome.ended_at_ms - from);
}

/// Asserts a 504 that says this, its one ending, and that nothing is left.
fn assert_504(gateway: &mut Gateway, flight: Flight, says: &str, phase: &str) {
    let outcome = gateway.outcome(flight);
    let marker = outcome.expect(504).header("x-error-pd-decode");
    assert_eq!(marker, Some("true"));
    assert!(outcome.header("request-id").is_some());
    let error = &outcome.json()["error"];
    assert_eq!(error["message"].as_str(), Some(says));
    assert_eq!(error["type"], "api_error");
    assert!(outcome.upstream().cut);
    assert_counted(gateway, phase);
}

/// Asserts one ending, by the watchdog, and that nothing is left.
fn assert_counted(gateway: &mut Gateway, phase: &str) {
    let failed =
        "gateway_request_model_fail_total{model=m,status=pd_decode_watchdog,status_code=504}";
    assert_eq!(counter(gateway, failed), 1);
    let timer = format!("gateway_pd_decode_watchdog_total{{model=m,phase={phase}}}");
    assert_eq!(counter(gateway, &timer), 1);
    assert_eq!(endings(gateway), 1);
    // vLLM knows no abort.
    assert_eq!(total(gateway, "gateway_pd_decode_abort_total"), 0);
    if !gateway.pending_calls().is_empty() {
        freed(gateway);
    }
    assert_quiet(gateway, 1);
}

#[test]
fn the_first_chunk_is_awaited_from_the_prefills_success() {
    for held in [false, true] {
        let mut gateway = one_pair(r#"{"decodeFirstResponseTimeout":1.5}"#);
        let flight = gateway.send(chat(true));
        gateway.advance(5000);
        crate::stand::prefill_ok(&mut gateway);
        if held {
            stream_headers(&mut gateway, flight);
        }
        assert_ends_at(&mut gateway, flight, 1500);
        let says = "decode pod r0-d did not start responding within 1.5 s";
        assert_504(&mut gateway, flight, says, "first_response");
    }
}

#[test]
fn a_whole_answer_is_awaited_from_the_prefills_success() {
    let mut gateway = one_pair(r#"{"decodeResponseTimeout":0.7}"#);
    let flight = decoding(&mut gateway, chat(false));
    assert_ends_at(&mut gateway, flight, 700);
    let says = "decode pod r0-d did not finish responding within 0.7 s";
    assert_504(&mut gateway, flight, says, "first_response");

    // Half an answer is none.
    let mut gateway = one_pair(r#"{"decodeResponseTimeout":0.7}"#);
    let flight = decoding(&mut gateway, chat(false));
    let headers = [(":status", "200"), ("content-type", "application/json")];
    gateway.respond_headers(flight, &headers, false);
    gateway.respond_data(flight, b"{", false);
    assert_ends_at(&mut gateway, flight, 700);
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    assert_counted(&mut gateway, "first_response");
}

#[test]
fn every_chunk_is_awaited_from_the_one_before() {
    let mut gateway = one_pair(r#"{"decodeStreamIdleTimeout":0.9}"#);
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    gateway.advance(899);
    gateway.respond_data(flight, TOKEN.as_bytes(), false);
    assert_ends_at(&mut gateway, flight, 900);
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    assert_counted(&mut gateway, "stream_idle");
}

#[test]
fn a_held_stream_that_stops_is_a_504() {
    let mut gateway = one_pair(r#"{"decodeStreamIdleTimeout":0.9}"#);
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, ROLE.as_bytes(), false);
    assert_ends_at(&mut gateway, flight, 900);
    let says = "decode pod r0-d did not go on responding within 0.9 s";
    assert_504(&mut gateway, flight, says, "stream_idle");
}

#[test]
fn timers_that_nothing_sets_do_not_run_for_vllm() {
    let mut gateway = one_pair("");
    let stream = decoding(&mut gateway, chat(true));
    let whole = decoding(&mut gateway, chat(false));
    gateway.advance(899_000);
    for flight in [stream, whole] {
        assert_eq!(gateway.outcome(flight).ending, Ending::Open);
    }
}

#[test]
fn a_profile_has_timers_of_its_own() {
    let mut gateway = one_pair(r#"{"decodeFirstResponseTimeout":5}"#);
    let mut pods = two_pairs();
    pods.truncate(2);
    pods[1]["config"] = json!(0);
    let mut pushed = topology(2, &pods);
    let routing = json!({"pd": {"decodeFirstResponseTimeout": 0.4}});
    let profiles = json!({"default": {}, "fast": {"routingConfig": routing},
        "patient": {"routingConfig": {"pd": {"decodeFirstResponseTimeout": 0}}}});
    let annotation = json!({"profiles": profiles}).to_string();
    let (config, mistakes) = ModelConfig::parse(&annotation);
    assert!(mistakes.is_empty(), "{mistakes:?}");
    pushed["models"][0]["configs"] = json!([config.unwrap()]);
    push(&mut gateway, &pushed).expect(200);
    let by = |profile: &str| chat(true).header("config-profile", profile);
    let fast = decoding(&mut gateway, by("fast"));
    let usual = decoding(&mut gateway, chat(true));
    let patient = decoding(&mut gateway, by("patient"));
    assert_ends_at(&mut gateway, fast, 400);
    gateway.outcome(fast).expect(504);
    assert_ends_at(&mut gateway, usual, 4000);
    gateway.outcome(usual).expect(504);
    gateway.advance(60_000);
    assert_eq!(gateway.outcome(patient).ending, Ending::Open);
}

#[test]
fn a_combined_pod_is_not_timed() {
    let plugin =
        r#"{"decodeFirstResponseTimeout":1,"decodeResponseTimeout":1,"decodeStreamIdleTimeout":1}"#;
    let mut gateway = one_pair(plugin);
    let mut combined = pod("c", "standard", None, "10.0.9.1:8000");
    combined["config"] = json!(0);
    let mut pushed = topology(2, &[combined]);
    pushed["models"][0]["configs"] = json!([{"profiles": {"default": {"combined": true}}}]);
    push(&mut gateway, &pushed).expect(200);
    let flights = [gateway.send(chat(true)), gateway.send(chat(false))];
    gateway.advance(60_000);
    for flight in flights {
        assert_eq!(gateway.outcome(flight).ending, Ending::Open);
    }
}

#[test]
fn a_stream_of_ten_minutes_with_gaps_just_under_the_limit_is_never_cut() {
    const IDLE_MS: u64 = 5000;
    let plugin =
        r#"{"decodeFirstResponseTimeout":5,"decodeResponseTimeout":5,"decodeStreamIdleTimeout":5}"#;
    let mut gateway = one_pair(plugin);
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.advance(IDLE_MS - 1);
    gateway.respond_data(flight, ROLE.as_bytes(), false);
    let from = gateway.now_ms();
    let mut tokens = 0;
    while gateway.now_ms() < from + 600_000 {
        gateway.advance(IDLE_MS - 1);
        gateway.respond_data(flight, TOKEN.as_bytes(), false);
        tokens += 1;
        assert_eq!(gateway.outcome(flight).ending, Ending::Open, "{tokens}");
    }
    gateway.advance(IDLE_MS - 1);
    gateway.respond_data(flight, DONE.as_bytes(), true);
    let outcome = gateway.outcome(flight);
    assert_eq!(outcome.expect(200).ending, Ending::Complete);
    assert_eq!(
        outcome.text(),
        ROLE.to_owned() + &TOKEN.repeat(tokens) + DONE
    );
    println!("{tokens} tokens in {} s", (gateway.now_ms() - from) / 1000);
    assert_eq!(
        total(&mut gateway, "gateway_request_model_success_total"),
        1
    );
    assert_eq!(endings(&mut gateway), 1);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_worker_that_stood_still_takes_none_of_that_for_silence() {
    let mut gateway = one_pair(r#"{"decodeFirstResponseTimeout":2,"decodeStreamIdleTimeout":2}"#);
    let begun = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, begun);
    gateway.respond_data(begun, format!("{ROLE}{TOKEN}").as_bytes(), false);
    let waiting = decoding(&mut gateway, chat(true));
    gateway.advance(500);
    gateway.freeze_all(true);
    gateway.advance(10_000);
    gateway.freeze_all(false);
    gateway.advance(1000);
    for flight in [begun, waiting] {
        assert_eq!(gateway.outcome(flight).ending, Ending::Open);
    }
    // What is silent for as long as it may be is over all the same.
    gateway.advance(500 + LATE_MS + 100);
    assert_eq!(gateway.outcome(begun).ending, Ending::Reset);
    gateway.outcome(waiting).expect(504);
    assert_eq!(endings(&mut gateway), 2);
    freed(&mut gateway);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn two_hundred_that_are_due_in_one_tick_end_a_few_at_a_time() {
    const COUNT: usize = 200;
    let mut gateway = one_pair(r#"{"decodeFirstResponseTimeout":1}"#);
    gateway.engine(crate::stand::P0, |_| crate::stand::prefilled());
    gateway.engine(crate::stand::D0, |_| Script::stall());
    let flights: Vec<_> = (0..COUNT).map(|_| gateway.send(chat(true))).collect();
    gateway.advance(1000 + LATE_MS);
    let mut ends: Vec<u64> = flights
        .iter()
        .map(|flight| gateway.outcome(*flight).expect(504).ended_at_ms)
        .collect();
    ends.dedup();
    // A few at a time, so that other streams do not wait, at a faster tick.
    let [first, .., last] = ends[..] else {
        panic!("more than one tick: {ends:?}")
    };
    assert!(ends.len() == 4 && last - first == 30, "{ends:?}");
    // The tick that finds nothing more is as slow as before.
    let flight = gateway.send(chat(true));
    gateway.advance(1000 + LATE_MS);
    let late = gateway.outcome(flight).expect(504).ended_at_ms - last;
    assert_eq!(late % 100, 10, "{late}");
    assert_eq!(endings(&mut gateway), COUNT as u64 + 1);
    freed(&mut gateway);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_prefill_timeout_grows_with_the_prompt_where_that_is_set() {
    let plugin = r#"{"prefillRequestTimeout":1,"prefillTimeoutPerKiloToken":2,"prefillRetries":0}"#;
    let mut gateway = one_pair(plugin);
    gateway.other_engines(|_| Script::stall());
    // 1500 tokens of 4 bytes.
    let body = json!({"model": "m", "prompt": "x".repeat(6000)}).to_string();
    let exchange = Exchange::post("/v1/completions", body);
    let flight = gateway.send(exchange.header("content-type", "application/json"));
    assert_ends_at(&mut gateway, flight, 4000);
    let marker = gateway
        .outcome(flight)
        .expect(504)
        .header("x-error-pd-prefill")
        .map(str::to_owned);
    assert_eq!(marker.as_deref(), Some("true"));
}

#[test]
fn a_draining_pod_takes_no_new_request_and_finishes_what_it_has() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    let mut pods = two_pairs();
    pods[0]["draining"] = json!(true);
    pods[1]["draining"] = json!(true);
    push(&mut gateway, &topology(2, &pods)).expect(200);
    gateway.other_engines(crate::stand::vllm);
    for _ in 0..8 {
        let fresh = gateway.run(chat(true));
        assert_eq!(fresh.expect(200).header("target-pod"), Some("r1-d"));
    }
    gateway.respond_data(flight, DONE.as_bytes(), true);
    assert_eq!(gateway.outcome(flight).expect(200).ending, Ending::Complete);
    assert_quiet(&mut gateway, 1);
}
