//! Dispatched calls: from the root, answered, failed, late, lost.

use pd_wasm_tests::{CallState, Ending, Exchange, Gateway, GatewayConfig, Script};

use crate::{config, gateway, logged};

fn prefill() -> Exchange {
    Exchange::post("/prefill", "{\"prompt\":\"x\"}").chunked(4)
}

#[test]
fn a_call_from_the_root_completes_the_request() {
    let mut gateway = gateway("");
    gateway.engine("prefill", |sent| {
        assert_eq!(sent.cluster.as_deref(), Some("original_dst"));
        assert_eq!(sent.json()["max_tokens"], 1);
        Script::answer(200, "kv").after(20).trailer("x-end", "1")
    });
    gateway.engine("decode", |sent| {
        Script::stream(5, &["token"]).header("x-got", sent.path())
    });
    let outcome = gateway.run(prefill());
    assert_eq!(outcome.expect(200).text(), "token");
    assert_eq!(outcome.upstream().json()["answer"], "kv");
    assert_eq!(outcome.upstream().at_ms, 20);
    let call = &outcome.calls[0];
    assert_eq!(
        (call.state, call.path(), call.header("content-length")),
        (CallState::Answered, "/prefill", Some("16"))
    );
    assert!(logged(&gateway, "call 200 kv 1 [(\"x-end\", \"1\")]"));
}

#[test]
fn a_failed_call_has_no_headers_and_a_refused_one_is_envoys_503() {
    let mut gateway = gateway("");
    gateway.engine("prefill", |_| Script::reset());
    gateway.run(prefill()).expect(502);
    assert!(logged(&gateway, "call failed (11, Some(\"reset\"))"));
    gateway.engine("prefill", |_| Script::refuse());
    assert_eq!(gateway.run(prefill()).expect(502).text(), "503");
}

#[test]
fn a_call_times_out_by_its_own_deadline() {
    let mut gateway = gateway("");
    gateway.engine("prefill", |_| Script::stall());
    let outcome = gateway.run(prefill());
    assert_eq!(outcome.expect(502).text(), "504");
    assert_eq!(outcome.calls[0].state, CallState::TimedOut);
    assert_eq!(outcome.ended_at_ms, 5000);
}

#[test]
fn a_late_reply_reaches_the_root_after_the_client_left() {
    let mut gateway = gateway("");
    let flight = gateway.send(prefill());
    let call = gateway.pending_calls()[0].id;
    gateway.disconnect(flight);
    assert_eq!(gateway.pending_calls().len(), 1);
    gateway.answer(call, Script::answer(200, "late"));
    assert!(logged(&gateway, "call 200 late"));
    assert!(logged(&gateway, "the stream is gone"));
    assert_eq!(gateway.outcome(flight).ending, Ending::Disconnected);
}

#[test]
fn a_drained_root_receives_neither_replies_nor_notices() {
    let mut gateway = gateway("old");
    let flight = gateway.send(prefill());
    gateway.reconfigure(Default::default(), b"new").unwrap();
    // The stream holds its root.
    assert_eq!(gateway.drain_old_roots(), 1);
    let call = gateway.pending_calls()[0].id;
    gateway.disconnect(flight);
    assert_eq!(gateway.drain_old_roots(), 0);
    assert_eq!(gateway.calls()[0].state, CallState::Abandoned);
    gateway.answer(call, Script::answer(200, "lost"));
    assert!(!logged(&gateway, "call 200 lost"));
    assert!(logged(&gateway, "root 1 done") && logged(&gateway, "root 1 deleted"));
    assert_eq!(gateway.run(Exchange::get("/config")).text(), "new");
}

#[test]
fn an_unknown_cluster_is_a_bad_argument() {
    let clusters = Some(vec!["other".to_owned()]);
    let mut gateway = Gateway::new(GatewayConfig {
        clusters,
        ..config("")
    });
    assert_eq!(gateway.run(prefill()).expect(500).text(), "BadArgument");
}
