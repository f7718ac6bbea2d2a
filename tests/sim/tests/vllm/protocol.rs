//! Shapes: members, their order, ids, streams.

use pd_engine_sim::prompt_hash;
use serde_json::{Value, json};

use crate::client::{
    Answer, CHAT, COMPLETIONS, Wire, chat, completion, members, merge, pair, post, prefill_of,
};

// Answers of a real vLLM 0.32, texts shortened.
const REAL_CHAT: &str = r#"{"id":"chatcmpl-b0ddbd0d1926f93e","object":"chat.completion","created":1795983302,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":" char","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-d1de068b","usage":{"prompt_tokens":380,"total_tokens":381,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":256,"multimodal_tokens":null},"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"remote_engine_id":"4a2c8ff8-33f9-4ee3-b23c-c3558f8ac383","remote_request_id":"chatcmpl-b0ddbd0d1926f93e-8a2b0762","remote_host":"127.0.0.1","remote_port":15601,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":380,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0},"ec_transfer_params":null,"metrics":null}"#;
const REAL_COMPLETION: &str = r#"{"id":"cmpl-8b92f4b80284cf04","object":"text_completion","created":1795983323,"model":"tiny","choices":[{"index":0,"text":"arDown","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-d1de068b","usage":{"prompt_tokens":371,"total_tokens":372,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[6,7,8]],"remote_engine_id":"4a2c8ff8-33f9-4ee3-b23c-c3558f8ac383","remote_request_id":"cmpl-8b92f4b80284cf04-0-9f5e8d6e","remote_host":"127.0.0.1","remote_port":15601,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":371,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0},"ec_transfer_params":null,"metrics":null}"#;
const REAL_CHAT_EVENTS: [&str; 4] = [
    r#"{"id":"chatcmpl-863d2688dd4c407d","object":"chat.completion.chunk","created":1795983316,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#,
    r#"{"id":"chatcmpl-863d2688dd4c407d","object":"chat.completion.chunk","created":1795983316,"model":"tiny","choices":[{"index":0,"delta":{"content":" char"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
    r#"{"id":"chatcmpl-863d2688dd4c407d","object":"chat.completion.chunk","created":1795983316,"model":"tiny","choices":[{"index":0,"delta":{"content":" multiple"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}"#,
    r#"{"id":"chatcmpl-863d2688dd4c407d","object":"chat.completion.chunk","created":1795983316,"model":"tiny","choices":[],"usage":{"prompt_tokens":380,"total_tokens":386,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0-d1de068b"}"#,
];
const REAL_COMPLETION_EVENTS: [&str; 3] = [
    r#"{"id":"cmpl-83bb0aabc0d18df5","object":"text_completion","created":1795983329,"model":"tiny","choices":[{"index":0,"text":"arDown","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#,
    r#"{"id":"cmpl-83bb0aabc0d18df5","object":"text_completion","created":1795983329,"model":"tiny","choices":[{"index":0,"text":"lat","logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#,
    r#"{"id":"cmpl-83bb0aabc0d18df5","object":"text_completion","created":1795983329,"model":"tiny","choices":[],"usage":{"prompt_tokens":371,"total_tokens":377,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"vllm-0.32.0-d1de068b"}"#,
];

fn assert_json_headers(answer: &Answer) {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["server"], "uvicorn");
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(answer.headers["vary"], "Origin");
    assert_eq!(
        answer.headers["content-length"],
        answer.body.len().to_string()
    );
}

