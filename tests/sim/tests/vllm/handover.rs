//! Wrong, missing and stale hand-over parameters at the decode engine.

use std::io::ErrorKind;
use std::time::Duration;

use pd_engine_sim::{Engine, LoadFailure, State};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::client::{
    CHAT, COMPLETIONS, Wire, chat, completion, decode, engine, merge, pair, post, prefill,
    prefill_of, until,
};

fn with(mut kv: Value, more: Value) -> Value {
    merge(&mut kv, more);
    kv
}

fn without(mut kv: Value, name: &str) -> Value {
    kv.as_object_mut().unwrap().remove(name);
    kv
}

async fn assert_dead(engine: &Engine, cause: &str) {
    let state = until(engine, |s| s.deaths == 1 && s.connections_open == 0).await;
    let told = &state.death_causes[0].cause;
    assert!(told.contains(cause), "{told}");
    let refused = TcpStream::connect(engine.address()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    // The admin port outlives the engine.
    let admin = crate::client::get(engine.admin_address(), "/sim/admin/state").await;
    assert_eq!(admin.json()["deaths"], 1);
}

#[tokio::test]
async fn without_parameters_the_decode_engine_computes_and_the_kv_stays() {
    let (p, d) = pair().await;
    prefill(&p).await;
    for kv in [Value::Null, json!({})] {
        let answer = decode(&d, &kv).await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.identity().kv, None);
    }
    assert_eq!(d.state().kv.computed_locally, 2);
    assert_eq!(p.state().kv.kv_held, 1);
}

#[tokio::test]
async fn parameters_that_kill_at_once() {
    let p = engine("p", |_| {}).await;
    let kv = prefill(&p).await;
    let empty = json!({"do_remote_prefill": true, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null, "remote_request_id": null});
    let cases = [
        (empty, "AssertionError"),
        (
            with(kv.clone(), json!({"remote_block_ids": [[1, 2]]})),
            "too few",
        ),
        (
            with(kv.clone(), json!({"remote_block_ids": [1, 2, 3]})),
            "TypeError",
        ),
        (without(kv, "remote_block_ids"), "remote_block_ids"),
    ];
    for (kv, cause) in cases {
        let d = engine("d", |_| {}).await;
        let answer = decode(&d, &kv).await.unwrap();
        assert_eq!(answer.status, 500);
        assert_eq!(answer.json()["error"]["type"], "InternalServerError");
        assert_dead(&d, cause).await;
    }
    assert_eq!(p.state().kv.kv_held, 1);
}

#[tokio::test]
async fn a_missing_host_or_request_id_hangs_then_kills() {
    let p = engine("p", |_| {}).await;
    let kv = prefill(&p).await;
    for name in ["remote_host", "remote_request_id"] {
        let d = engine("d", |c| c.hang_ms = 50).await;
        decode(&d, &without(kv.clone(), name)).await.unwrap_err();
        assert_dead(&d, name).await;
    }
    // The client's leaving kills it no less.
    let d = engine("d", |c| c.hang_ms = 3_600_000).await;
    let mut wire = Wire::open(d.address()).await;
    let kv = without(kv, "remote_host");
    wire.post(CHAT, &chat(json!({"kv_transfer_params": kv})))
        .await;
    until(&d, |s| s.running == 1).await;
    drop(wire);
    assert_dead(&d, "remote_host").await;
}

