//! The requests of a vLLM pair.

use std::io;

use pd_engine_sim::Engine;
use serde_json::{Value, json};

pub(crate) use crate::wire::{
    Answer, CHAT, COMPLETIONS, PATIENCE, Wire, engine, get, members, merge, post, try_post, until,
};

impl Answer {
    pub(crate) fn kv(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()["kv_transfer_params"].clone()
    }
}

/// A prefill and a decode engine.
pub(crate) async fn pair() -> (Engine, Engine) {
    (engine("p", |_| {}).await, engine("d", |_| {}).await)
}

/// A chat request of about 300 tokens, with more members.
pub(crate) fn chat(more: Value) -> Value {
    let words = "word ".repeat(240);
    let mut body = json!({"model": "sim-model", "messages": [{"role": "user", "content": words}]});
    merge(&mut body, more);
    body
}

/// A completions request of about 300 tokens, with more members.
pub(crate) fn completion(more: Value) -> Value {
    let mut body = json!({"model": "sim-model", "prompt": "word ".repeat(240)});
    merge(&mut body, more);
    body
}

/// The prefill leg of a request.
pub(crate) fn prefill_of(mut body: Value) -> Value {
    merge(
        &mut body,
        json!({"max_tokens": 1, "stream": false, "kv_transfer_params": {"do_remote_decode": true}}),
    );
    body
}

/// Prefills the chat request and returns its hand-over parameters.
pub(crate) async fn prefill(engine: &Engine) -> Value {
    let body = prefill_of(chat(json!({})));
    post(engine.address(), CHAT, &body).await.kv()
}

/// Decodes the chat request with these parameters.
pub(crate) async fn decode(engine: &Engine, kv: &Value) -> io::Result<Answer> {
    let body = chat(json!({"max_tokens": 3, "kv_transfer_params": kv}));
    try_post(engine.address(), CHAT, &body).await
}