#[tokio::test]
async fn both_legs_of_a_chat_have_the_real_members_and_use_the_prefilled_kv() {
    let (p, d) = pair().await;
    let body = chat(json!({"max_tokens": 6}));
    let prefill = post(p.address(), CHAT, &prefill_of(body.clone())).await;
    assert_json_headers(&prefill);
    assert_eq!(members(&prefill.body), members(REAL_CHAT));
    let kv = prefill.kv();
    assert_eq!(kv["do_remote_prefill"], true);
    assert_eq!(kv["do_remote_decode"], false);
    assert_eq!(kv["transfer_mode"], "pull");
    assert_eq!(kv["remote_block_ids"], json!([[1, 2, 3]]));
    let usage = &prefill.json()["usage"];
    assert_eq!(usage["completion_tokens"], 1);
    assert_eq!(kv["remote_num_tokens"], usage["prompt_tokens"]);
    assert_eq!(usage["prompt_tokens_details"]["created_cache_tokens"], 256);
    let state = p.state();
    assert_eq!((state.kv.kv_held, state.kv.kv_held_blocks), (1, 3));
    assert_eq!((state.running, state.waiting), (0, 0));

    let mut second = body;
    merge(&mut second, json!({"kv_transfer_params": kv}));
    let decode = post(d.address(), CHAT, &second).await;
    assert_json_headers(&decode);
    let mut expected = members(REAL_CHAT);
    let object = expected
        .iter()
        .position(|m| m == "do_remote_prefill")
        .unwrap();
    expected.drain(object..object + 14);
    assert_eq!(members(&decode.body), expected);
    assert_eq!(decode.json()["kv_transfer_params"], Value::Null);
    let identity = decode.identity();
    let prompt = prompt_hash(second["messages"].to_string().as_bytes());
    assert_eq!(identity.engine, "d");
    assert_eq!((identity.prompt, identity.kv), (prompt, Some(prompt)));
    assert_eq!(identity.from.as_deref(), kv["remote_request_id"].as_str());
    assert_eq!(decode.json()["id"], json!(identity.request));
    assert_eq!(p.state().kv.kv_taken, 1);
    assert_eq!(p.state().kv.kv_used_blocks, 0);
    assert_eq!((d.state().kv.pulled, d.state().kv.computed_locally), (1, 0));
}

#[tokio::test]
async fn completions_have_the_real_members() {
    let (p, d) = pair().await;
    let prefill = post(p.address(), COMPLETIONS, &prefill_of(completion(json!({})))).await;
    assert_eq!(members(&prefill.body), members(REAL_COMPLETION));
    let body = completion(json!({"max_tokens": 2, "kv_transfer_params": prefill.kv()}));
    let decode = post(d.address(), COMPLETIONS, &body).await;
    let identity = decode.identity();
    assert_eq!(identity.kv, Some(identity.prompt));
    let text = &decode.json()["choices"][0]["text"];
    assert_eq!(*text, json!(format!("{identity} t2")));
}

#[tokio::test]
async fn streams_have_the_real_events() {
    let (p, d) = pair().await;
    let more = json!({"max_tokens": 2, "stream": true, "stream_options": {"include_usage": true}});
    let cases: [(&str, Value, &[&str]); 2] = [
        (CHAT, chat(more.clone()), &REAL_CHAT_EVENTS),
        (COMPLETIONS, completion(more), &REAL_COMPLETION_EVENTS),
    ];
    for (path, body, real) in cases {
        let mut first = body.clone();
        first.as_object_mut().unwrap().remove("stream_options");
        let kv = post(p.address(), path, &prefill_of(first)).await.kv();
        let mut second = body;
        merge(&mut second, json!({"kv_transfer_params": kv}));
        let answer = post(d.address(), path, &second).await;
        assert_eq!(
            answer.headers["content-type"],
            "text/event-stream; charset=utf-8"
        );
        assert_eq!(answer.headers["transfer-encoding"], "chunked");
        assert!(!answer.headers.contains_key("cache-control"));
        assert_eq!(answer.broken, None);
        let mut events = answer.events();
        assert_eq!(events.pop(), Some("[DONE]"));
        let got: Vec<_> = events.iter().map(|e| members(e)).collect();
        let expected: Vec<_> = real.iter().map(|e| members(e)).collect();
        assert_eq!(got, expected, "{path}");
        let identity = answer.identity();
        assert_eq!(identity.kv, Some(identity.prompt));
        let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn without_include_usage_there_is_no_usage_chunk() {
    let (_, d) = pair().await;
    let answer = post(
        d.address(),
        CHAT,
        &chat(json!({"max_tokens": 2, "stream": true})),
    )
    .await;
    // Role, two tokens, end.
    assert_eq!(answer.events().len(), 4);
    assert!(!answer.body.contains("usage"));
}

#[tokio::test]
async fn responses_and_messages_hand_kv_over_too() {
    let (p, d) = pair().await;
    let model = json!({"model": "sim-model", "max_tokens": 1, "max_output_tokens": 1});
    let cases = [
        (
            "/v1/responses",
            json!({"input": "word ".repeat(200)}),
            "resp_",
            "response.incomplete",
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "word ".repeat(200)}]}),
            "chatcmpl-",
            "message_stop",
        ),
    ];
    for (path, mut body, prefix, end) in cases {
        merge(&mut body, model.clone());
        let prefill = post(p.address(), path, &prefill_of(body.clone())).await;
        let kv = prefill.kv();
        let id = kv["remote_request_id"].as_str().unwrap();
        assert!(id.starts_with(prefix), "{id}");
        merge(&mut body, json!({"kv_transfer_params": kv}));
        let decode = post(d.address(), path, &body).await;
        let identity = decode.identity();
        assert_eq!(identity.kv, Some(identity.prompt), "{path}");
        merge(&mut body, json!({"stream": true}));
        let stream = post(d.address(), path, &body).await;
        assert_eq!(stream.identity().prompt, identity.prompt);
        assert!(stream.body.contains(end), "{stream:?}");
    }
}