#[tokio::test]
async fn parameters_that_fail_the_request_and_leak() {
    let (p, d) = pair().await;
    let kv = prefill(&p).await;
    let cases = [
        json!({"remote_block_ids": [[1, 2, 9_999_999]]}),
        json!({"remote_engine_id": "00000000-0000-4000-8000-000000000000"}),
    ];
    for more in cases {
        let answer = decode(&d, &with(kv.clone(), more)).await.unwrap();
        assert_eq!(answer.status, 500);
        let expected = json!({"error": {"message": "Internal server error",
            "type": "InternalServerError", "param": null, "code": 500}});
        assert_eq!(answer.json(), expected);
    }
    assert_eq!((d.state().deaths, d.state().kv.pulls_failed), (0, 2));
    assert_eq!((p.state().kv.pulls_refused, p.state().kv.kv_held), (2, 1));
    // The untouched parameters still work.
    assert_eq!(decode(&d, &kv).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_closed_port_fails_after_the_configured_time() {
    let p = engine("p", |_| {}).await;
    let d = engine("d", |c| c.closed_port_delay_ms = 100).await;
    let kv = prefill(&p).await;
    p.kill("test");
    until(&p, |s| !s.listening).await;
    let begun = std::time::Instant::now();
    assert_eq!(decode(&d, &kv).await.unwrap().status, 500);
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!(d.state().deaths, 0);
    // D lives.
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
}

#[tokio::test]
async fn recompute_answers_in_spite_of_a_failed_pull() {
    let p = engine("p", |_| {}).await;
    let d = engine("d", |c| {
        c.closed_port_delay_ms = 1;
        c.load_failure = LoadFailure::Recompute;
    })
    .await;
    let kv = prefill(&p).await;
    p.kill("test");
    let answer = decode(&d, &kv).await.unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(answer.identity().kv, None);
}

#[tokio::test]
async fn a_restarted_prefill_engine_refuses_old_parameters_and_serves_new_ones() {
    let (p, d) = pair().await;
    let old = prefill(&p).await;
    // D has a connection to the process that goes away.
    assert_eq!(decode(&d, &prefill(&p).await).await.unwrap().status, 200);
    p.restart();
    assert_eq!(p.state().kv.kv_held, 0);
    assert_eq!(decode(&d, &old).await.unwrap().status, 500);
    let new = prefill(&p).await;
    assert_ne!(new["remote_engine_id"], old["remote_engine_id"]);
    let answer = decode(&d, &new).await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
}

#[tokio::test]
async fn an_unknown_request_id_is_answered_and_the_kv_leaks() {
    let (p, d) = pair().await;
    let kv = with(
        prefill(&p).await,
        json!({"remote_request_id": "chatcmpl-gone-00000000"}),
    );
    assert_eq!(decode(&d, &kv).await.unwrap().status, 200);
    let state = p.state().kv;
    assert_eq!((state.after_expiry, state.kv_held), (1, 1));
}

#[tokio::test]
async fn sizes_may_be_missing() {
    let (p, d) = pair().await;
    let mut kv = prefill(&p).await;
    for name in [
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "transfer_mode",
    ] {
        kv = without(kv, name);
    }
    assert_eq!(decode(&d, &kv).await.unwrap().status, 200);
    assert_eq!(p.state().kv.kv_taken, 1);
}

#[tokio::test]
async fn another_requests_kv_gives_another_text_silently() {
    let (p, d) = pair().await;
    let mut body = prefill_of(chat(json!({})));
    merge(
        &mut body,
        json!({"messages": [{"role": "user", "content": "x".repeat(1200)}]}),
    );
    let other = post(p.address(), CHAT, &body).await;
    let answer = decode(&d, &other.kv()).await.unwrap();
    assert_eq!(answer.status, 200);
    let identity = answer.identity();
    assert_ne!(identity.kv, Some(identity.prompt));
    assert_eq!(identity.kv, Some(other.identity().prompt));
}

#[tokio::test]
async fn stale_parameters_read_what_the_blocks_hold_by_then() {
    // Room for one prompt of three blocks, so the second reuses them.
    let p = engine("p", |c| c.num_blocks = 4).await;
    let d = engine("d", |_| {}).await;
    let stale = prefill(&p).await;
    assert_eq!(decode(&d, &stale).await.unwrap().status, 200);
    let again = decode(&d, &stale).await.unwrap();
    assert_eq!(again.identity().kv, Some(again.identity().prompt));
    assert_eq!(p.state().kv.after_expiry, 1);
    let other = post(p.address(), COMPLETIONS, &prefill_of(completion(json!({})))).await;
    let wrong = decode(&d, &stale).await.unwrap();
    assert_eq!(wrong.status, 200);
    assert_eq!(wrong.identity().kv, Some(other.identity().prompt));
    assert_eq!(p.state().kv.stale_pulls, 2);
}

#[tokio::test]
async fn a_failing_pull_of_a_stream_shows_after_the_headers() {
    let (p, d) = pair().await;
    let bad = json!({"remote_engine_id": "00000000-0000-4000-8000-000000000000"});
    let kv = with(prefill(&p).await, bad);
    let error = r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#;
    let more = json!({"stream": true, "kv_transfer_params": kv});
    let answer = post(d.address(), CHAT, &chat(more.clone())).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events.len(), 3);
    assert!(events[0].contains(r#""role":"assistant""#));
    assert_eq!(events[1..], [error, "[DONE]"]);
    let answer = post(d.address(), COMPLETIONS, &completion(more)).await;
    assert_eq!(answer.events(), [error, "[DONE]"]);
}

#[tokio::test]
async fn two_choices_on_decode_pull_twice() {
    let (p, d) = pair().await;
    let kv = prefill(&p).await;
    let body = chat(json!({"n": 2, "max_tokens": 2, "kv_transfer_params": kv}));
    let answer = post(d.address(), CHAT, &body).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2);
    let state = p.state().kv;
    assert_eq!((state.kv_taken, state.after_expiry), (1, 1));
}

#[tokio::test]
async fn a_death_breaks_the_requests_of_others_and_a_restart_serves_again() {
    let d = engine("d", |c| c.token_interval_ms = 3_600_000.0).await;
    let mut other = Wire::open(d.address()).await;
    other.post(CHAT, &chat(json!({"stream": true}))).await;
    other.read_until("[request=").await;
    let empty = json!({"do_remote_prefill": true});
    assert_eq!(decode(&d, &empty).await.unwrap().status, 500);
    assert_eq!(other.closed().await, Some(ErrorKind::ConnectionReset));
    let gone = |s: &State| s.deaths == 1 && s.running == 0;
    let state = until(&d, gone).await;
    // Its client did not leave.
    assert_eq!(state.aborted, 0);
    d.restart();
    until(&d, |s| s.listening).await;
    d.set_pace(serde_json::from_value(json!({"token_interval_ms": 0})).unwrap())
        .unwrap();
    let mut attempts = 0;
    while TcpStream::connect(d.address()).await.is_err() {
        attempts += 1;
        assert!(attempts < 1000);
        tokio::task::yield_now().await;
    }
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
}
