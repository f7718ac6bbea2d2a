//! The response side: local replies, held headers, buffered bodies, streams, cuts.

use pd_wasm_tests::{Ending, Exchange, Script};

use crate::{config, gateway};

#[test]
fn a_local_reply_passes_through_the_filter() {
    let mut gateway = gateway("");
    let outcome = gateway.run(Exchange::post("/reply", "body"));
    assert_eq!(outcome.expect(418).text(), "teapot");
    assert_eq!(outcome.header("x-fixture"), Some("1"));
    assert_eq!(outcome.header("x-second-look"), Some("1"));
    assert_eq!(outcome.header("content-type"), Some("text/plain"));
    assert!(outcome.upstream.is_none());
    assert!(outcome.deleted);
}

#[test]
fn a_stream_arrives_chunk_by_chunk_at_its_own_times() {
    let mut gateway = gateway("");
    gateway.engine("a", |_| Script::stream(10, &["one", "two"]).after(5));
    let outcome = gateway.run(Exchange::get("/stream").header("target-pod", "a"));
    assert_eq!(outcome.expect(200).text(), "onetwo");
    let times: Vec<_> = outcome.chunks.iter().map(|chunk| chunk.at_ms).collect();
    assert_eq!((outcome.headers_at_ms, times), (5, vec![15, 25]));
    assert!(!outcome.upstream().cut);
}

#[test]
fn held_headers_leave_with_the_first_chunk() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::stream(10, &["one", "two"]));
    let flight = gateway.send(Exchange::get("/hold"));
    assert_eq!(gateway.outcome(flight).status, None);
    gateway.advance(10);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        (outcome.status, outcome.text().as_str()),
        (Some(200), "one")
    );
    assert_eq!(outcome.header("x-details"), Some("via_upstream"));
    gateway.settle(flight, 100);
    assert_eq!(gateway.outcome(flight).expect(200).headers_at_ms, 10);
}

#[test]
fn a_tick_replaces_a_held_response_and_the_filter_does_not_see_it_again() {
    let mut gateway = gateway("tick=30");
    gateway.other_engines(|_| Script::stream(0, &[]).then_stall());
    let outcome = gateway.run(Exchange::get("/watch"));
    assert_eq!(outcome.expect(504).text(), "too late");
    assert_eq!(outcome.header("x-fixture"), Some("1"));
    assert_eq!(
        outcome.callbacks,
        [
            "request_headers",
            "response_headers",
            "log",
            "done",
            "delete"
        ]
    );
    assert!(outcome.upstream().cut);
}

#[test]
fn a_reply_after_the_response_began_cuts_it() {
    let mut gateway = gateway("tick=30");
    gateway.other_engines(|_| Script::stream(10, &["one"]).then_stall());
    let outcome = gateway.run(Exchange::get("/watch"));
    assert_eq!((outcome.status, outcome.ending), (Some(200), Ending::Reset));
    assert_eq!(outcome.text(), "one");
}

#[test]
fn a_tick_can_cut_a_stream() {
    let mut gateway = gateway("tick=30");
    gateway.other_engines(|_| Script::stream(10, &["one"]).then_stall());
    let outcome = gateway.run(Exchange::get("/cut"));
    assert_eq!((outcome.ending, outcome.ended_at_ms), (Ending::Reset, 30));
    assert!(outcome.upstream().cut && outcome.deleted);
}

#[test]
fn a_response_body_can_be_gathered_and_replaced() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::stream(10, &["one ", "two"]));
    let outcome = gateway.run(Exchange::get("/gather"));
    assert_eq!(outcome.expect(200).text(), "ONE TWO");
    assert_eq!(outcome.chunks.len(), 1);
}

#[test]
fn a_broken_upstream_is_a_503_before_headers_and_a_cut_after() {
    let mut gateway = gateway("");
    gateway.engine("early", |_| Script::reset().after(3));
    gateway.engine("late", |_| Script::stream(1, &["one"]).then_reset());
    gateway.engine("nobody", |_| Script::refuse());
    let early = gateway.run(Exchange::get("/x").header("target-pod", "early"));
    assert!(
        early
            .expect(503)
            .text()
            .starts_with("upstream connect error")
    );
    assert!(early.callbacks.contains(&"response_headers"));
    let late = gateway.run(Exchange::get("/x").header("target-pod", "late"));
    assert_eq!((late.status, late.ending), (Some(200), Ending::Reset));
    let nobody = gateway.run(Exchange::get("/x").header("target-pod", "nobody"));
    assert_ne!(
        nobody.expect(503).code_details.as_deref(),
        Some("via_upstream")
    );
}

#[test]
fn a_test_can_answer_by_hand() {
    let mut gateway = pd_wasm_tests::Gateway::new(config(""));
    let flight = gateway.send(Exchange::get("/x"));
    gateway.respond_headers(flight, &[(":status", "201")], false);
    gateway.respond_data(flight, b"a", false);
    gateway.advance(7);
    gateway.respond_data(flight, b"b", true);
    let outcome = gateway.outcome(flight);
    assert_eq!(outcome.expect(201).text(), "ab");
    assert_eq!(outcome.chunks[1].at_ms, 7);
    let flight = gateway.send(Exchange::get("/x"));
    gateway.respond_reset(flight);
    gateway.outcome(flight).expect(503);
}