#[tokio::test]
async fn ids_come_from_the_header_else_the_body_else_chance() {
    let (p, _) = pair().await;
    let mut wire = Wire::open(p.address()).await;
    let body = prefill_of(completion(json!({"request_id": "from-body"}))).to_string();
    let json_type = ("content-type", "application/json");
    let headers = [json_type, ("x-request-id", "from-header")];
    wire.send("POST", COMPLETIONS, &headers, &body).await;
    let answer = wire.answer().await.unwrap();
    assert_eq!(answer.json()["id"], "cmpl-from-header");
    assert!(!answer.headers.contains_key("x-request-id"));
    let remote = answer.kv()["remote_request_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let suffix = remote.strip_prefix("cmpl-from-header-0-").unwrap();
    assert!(suffix.len() == 8 && suffix.bytes().all(|b| b.is_ascii_hexdigit()));

    wire.send("POST", COMPLETIONS, &[json_type], &body).await;
    assert_eq!(wire.answer().await.unwrap().json()["id"], "cmpl-from-body");
    wire.post(CHAT, &prefill_of(chat(json!({})))).await;
    let answer = wire.answer().await.unwrap();
    let id = answer.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(id.strip_prefix("chatcmpl-").unwrap().len(), 16);
    let remote = answer.kv()["remote_request_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let suffix = remote.strip_prefix(&format!("{id}-")).unwrap();
    assert_eq!(suffix.len(), 8);
}

#[tokio::test]
async fn token_limits_are_read_as_vllm_reads_them() {
    let (_, d) = pair().await;
    let tokens = async |path: &str, body: Value| {
        let answer = post(d.address(), path, &body).await;
        answer.json()["usage"]["completion_tokens"].clone()
    };
    let both = json!({"max_tokens": 1, "max_completion_tokens": 5});
    assert_eq!(tokens(CHAT, chat(both.clone())).await, 5);
    assert_eq!(tokens(COMPLETIONS, completion(both)).await, 1);
    let other = json!({"max_completion_tokens": 5});
    assert_eq!(tokens(COMPLETIONS, completion(other)).await, 16);
    assert_eq!(tokens(CHAT, chat(json!({"max_tokens": 2.0}))).await, 2);
    assert_eq!(tokens(CHAT, chat(json!({"max_tokens": null}))).await, 16);
    // The last of duplicate members wins.
    let mut wire = Wire::open(d.address()).await;
    let text = chat(json!({"max_tokens": 2})).to_string();
    let text = format!("{},\"max_tokens\":7}}", text.strip_suffix('}').unwrap());
    wire.send("POST", CHAT, &[("content-type", "application/json")], &text)
        .await;
    let answer = wire.answer().await.unwrap();
    assert_eq!(answer.json()["usage"]["completion_tokens"], 7);
}

#[tokio::test]
async fn a_prefill_of_several_steps_counts_them_and_knows_no_cached_tokens() {
    let (p, _) = pair().await;
    let mut body = prefill_of(chat(json!({})));
    merge(&mut body, json!({"max_tokens": 3}));
    let answer = post(p.address(), CHAT, &body).await;
    let prompt = answer.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(answer.kv()["remote_num_tokens"], prompt + 2);
    assert_eq!(answer.kv().get("remote_prefill_cached_tokens"), None);
}

#[tokio::test]
async fn token_ids_of_the_prefill_stand_for_the_prompt_on_decode() {
    let (p, d) = pair().await;
    let answer = post(
        p.address(),
        CHAT,
        &prefill_of(chat(json!({"return_token_ids": true}))),
    )
    .await;
    let ids = answer.json()["prompt_token_ids"].clone();
    assert_eq!(
        json!(ids.as_array().unwrap().len()),
        answer.json()["usage"]["prompt_tokens"]
    );
    let mut kv = answer.kv();
    merge(&mut kv, json!({"prompt_token_ids": ids}));
    let mut body = chat(json!({"kv_transfer_params": kv}));
    merge(
        &mut body,
        json!({"messages": [{"role": "user", "content": "another"}]}),
    );
    let decode = post(d.address(), CHAT, &body).await;
    assert_eq!(decode.identity().prompt, answer.identity().prompt);
    assert_eq!(
        decode.json()["usage"]["prompt_tokens"],
        answer.json()["usage"]["prompt_tokens"]
    );
}

#[tokio::test]
async fn several_sequences_leak_all_but_the_one_offered() {
    let (p, d) = pair().await;
    let answer = post(
        p.address(),
        COMPLETIONS,
        &prefill_of(completion(json!({"n": 2}))),
    )
    .await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2);
    let kv = answer.kv();
    assert!(
        kv["remote_request_id"]
            .as_str()
            .unwrap()
            .starts_with("1_cmpl-")
    );
    assert_eq!(p.state().kv.kv_held, 2);
    let body = completion(json!({"kv_transfer_params": kv}));
    post(d.address(), COMPLETIONS, &body).await;
    assert_eq!(p.state().kv.kv_held, 1);

    let two = json!({"prompt": ["first prompt", "second prompt"]});
    let answer = post(p.address(), COMPLETIONS, &prefill_of(completion(two))).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2);
    assert_eq!(answer.kv()["remote_block_ids"].as_array().unwrap().len(), 1);
    assert_eq!(p.state().kv.kv_held, 3);
}

#[tokio::test]
async fn the_log_keeps_what_arrived_byte_for_byte() {
    let (p, _) = pair().await;
    let mut wire = Wire::open(p.address()).await;
    let text = "{ \"model\":\"sim-model\",\"prompt\" : \"h\\u00e9\",  \"kv_transfer_params\":{\"do_remote_decode\":true}}";
    let headers = [
        ("Content-Type", "application/json"),
        ("X-Request-ID", "abc"),
    ];
    wire.send("POST", "/v1/completions?x=1", &headers, text)
        .await;
    assert_eq!(wire.answer().await.unwrap().status, 200);
    let log = p.log();
    assert_eq!(log.len(), 1);
    let record = &log[0];
    assert_eq!(record.body.as_deref(), Some(text));
    assert_eq!(record.body_length, text.len());
    assert_eq!(record.path, "/v1/completions?x=1");
    assert_eq!(record.headers["x-request-id"], "abc");
    assert_eq!(record.leg, Some(pd_engine_sim::On::Prefill));
    let over_http = crate::client::get(p.admin_address(), "/sim/admin/log?last=1").await;
    assert_eq!(over_http.json()[0]["body"], text);
}
