//! Shapes of requests, answers and errors.

use serde_json::{Value, json};

use crate::wire::{CHAT, COMPLETIONS, get, members, merge, post};
use crate::worker::{ID, chat, completion, context, refused, worker};

#[tokio::test]
async fn a_worker_alone_does_whole_requests() {
    let engine = worker("w", |config| config.tokens = 3).await;
    let whole = post(
        engine.address(),
        CHAT,
        &chat(json!({"max_completion_tokens": 2})),
    )
    .await;
    assert_eq!(whole.identity().kv, None);
    let answer = whole.json();
    // Its own name, whatever was asked for.
    assert_eq!(answer["model"], "sim-model");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
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
            "reasoning",
            "tool_calls",
            "logprobs",
            "finish_reason",
            "stop_reason",
            "avg_decoded_tokens_per_iter",
            "disaggregated_params",
            "usage",
            "prompt_tokens",
            "total_tokens",
            "completion_tokens",
            "prompt_tokens_details",
            "cached_tokens",
            "prompt_token_ids"
        ]
    );
    let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
    let stream = post(engine.address(), CHAT, &chat(stream)).await;
    let events = stream.events();
    assert_eq!(events.len(), 6);
    let event = |at: usize| serde_json::from_str::<Value>(events[at]).unwrap();
    assert_eq!(event(0)["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(event(3)["choices"][0]["delta"]["content"], " t3");
    assert_eq!(event(3)["choices"][0]["finish_reason"], "stop");
    assert_eq!(event(4)["usage"]["completion_tokens"], 3);
    assert_eq!(events[5], "[DONE]");
}

#[tokio::test]
async fn what_the_schema_does_not_know_is_refused() {
    let engine = worker("w", |_| {}).await;
    let extra = "Extra inputs are not permitted";
    let with = |base: &Value, more: Value| {
        let mut body = base.clone();
        merge(&mut body, more);
        body
    };
    let (chat, completion) = (chat(json!({})), completion(json!({})));
    for (path, body, member, said) in [
        (
            CHAT,
            with(&chat, json!({"kv_transfer_params": {}})),
            "kv_transfer_params",
            extra,
        ),
        (CHAT, with(&chat, json!({"rid": "x"})), "rid", extra),
        (
            CHAT,
            with(&chat, json!({"max_tokens": 1, "max_completion_tokens": 1})),
            "max_completion_tokens",
            extra,
        ),
        (
            COMPLETIONS,
            with(&completion, json!({"max_completion_tokens": 1})),
            "max_completion_tokens",
            extra,
        ),
        (
            COMPLETIONS,
            with(&completion, json!({"prompt_token_ids": [1]})),
            "prompt_token_ids",
            extra,
        ),
        (
            CHAT,
            with(&chat, json!({"stream_options": {"include_usage": true}})),
            "body",
            "Stream options can only",
        ),
        (
            CHAT,
            with(&chat, json!({"prompt_token_ids": "1,2"})),
            "prompt_token_ids",
            "list of integers",
        ),
        (CHAT, json!({"model": "m"}), "messages", "Field required"),
        (CHAT, json!({"messages": []}), "model", "Field required"),
    ] {
        let error = refused(&engine, path, &body).await;
        assert!(error.contains(member) && error.contains(said), "{error}");
    }
    let params = |change: Value| {
        let mut body = context(chat.clone(), ID, 0);
        merge(&mut body["disaggregated_params"], change);
        body
    };
    for (change, member, said) in [
        (json!({"opaque_state": "x"}), "opaque_state", extra),
        (
            json!({"request_type": null}),
            "request_type",
            "Field required",
        ),
        (
            json!({"request_type": "prefill"}),
            "request_type",
            "Unknown request type",
        ),
        (
            json!({"disagg_request_id": 7}),
            "disagg_request_id",
            "at least 4398046511104",
        ),
        (
            json!({"disagg_request_id": 1e18}),
            "disagg_request_id",
            "integer from 0",
        ),
        (
            json!({"schedule_style": 1, "disagg_request_id": null}),
            "disagg_request_id",
            "Field required",
        ),
        (json!({"schedule_style": 2}), "schedule_style", "0 or 1"),
        (
            json!({"request_type": "generation_only"}),
            "ctx_request_id",
            "Field required",
        ),
        (
            json!({"request_type": "generation_only", "ctx_request_id": ID}),
            "first_gen_tokens",
            "Field required",
        ),
        (
            json!({"request_type": "generation_only", "ctx_request_id": ID, "first_gen_tokens": [1]}),
            "ctx_info_endpoint",
            "says where",
        ),
    ] {
        let error = refused(&engine, CHAT, &params(change)).await;
        assert!(error.contains(member) && error.contains(said), "{error}");
    }
    let error = refused(
        &engine,
        CHAT,
        &with(&context(chat.clone(), ID, 0), json!({"n": 2})),
    )
    .await;
    assert!(error.contains("one prompt and one choice"), "{error}");
    let state = engine.state();
    assert_eq!((state.running, state.kv.kv_held), (0, 0));
}

#[tokio::test]
async fn the_two_metric_pages_are_different_things() {
    let engine = worker("w", |config| config.tokens = 4).await;
    assert_eq!(
        post(engine.address(), CHAT, &chat(json!({}))).await.status,
        200
    );
    let ctx = context(chat(json!({})), ID, 0);
    assert_eq!(post(engine.address(), CHAT, &ctx).await.status, 200);
    let page = get(engine.address(), "/prometheus/metrics").await;
    let labels = "engine_type=\"undefined\",model_name=\"undefined\"";
    for sample in [
        format!("trtllm_request_success_total{{finished_reason=\"stop\",{labels}}} 1.0"),
        format!("trtllm_request_success_total{{finished_reason=\"length\",{labels}}} 1.0"),
        format!("trtllm_generation_tokens_total{{{labels}}} 5.0"),
        format!("trtllm_time_to_first_token_seconds_count{{{labels}}} 2.0"),
        format!("trtllm_num_requests_running{{pid=\"1\",{labels}}} 0.0"),
        format!("trtllm_kv_cache_used_blocks{{pid=\"1\",{labels}}} 1.0"),
    ] {
        assert!(
            page.body.lines().any(|l| l == sample),
            "{sample} not in\n{}",
            page.body
        );
    }
    let told = get(engine.address(), "/metrics").await.json();
    assert_eq!(told.as_array().unwrap().len(), 5);
    // Once.
    assert_eq!(get(engine.address(), "/metrics").await.body, "[]");
}

#[tokio::test]
async fn the_other_paths_answer() {
    let engine = worker("w", |_| {}).await;
    assert_eq!(get(engine.address(), "/health").await.status, 200);
    assert_eq!(
        get(engine.address(), "/version").await.json()["version"],
        "1.3.0rc8"
    );
    let models = get(engine.address(), "/v1/models").await.json();
    assert_eq!(models["data"][0]["owned_by"], "tensorrt_llm");
    // No abort here.
    let abort = post(engine.address(), "/abort_request", &json!({"rid": "x"})).await;
    assert_eq!(abort.status, 404);
    assert_eq!(get(engine.address(), CHAT).await.status, 405);
}
