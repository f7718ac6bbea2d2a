//! Errors: status, shape, type and param.

use serde_json::{Value, json};

use crate::client::{CHAT, COMPLETIONS, Wire, chat, completion, engine, get, merge, post};

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn bodies_the_schema_refuses() {
    let d = engine("d", |_| {}).await;
    let mut wire = Wire::open(d.address()).await;
    let cases: [(&str, Value); 10] = [
        ("{\"model\":\"sim-model\",", json!("body.21")),
        ("", json!("body")),
        ("[]", json!("body")),
        ("{\"model\":\"sim-model\"}", json!("body.messages")),
        ("{\"messages\":\"x\"}", json!("body.messages")),
        ("{\"messages\":[],\"stream\":3}", json!("body.stream")),
        (
            "{\"messages\":[],\"max_tokens\":1.5}",
            json!("body.max_tokens"),
        ),
        ("{\"messages\":[],\"model\":1}", json!("body.model")),
        (
            "{\"messages\":[],\"kv_transfer_params\":\"x\"}",
            json!("body.kv_transfer_params"),
        ),
        (
            "{\"messages\":[],\"kv_transfer_params\":[1]}",
            json!("body.kv_transfer_params"),
        ),
    ];
    for (text, param) in cases {
        wire.send("POST", CHAT, &[JSON], text).await;
        let answer = wire.answer().await.unwrap();
        assert_eq!(answer.status, 400, "{text}");
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "Bad Request", "{text}");
        assert_eq!(error["param"], param, "{text}");
        assert_eq!(error["code"], 400);
    }
    for headers in [&[][..], &[("content-type", "text/plain")]] {
        wire.send("POST", CHAT, headers, "{\"messages\":[]}").await;
        let answer = wire.answer().await.unwrap();
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json()["error"]["type"], "Bad Request");
    }
    assert_eq!(d.state().running, 0);
}

#[tokio::test]
async fn values_the_serving_layer_refuses() {
    let d = engine("d", |c| c.max_model_len = 400).await;
    let min = "min_tokens must be less than or equal to max_tokens=1, got 5.";
    let options =
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
    let cases = [
        (json!({"min_tokens": 5, "max_tokens": 1}), Some(min)),
        (
            json!({"stream": false, "stream_options": {"include_usage": true}}),
            Some(options),
        ),
        (json!({"max_tokens": 0}), None),
        (json!({"temperature": -1}), None),
    ];
    for (more, message) in cases {
        let answer = post(d.address(), CHAT, &chat(more.clone())).await;
        assert_eq!(answer.status, 400, "{more}");
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "BadRequestError", "{more}");
        if let Some(message) = message {
            assert_eq!(error["message"], message);
        }
    }
    // Also with stream, a refusal is plain JSON.
    let long = json!({"prompt": "x".repeat(4000), "stream": true});
    let answer = post(d.address(), COMPLETIONS, &completion(long)).await;
    assert_eq!(
        (answer.status, answer.headers["content-type"].as_str()),
        (400, "application/json")
    );
    let error = &answer.json()["error"];
    assert_eq!(error["param"], "input_tokens");
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("This model's maximum context length is 400 tokens."));
}

#[tokio::test]
async fn an_unknown_model_is_404_and_none_is_accepted() {
    let d = engine("d", |_| {}).await;
    let mut body = chat(json!({"model": "other"}));
    let answer = post(d.address(), CHAT, &body).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["type"]),
        (404, &json!("NotFoundError"))
    );
    merge(&mut body, json!({"max_tokens": 1}));
    let answer = post(d.address(), "/v1/messages", &body).await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(answer.json()["error"]["type"], "NotFoundError");
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(post(d.address(), CHAT, &body).await.status, 200);
}

#[tokio::test]
async fn a_full_queue_is_503() {
    let d = engine("d", |c| {
        c.max_num_seqs = 1;
        c.max_num_queued_reqs = 1;
        c.token_interval_ms = 3_600_000.0;
    })
    .await;
    let mut busy = Vec::new();
    for (running, waiting) in [(1, 0), (1, 1)] {
        let mut wire = Wire::open(d.address()).await;
        wire.post(CHAT, &chat(json!({}))).await;
        crate::client::until(&d, |s| (s.running, s.waiting) == (running, waiting)).await;
        busy.push(wire);
    }
    let answer = post(d.address(), CHAT, &chat(json!({}))).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["type"], "Service Unavailable");
    assert!(!answer.headers.contains_key("retry-after"));
    let metrics = get(d.address(), "/metrics").await.body;
    assert!(metrics.contains("vllm:admission_rejections_total{reason=\"max_num_queued_reqs\""));
}

#[tokio::test]
async fn other_paths() {
    let d = engine("d", |_| {}).await;
    for path in ["/health", "/ping"] {
        let answer = get(d.address(), path).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ""));
    }
    assert_eq!(
        get(d.address(), "/version").await.body,
        r#"{"version":"0.32.0"}"#
    );
    assert_eq!(get(d.address(), "/load").await.body, r#"{"server_load":0}"#);
    let models = get(d.address(), "/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "sim-model");
    let missing = get(d.address(), "/nothing").await;
    assert_eq!(
        (missing.status, missing.body.as_str()),
        (404, r#"{"detail":"Not Found"}"#)
    );
    let wrong = get(d.address(), CHAT).await;
    assert_eq!(
        (wrong.status, wrong.headers["allow"].as_str()),
        (405, "POST")
    );
    let closed = post(
        d.address(),
        "/inference/v1/abort_requests",
        &json!({"request_ids": []}),
    )
    .await;
    assert_eq!(closed.status, 403);
    assert_eq!(closed.json()["error"]["type"], "PermissionDeniedError");
    let mut wire = Wire::open(d.address()).await;
    wire.write("HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    wire.read_until("405 Method Not Allowed").await;
}
