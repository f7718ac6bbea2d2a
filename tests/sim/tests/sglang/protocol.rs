//! Shapes of requests, answers and errors.

use std::time::{Duration, Instant};

use pd_engine_sim::Role;
use serde_json::{Value, json};

use crate::pair::{Pair, answer, leg, send, sglang};
use crate::wire::{CHAT, COMPLETIONS, Wire, get, members, merge, post};

#[tokio::test]
async fn a_plain_engine_does_whole_requests_and_ignores_bootstrap_members() {
    let engine = sglang(Role::Both, |config| config.tokens = 3).await;
    for more in [
        json!({}),
        json!({"bootstrap_room": 7, "bootstrap_host": "nowhere"}),
    ] {
        let mut body =
            json!({"model": "other", "rid": "r", "messages": [{"role": "user", "content": "x"}]});
        merge(&mut body, more);
        let whole = post(engine.address(), CHAT, &body).await;
        assert_eq!(whole.identity().kv, None);
        let json = whole.json();
        // Echoed, not checked.
        assert_eq!(
            (&json["id"], &json["model"]),
            (&json!("r"), &json!("other"))
        );
        assert_eq!(json["choices"][0]["finish_reason"], "stop");
        assert_eq!(
            members(&whole.body),
            [
                "id",
                "object",
                "created",
                "model",
                "choices",
                "index",
                "message",
                "role",
                "content",
                "reasoning_content",
                "tool_calls",
                "logprobs",
                "finish_reason",
                "matched_stop",
                "usage",
                "prompt_tokens",
                "total_tokens",
                "completion_tokens",
                "prompt_tokens_details",
                "reasoning_tokens",
                "metadata",
                "weight_version"
            ]
        );
    }
    let body = json!({"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 2});
    let batch = post(engine.address(), COMPLETIONS, &body).await.json();
    assert_eq!(batch["choices"].as_array().unwrap().len(), 4);
    assert_eq!(batch["choices"][3]["index"], 3);
    assert_eq!(batch["usage"]["completion_tokens"], 8);
    assert_eq!(engine.state().kv.computed_locally, 3);
}

#[tokio::test]
async fn a_stream_has_a_role_tokens_a_finish_and_usage_when_asked() {
    let engine = sglang(Role::Both, |_| {}).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2,
        "stream": true, "stream_options": {"include_usage": true}});
    let stream = post(engine.address(), CHAT, &body).await;
    assert_eq!(
        stream.headers["content-type"],
        "text/event-stream; charset=utf-8"
    );
    assert_eq!(
        (&stream.headers["server"], stream.broken),
        (&"uvicorn".to_owned(), None)
    );
    let events = stream.events();
    assert_eq!(events.len(), 6);
    assert_eq!(events[5], "[DONE]");
    let events: Vec<Value> = events[..5]
        .iter()
        .map(|e| serde_json::from_str(e).unwrap())
        .collect();
    let delta = |at: usize| &events[at]["choices"][0]["delta"];
    assert_eq!(
        (&delta(0)["role"], &delta(0)["content"]),
        (&json!("assistant"), &json!(""))
    );
    assert!(
        delta(1)["content"]
            .as_str()
            .unwrap()
            .starts_with("[request=")
    );
    assert_eq!(delta(2)["content"], " t2");
    assert_eq!(events[3]["choices"][0]["finish_reason"], "length");
    assert_eq!(events[4]["choices"], json!([]));
    assert_eq!(events[4]["usage"]["completion_tokens"], 2);
    let body = json!({"model": "m", "prompt": "x", "max_tokens": 2, "stream": true});
    let stream = post(engine.address(), COMPLETIONS, &body).await;
    let events = stream.events();
    assert_eq!(events.len(), 4);
    let last: Value = serde_json::from_str(events[2]).unwrap();
    assert_eq!(
        (
            &last["choices"][0]["text"],
            &last["choices"][0]["finish_reason"]
        ),
        (&json!(""), &json!("length"))
    );
}

