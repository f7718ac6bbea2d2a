//! Bodies and headers of both legs, byte for byte.

use crate::stand::{
    D0, KEEP, P0, PARAMS, assert_quiet, bare, chat, chat_body, config, decoding, finish,
    last_pending, one_pair, prefill_ok, push, target, topology, two_pairs, vllm, with_combined,
};
use pd_wasm_tests::{Exchange, Gateway, GatewayConfig, Script};
use pd_wire::names;

#[test]
fn the_prefill_leg_goes_out_from_the_root_and_the_decode_leg_carries_the_kv() {
    let mut gateway = one_pair("");
    let exchange = chat(true)
        .header("authorization", "Bearer client")
        .header("traceparent", "00-1-2-03")
        .header("x-request-id", "mine");
    let flight = gateway.send(exchange);
    let call = last_pending(&gateway);
    assert_eq!(call.cluster, names::CLUSTER);
    assert_eq!(target(&call), P0);
    assert_eq!(call.path(), "/v1/chat/completions");
    assert_eq!(call.header(":authority"), Some(P0));
    assert_eq!(call.header("authorization"), Some("Bearer client"));
    assert_eq!(call.header("traceparent"), Some("00-1-2-03"));
    let fresh = call.header("x-request-id").unwrap().to_owned();
    assert!(fresh.len() == 36 && fresh != "mine");
    assert_eq!(
        String::from_utf8(call.body).unwrap(),
        format!(
            r#"{{{KEEP},"max_tokens":1,"max_completion_tokens":1,"model":"m","messages":[{{"role":"user","content":"Hello"}}],"stream":false}}"#
        )
    );
    assert!(gateway.outcome(flight).upstream.is_none());

    prefill_ok(&mut gateway);
    let outcome = gateway.outcome(flight);
    let leg = outcome.upstream();
    let body = format!(
        r#"{{"kv_transfer_params":{PARAMS},{}"#,
        &chat_body(true)[1..]
    );
    assert_eq!(String::from_utf8_lossy(&leg.body), body);
    assert_eq!(leg.header("content-length"), Some(&*body.len().to_string()));
    assert_eq!(leg.header("target-pod"), Some(D0));
    assert_eq!(leg.header("x-request-id"), Some(&*fresh));
    assert_eq!(leg.header("authorization"), Some("Bearer client"));

    finish(&mut gateway, flight);
    let outcome = gateway.outcome(flight);
    outcome.expect(200);
    for (name, value) in [
        ("request-id", &*fresh),
        ("x-request-id", "mine"),
        ("routing-strategy", "pd"),
        ("target-pod", "r0-d"),
        ("target-pod-ip", D0),
        ("prefill-target-pod", "r0-p"),
        ("prefill-target-pod-ip", "10.0.0.1"),
    ] {
        assert_eq!(outcome.header(name), Some(value), "{name}");
    }
    assert_quiet(&mut gateway, 1);
}

#[test]
fn every_other_byte_of_a_body_stays() {
    let texts = [
        "\u{feff} \n\t{ \"model\" : \"m\" , \"messages\" : [ ] } \n",
        r#"{"messages":[{"content":"é\u00e9\ud83d\ude00","role":"user"}],"seed":123456789012345678901234567890,"x":1e400,"model":"m"}"#,
        r#"{"model":"m","messages":[],"tools":[{"type":"function","function":{"parameters":{"b":1,"a":2,"b":3}}}]}"#,
    ];
    for first_byte_edit in [true, false] {
        for pieces in [1, 7, 100_000] {
            let mut gateway = Gateway::new(GatewayConfig {
                first_byte_edit,
                ..config(1, "")
            });
            push(&mut gateway, &topology(1, &two_pairs())).expect(200);
            for text in texts {
                let exchange = Exchange::post("/v1/chat/completions?x=1", text).chunked(pieces);
                let flight = decoding(&mut gateway, exchange);
                let outcome = gateway.outcome(flight);
                let (lead, rest) = text.split_at(text.find('{').unwrap() + 1);
                let expected = format!("{lead}\"kv_transfer_params\":{PARAMS},{rest}");
                let leg = outcome.upstream();
                assert_eq!(String::from_utf8_lossy(&leg.body), expected);
                assert_eq!(leg.header(":path"), Some("/v1/chat/completions?x=1"));
                let length = expected.len().to_string();
                assert_eq!(leg.header("content-length"), Some(&*length));
                finish(&mut gateway, flight);
                gateway.outcome(flight).expect(200);
            }
            assert_quiet(&mut gateway, 1);
        }
    }
}

