//! TensorRT-LLM, context first.

use super::*;

const CONTEXT: &[u8] = br#"{"choices":[{"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":9223372036854775807}}],"prompt_token_ids":[1, 2]}"#;
const COMPLETION: &[u8] = br#"{"model":"m","prompt":"hi","max_tokens":6}"#;

/// Sends a request, answers its context leg, and returns the body of the generation leg.
fn generation_body(stage: &mut Stage, path: &str, body: &[u8], reply: &[u8]) -> (Flow, String) {
    let mut flow = stage.flow_on(path);
    stage.on(&mut flow, Event::Body(body));
    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: reply,
        },
    );
    let text = String::from_utf8(leg(&effects).body.apply(body)).unwrap();
    (flow, text)
}

#[test]
fn the_generation_leg_carries_the_context_and_the_prompt_as_it_was_read() {
    let mut stage = Stage::of_engine("trtllm", 1, "");
    let (_, chat) = generation_body(&mut stage, "/v1/chat/completions", CHAT, CONTEXT);
    assert!(chat.starts_with(r#"{"disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"ctx_request_id":9223372036854775807},"prompt_token_ids":[1, 2],"model":"m","#), "{chat}");
    let (mut flow, text) = generation_body(&mut stage, "/v1/completions?x=1", COMPLETION, CONTEXT);
    assert!(
        text.ends_with(r#","model":"m","prompt":[1, 2],"max_tokens":6}"#),
        "{text}"
    );
    stage.on(&mut flow, headers(200, false));
    let effects = stage.on(
        &mut flow,
        Event::ResponseChunk {
            bytes: b"{}",
            end: true,
        },
    );
    assert_eq!(endings(&effects), 1);
}

#[test]
fn ids_are_fresh_for_every_attempt() {
    let mut stage = Stage::of_engine("trtllm", 2, "");
    let mut flow = stage.flow();
    let id = |effects: &[Effect]| {
        let body: serde_json::Value = serde_json::from_slice(&call(effects).body).unwrap();
        body["disaggregated_params"]["disagg_request_id"]
            .as_u64()
            .unwrap()
    };
    let first = id(&stage.on(&mut flow, Event::Body(CHAT)));
    let effects = stage.on(&mut flow, Event::CallFailed);
    assert!(has(&effects, |effect| matches!(effect, Effect::ReadBody)));
    let second = id(&stage.on(&mut flow, Event::Body(CHAT)));
    assert_ne!(first, second);
    assert!(first >= 1 << 42 && second >= 1 << 42);
}

#[test]
fn a_context_that_cannot_be_used_is_not_passed_on() {
    let mut stage = Stage::of_engine("trtllm", 1, "");
    let reply = br#"{"choices":[{}],"prompt_token_ids":[1]}"#;
    let (_, body) = generation_body(&mut stage, "/v1/completions", COMPLETION, reply);
    assert_eq!(body.as_bytes(), COMPLETION);
}

#[test]
fn the_context_of_a_client_that_left_is_taken_by_a_leg_of_one_token() {
    let mut stage = Stage::of_engine("trtllm", 1, "");
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(endings(&stage.on(&mut flow, GONE)), 1);
    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: CONTEXT,
        },
    );
    let freeing = call(&effects);
    assert_eq!(freeing.address, "10.0.0.2:8000");
    let body: serde_json::Value = serde_json::from_slice(&freeing.body).unwrap();
    assert_eq!(body["max_tokens"], 1);
    assert_eq!(body["prompt_token_ids"], serde_json::json!([1, 2]));
    let params = &body["disaggregated_params"];
    assert_eq!(params["request_type"], "generation_only");
    stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: b"{}",
        },
    );
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn pods_of_two_engines_are_not_paired() {
    let prefill = pod("ns/p").prefill().roleset("r").engine("trtllm");
    let decode = pod("ns/d").decode().roleset("r");
    let mut stage = Stage::serving(model("m").pod(prefill).pod(decode), "");
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(reply(&effects).status, 503);
    stage.assert_at_rest();
}