#[tokio::test]
async fn rooms_that_are_missing_or_no_63_bit_integers_are_refused_by_both_legs() {
    let (pair, port) = Pair::start(|_| {}).await;
    let body = |room: &str| {
        let text = leg(port, 1, json!({})).to_string();
        text.replace(
            "\"bootstrap_room\":1,",
            &format!("\"bootstrap_room\":{room},"),
        )
    };
    for engine in [&pair.p, &pair.d] {
        let mut wire = Wire::open(engine.address()).await;
        for (room, said) in [
            ("null", "received without bootstrap room id"),
            ("9223372036854775808", "from 0 to 9223372036854775807"),
            ("18446744073709551616", "from 0 to"),
            ("-1", "from 0 to"),
            ("1.5", "from 0 to"),
            ("\"1\"", "from 0 to"),
            ("[1,2]", "from 0 to"),
        ] {
            wire.post_text(CHAT, &body(room)).await;
            let refused = wire.answer().await.unwrap();
            assert_eq!(refused.status, 400, "{room}");
            let error = refused.json();
            assert_eq!(
                (&error["object"], &error["code"]),
                (&json!("error"), &json!(400))
            );
            assert!(
                error["message"].as_str().unwrap().contains(said),
                "{room}: {error}"
            );
        }
    }
    pair.idle().await;
    assert_eq!(pair.p.state().rooms.rooms_open, 0);
    // 1e3 is an integer to a lenient reader.
    let mut wire = Wire::open(pair.p.address()).await;
    wire.post_text(CHAT, &body("1e3")).await;
    let decode = answer(send(&pair.d, &leg(port, 1000, json!({})))).await;
    assert_eq!(decode.status, 200);
}

#[tokio::test]
async fn what_the_schema_asks_for_is_asked_for() {
    let engine = sglang(Role::Both, |_| {}).await;
    let messages = json!([{"role": "user", "content": "x"}]);
    for body in [
        json!({"messages": messages}),
        json!({"model": "m"}),
        json!({"model": "m", "messages": "x"}),
        json!({"model": "m", "messages": messages, "rid": 7}),
        json!({"model": "m", "messages": messages, "bootstrap_port": 70_000}),
        json!({"model": "m", "messages": messages, "max_tokens": 0}),
        json!({"model": "m", "messages": messages, "n": 0}),
        json!({"model": "m", "messages": messages, "stream": "yes"}),
        json!([1]),
    ] {
        let refused = post(engine.address(), CHAT, &body).await;
        assert_eq!(refused.status, 400, "{body}");
        assert_eq!(refused.json()["type"], "Bad Request");
    }
    let long = sglang(Role::Both, |config| config.max_model_len = 8).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(100)}]});
    let refused = post(long.address(), CHAT, &body).await;
    assert_eq!(
        (refused.status, &refused.json()["type"]),
        (400, &json!("BadRequestError"))
    );
    assert_eq!(engine.state().running, 0);
}

#[tokio::test]
async fn a_full_queue_is_a_503() {
    let engine = sglang(Role::Both, |config| {
        config.max_num_seqs = 1;
        config.max_num_queued_reqs = 1;
        config.tokens = 1000;
        config.token_interval_ms = 20.0;
    });
    let engine = engine.await;
    let body = |rid: &str| json!({"model": "m", "rid": rid, "messages": [{"role": "user", "content": "x"}]});
    let first = send(&engine, &body("1"));
    crate::wire::until(&engine, |s| s.running == 1).await;
    let second = send(&engine, &body("2"));
    crate::wire::until(&engine, |s| s.waiting == 1).await;
    let refused = post(engine.address(), CHAT, &body("3")).await;
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("queue is full"));
    first.abort();
    second.abort();
    crate::wire::until(&engine, |s| s.running + s.waiting == 0).await;
}

#[tokio::test]
async fn the_other_paths_answer() {
    let engine = sglang(Role::Decode, |_| {}).await;
    assert_eq!(get(engine.address(), "/health").await.status, 200);
    let models = get(engine.address(), "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "sim-model");
    assert_eq!(models["data"][0]["owned_by"], "sglang");
    let info = get(engine.address(), "/server_info").await.json();
    assert_eq!(info["disaggregation_mode"], "decode");
    assert_eq!(get(engine.address(), "/v1/responses").await.status, 404);
    assert_eq!(
        post(engine.address(), "/health", &json!({})).await.status,
        405
    );
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_five_seconds() {
    let engine = sglang(Role::Decode, |_| {}).await;
    let mut wire = Wire::open(engine.address()).await;
    wire.send("GET", "/health", &[], "").await;
    assert_eq!(wire.answer().await.unwrap().status, 200);
    let idle = Instant::now();
    assert_eq!(wire.closed().await, None);
    let idle = idle.elapsed();
    let around = Duration::from_millis(4900)..Duration::from_millis(6500);
    assert!(around.contains(&idle), "{idle:?}");
}