#[test]
fn a_chunked_body_without_a_length_leaves_with_one() {
    let mut gateway = one_pair("");
    let exchange = chat(false).without("content-length").chunked(10);
    let flight = decoding(&mut gateway, exchange.end_with_last_chunk());
    let outcome = gateway.outcome(flight);
    let leg = outcome.upstream();
    assert_eq!(
        leg.header("content-length"),
        Some(&*leg.body.len().to_string())
    );
}

#[test]
fn a_ten_megabyte_prompt_goes_through_and_one_over_the_limit_is_a_413() {
    let mut gateway = Gateway::new(GatewayConfig {
        request_body_buffer_limit: 12 << 20,
        ..config(1, "")
    });
    push(&mut gateway, &topology(1, &two_pairs())).expect(200);
    gateway.other_engines(|sent| {
        let decode = sent.cluster.is_none();
        if decode {
            Script::answer(200, "{}")
        } else {
            crate::stand::prefilled()
        }
    });
    let body = |size| format!(r#"{{"model":"m","prompt":"{}"}}"#, "a".repeat(size));
    let large = Exchange::post("/v1/completions", body(10 << 20)).chunked(1 << 16);
    let outcome = gateway.run(large);
    assert_eq!(
        outcome.expect(200).upstream().body.len(),
        body(10 << 20).len() + PARAMS.len() + 22
    );
    let over = Exchange::post("/v1/completions", body(13 << 20)).chunked(1 << 20);
    gateway.run(over).expect(413);
    assert_quiet(&mut gateway, 1);
    assert_eq!(crate::stand::endings(&mut gateway), 2);
}

#[test]
fn a_client_may_not_hand_kv_over_on_any_route() {
    let mut gateway = bare(1, "");
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/tokenize",
    ] {
        for member in [
            "kv_transfer_params",
            "disagg_prefill_resp",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "disaggregated_params",
            "ec_transfer_params",
            "rid",
            r"\u006bv_transfer_params",
            r"r\u0069d",
        ] {
            let body = format!(r#"{{"model":"m","prompt":"a","{member}":null}}"#);
            let outcome = gateway.run(Exchange::post(path, body));
            let marker = outcome
                .expect(400)
                .header("x-error-request-body-processing");
            assert_eq!(marker, Some("true"), "{path} {member}");
            assert!(outcome.upstream.is_none() && outcome.calls.is_empty());
        }
    }
    assert_quiet(&mut gateway, 1);
}

#[test]
fn bad_requests_are_answered_in_openai_form_and_charge_nothing() {
    let mut gateway = bare(1, "");
    let chat = "/v1/chat/completions";
    let cases = [
        (Exchange::post(chat, "{"), 400),
        (Exchange::post(chat, "[]"), 400),
        (Exchange::post(chat, "{}"), 400),
        (Exchange::new("POST", chat), 400),
        (Exchange::post(chat, r#"{"model":7}"#), 400),
        (Exchange::post(chat, r#"{"model":"m","model":"m"}"#), 400),
        (
            Exchange::post(chat, r#"{"model":"m","stream":true,"stream":false}"#),
            400,
        ),
        (Exchange::post(chat, r#"{"model":"x","messages":[]}"#), 404),
        (
            crate::stand::chat(true).header("content-encoding", "gzip"),
            415,
        ),
        (
            crate::stand::chat(true).header("routing-strategy", "best"),
            400,
        ),
    ];
    let sent = cases.len();
    for (exchange, status) in cases {
        let outcome = gateway.run(exchange);
        let error = &outcome.expect(status).json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string());
        assert_eq!(outcome.header("content-type"), Some("application/json"));
        assert!(outcome.upstream.is_none() && outcome.calls.is_empty());
    }
    assert_eq!(sent, 10);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn what_cannot_hand_over_goes_in_one_leg_unchanged() {
    let mut gateway = bare(1, "");
    gateway.other_engines(|_| Script::answer(200, "{}"));
    for body in [
        r#"{"model":"m","prompt":["a","b"]}"#,
        r#"{"model":"m","prompt":"a","n":2}"#,
        r#"{"model":"m","prompt":"a","best_of":3}"#,
    ] {
        let outcome = gateway.run(Exchange::post("/v1/completions", body));
        assert_eq!(outcome.expect(200).upstream().body, body.as_bytes());
        assert!(outcome.calls.is_empty());
        assert!(outcome.header("target-pod").unwrap().ends_with("-d"));
        assert_eq!(outcome.header("prefill-target-pod"), None);
    }
    push(&mut gateway, &with_combined(2)).expect(200);
    let batch = r#"{"model":"m","prompt":["a","b"]}"#;
    let outcome = gateway.run(Exchange::post("/v1/completions", batch));
    assert_eq!(outcome.expect(200).header("target-pod"), Some("c"));
    let other = gateway.run(Exchange::post(
        "/v1/embeddings",
        r#"{"model":"m","input":"a"}"#,
    ));
    assert_eq!(other.expect(200).header("target-pod"), Some("c"));
    assert_quiet(&mut gateway, 1);
}

#[test]
fn an_unusable_hand_over_is_not_passed_on() {
    let mut gateway = one_pair("");
    let block_ids = PARAMS.replace("[[6, 7],[8]]", "[]");
    for reply in [
        r#"{"choices":[]}"#.to_owned(),
        r#"{"kv_transfer_params":null}"#.to_owned(),
        format!(r#"{{"kv_transfer_params":{block_ids}}}"#),
        format!(
            r#"{{"kv_transfer_params":{}}}"#,
            PARAMS.replace("15601", "0")
        ),
    ] {
        let flight = gateway.send(chat(true));
        let call = last_pending(&gateway);
        gateway.answer(call.id, Script::answer(200, reply));
        let outcome = gateway.outcome(flight);
        assert_eq!(outcome.upstream().body, chat_body(true).as_bytes());
        finish(&mut gateway, flight);
    }
    assert_eq!(
        crate::stand::total(&mut gateway, "gateway_pd_hand_over_unusable_total"),
        4
    );
    assert_quiet(&mut gateway, 1);
}

#[test]
fn every_api_that_hands_over_does() {
    let mut gateway = bare(1, "");
    gateway.other_engines(vllm);
    for (path, body, cap) in [
        (
            "/v1/completions",
            r#"{"model":"m","prompt":"a"}"#,
            "max_tokens",
        ),
        (
            "/v1/responses",
            r#"{"model":"m","input":"a"}"#,
            "max_output_tokens",
        ),
        (
            "/v1/messages",
            r#"{"model":"m","max_tokens":9,"messages":[]}"#,
            "max_tokens",
        ),
    ] {
        let outcome = gateway.run(Exchange::post(path, body));
        let prefill = outcome.calls[0].json();
        assert_eq!(
            (&prefill[cap], &prefill["stream"]),
            (&1.into(), &false.into())
        );
        assert_eq!(outcome.calls[0].path(), path);
        let decode = outcome.expect(200).upstream().json();
        assert_eq!(decode["kv_transfer_params"]["remote_engine_id"], "4a2c");
    }
}
