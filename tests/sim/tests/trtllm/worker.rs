//! Workers and the legs of a request.

use pd_engine_sim::{Engine, EngineConfig, EngineKind, Role, prompt_hash, start};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::wire::{Answer, Wire, get, merge, post, until};

/// An id a double rounds to another one.
pub(crate) const ID: u64 = (1 << 62) + 1;

/// A worker of this name, changed as the test needs.
pub(crate) async fn worker(name: &str, change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig::named(name, Role::Both);
    config.engine = EngineKind::Trtllm;
    change(&mut config);
    start(config).await.unwrap()
}

/// A context and a generation worker.
pub(crate) async fn workers(change: impl Fn(&mut EngineConfig)) -> (Engine, Engine) {
    (worker("ctx", &change).await, worker("gen", &change).await)
}

/// A chat request with more members.
pub(crate) fn chat(more: Value) -> Value {
    let mut body =
        json!({"model": "m", "messages": [{"role": "user", "content": "some words of a prompt"}]});
    merge(&mut body, more);
    body
}

/// A completions request with more members.
pub(crate) fn completion(more: Value) -> Value {
    let mut body = json!({"model": "m", "prompt": "some words of a prompt"});
    merge(&mut body, more);
    body
}

/// The hash of a request's prompt.
pub(crate) fn hash(body: &Value) -> u64 {
    let prompt = body.get("messages").unwrap_or(&body["prompt"]);
    prompt_hash(prompt.to_string().as_bytes())
}

/// The context leg of a request.
pub(crate) fn context(mut body: Value, id: u64, style: u8) -> Value {
    merge(
        &mut body,
        json!({"max_tokens": 1, "disaggregated_params":
            {"request_type": "context_only", "disagg_request_id": id, "schedule_style": style}}),
    );
    body
}

/// The generation leg of a request, from the context's answer.
pub(crate) fn generation(mut body: Value, answer: &Answer) -> Value {
    let json = answer.json();
    let mut params = json["choices"][0]["disaggregated_params"].clone();
    params["request_type"] = json!("generation_only");
    let ids = json["prompt_token_ids"].clone();
    let prompt = if body.get("prompt").is_some() {
        "prompt"
    } else {
        "prompt_token_ids"
    };
    merge(
        &mut body,
        json!({ "disaggregated_params": params, prompt: ids }),
    );
    body
}

/// The generation leg of a request that comes first.
pub(crate) fn first(mut body: Value, id: u64, endpoint: &Value) -> Value {
    merge(
        &mut body,
        json!({"disaggregated_params": {"request_type": "generation_only", "schedule_style": 1,
            "disagg_request_id": id, "ctx_request_id": id, "ctx_dp_rank": 0,
            "ctx_info_endpoint": endpoint}}),
    );
    body
}

/// The endpoint a context worker tells.
pub(crate) async fn endpoint(engine: &Engine) -> Value {
    let info = get(engine.address(), "/server_info").await.json();
    info["disaggregated_params"]["ctx_info_endpoint"][0].clone()
}

/// Sends a request and reads its answer meanwhile.
pub(crate) fn send(engine: &Engine, path: &'static str, body: &Value) -> JoinHandle<Answer> {
    let (address, body) = (engine.address(), body.clone());
    tokio::spawn(async move {
        let mut wire = Wire::open(address).await;
        wire.post(path, &body).await;
        wire.answer().await.unwrap()
    })
}

/// A refused request's error text.
pub(crate) async fn refused(engine: &Engine, path: &str, body: &Value) -> String {
    let answer = post(engine.address(), path, body).await;
    assert_eq!(answer.status, 400, "{body} {answer:?}");
    let json = answer.json();
    let text = json["error"].as_str().or(json["message"].as_str());
    text.unwrap_or_else(|| panic!("{json}")).to_owned()
}

/// Nothing is left at the workers.
pub(crate) async fn idle(engines: [&Engine; 2]) {
    for engine in engines {
        until(engine, |s| {
            let left = [s.running, s.waiting, s.rooms.rooms_open, s.kv.kv_held];
            left == [0; 4] && s.kv.kv_used_blocks == 0
        })
        .await;
    }
}
