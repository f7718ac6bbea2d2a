//! Answers in one piece, member for member as vLLM 0.32 writes them.

use std::fmt::Write as _;

use serde_json::Value;

use super::request::Route;

/// What the engine's builds say of themselves.
pub(super) const FINGERPRINT: &str = "vllm-0.32.0-sim";

/// What an answer is made of.
pub(super) struct Answer<'a> {
    pub(super) route: Route,
    pub(super) id: &'a str,
    /// Unix seconds.
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) text: &'a str,
    /// Ended at the token limit, not by itself.
    pub(super) length: bool,
    pub(super) choices: u32,
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) created_cache_tokens: u32,
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    /// Hand-over parameters, JSON.
    pub(super) kv: Option<&'a str>,
}

/// A JSON string literal.
pub(super) fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// The body of an answer.
pub(super) fn write(answer: &Answer<'_>) -> String {
    let mut out = String::with_capacity(answer.text.len().saturating_add(1536));
    // Writing to a String cannot fail.
    let _ = match answer.route {
        Route::Chat => chat(&mut out, answer),
        Route::Completions => completion(&mut out, answer),
        Route::Responses => response(&mut out, answer),
        Route::Messages => message(&mut out, answer),
    };
    out
}

/// The members an OpenAI object opens with.
fn head(out: &mut String, a: &Answer<'_>, object: &str) -> std::fmt::Result {
    write!(
        out,
        r#"{{"id":{},"object":"{object}","created":{},"model":{},"choices":["#,
        quote(a.id),
        a.created,
        quote(a.model)
    )
}

fn usage(out: &mut String, a: &Answer<'_>, created_cache: &str) -> std::fmt::Result {
    write!(
        out,
        r#"],"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{{"prompt_tokens":{},"total_tokens":{},"completion_tokens":{},"prompt_tokens_details":{{"cached_tokens":{},"created_cache_tokens":{created_cache},"multimodal_tokens":null}},"completion_tokens_details":null}},"#,
        a.prompt_tokens,
        a.prompt_tokens.saturating_add(a.completion_tokens),
        a.completion_tokens,
        a.cached_tokens,
    )
}

fn ids(a: &Answer<'_>) -> String {
    match a.prompt_token_ids {
        None => "null".to_owned(),
        Some(ids) => Value::from(ids).to_string(),
    }
}

fn kv<'a>(a: &Answer<'a>) -> &'a str {
    a.kv.unwrap_or("null")
}

fn chat(out: &mut String, a: &Answer<'_>) -> std::fmt::Result {
    head(out, a, "chat.completion")?;
    let (text, finish) = (quote(a.text), finish(a.length));
    for index in 0..a.choices {
        let comma = if index == 0 { "" } else { "," };
        write!(
            out,
            r#"{comma}{{"index":{index},"message":{{"role":"assistant","content":{text},"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"routed_experts":null}}"#
        )?;
    }
    usage(out, a, &a.created_cache_tokens.to_string())?;
    write!(
        out,
        r#""prompt_logprobs":null,"prompt_token_ids":{},"prompt_text":null,"kv_transfer_params":{},"ec_transfer_params":null,"metrics":null}}"#,
        ids(a),
        kv(a)
    )
}

fn completion(out: &mut String, a: &Answer<'_>) -> std::fmt::Result {
    head(out, a, "text_completion")?;
    let (text, finish, ids) = (quote(a.text), finish(a.length), ids(a));
    for index in 0..a.choices {
        let comma = if index == 0 { "" } else { "," };
        write!(
            out,
            r#"{comma}{{"index":{index},"text":{text},"logprobs":null,"finish_reason":"{finish}","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":{ids},"routed_experts":null}}"#
        )?;
    }
    usage(out, a, "null")?;
    write!(
        out,
        r#""kv_transfer_params":{},"ec_transfer_params":null,"metrics":null}}"#,
        kv(a)
    )
}

fn response(out: &mut String, a: &Answer<'_>) -> std::fmt::Result {
    let (status, details) = if a.length {
        ("incomplete", r#"{"reason":"max_output_tokens"}"#)
    } else {
        ("completed", "null")
    };
    write!(
        out,
        r#"{{"id":{},"object":"response","created_at":{},"model":{},"status":"{status}","incomplete_details":{details},"output":[{{"id":"msg_{}","type":"message","role":"assistant","status":"{status}","content":[{{"type":"output_text","text":{},"annotations":[],"logprobs":null}}]}}],"usage":{{"input_tokens":{},"input_tokens_details":{{"cached_tokens":{}}},"output_tokens":{},"output_tokens_details":{{"reasoning_tokens":0}},"total_tokens":{}}},"kv_transfer_params":{}}}"#,
        quote(a.id),
        a.created,
        quote(a.model),
        a.created,
        quote(a.text),
        a.prompt_tokens,
        a.cached_tokens,
        a.completion_tokens,
        a.prompt_tokens.saturating_add(a.completion_tokens),
        kv(a)
    )
}

fn message(out: &mut String, a: &Answer<'_>) -> std::fmt::Result {
    let stop = if a.length { "max_tokens" } else { "end_turn" };
    write!(
        out,
        r#"{{"id":{},"type":"message","role":"assistant","content":[{{"type":"text","text":{}}}],"model":{},"stop_reason":"{stop}","stop_sequence":null,"usage":{{"input_tokens":{},"output_tokens":{}}},"kv_transfer_params":{}}}"#,
        quote(a.id),
        quote(a.text),
        quote(a.model),
        a.prompt_tokens,
        a.completion_tokens,
        kv(a)
    )
}

fn finish(length: bool) -> &'static str {
    if length { "length" } else { "stop" }
}
