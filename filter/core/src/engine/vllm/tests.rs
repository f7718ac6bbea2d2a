use super::*;
use crate::request::patch::build;
use crate::request::scan;
use serde_json::{Value, json};

const IP: &str = "10.0.0.7";

fn params() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.9.9.9",
        "remote_port": 15601, "tp_size": 1, "remote_blocks_expiry_time": null,
    })
}

fn with(key: &str, value: Value) -> Value {
    let mut params = params();
    params[key] = value;
    params
}

fn without(mut params: Value, key: &str) -> Value {
    params.as_object_mut().unwrap().remove(key);
    params
}

fn give(params: &Value) -> HandOver {
    let reply = json!({"id": "x", "kv_transfer_params": params, "usage": {}}).to_string();
    hand_over(reply.as_bytes(), KvConnector::Shfs, IP)
}

fn given(params: &Value) -> Value {
    match give(params) {
        HandOver::Members(members) => {
            let object = [b"{", members.as_slice(), b"}"].concat();
            serde_json::from_slice::<Value>(&object).unwrap()["kv_transfer_params"].clone()
        }
        other => panic!("{other:?} for {params}"),
    }
}

#[test]
fn a_usable_hand_over_is_passed_on_byte_for_byte() {
    let raw = r#"{"tp_size" : 1.0,"do_remote_prefill":true, "remote_block_ids":[ [1,2] , [9] ],"remote_engine_id":"\u0065","remote_request_id":"r","remote_host":"10.9.9.9","remote_port":1,"x":{"remote_port":0}}"#;
    let reply = format!(" {{\"kv_transfer_params\": {raw} }}\n");
    assert_eq!(
        hand_over(reply.as_bytes(), KvConnector::Shfs, IP),
        HandOver::Members(format!("\"kv_transfer_params\":{raw}").into_bytes())
    );
}

#[test]
fn a_host_is_replaced_only_when_nobody_else_can_reach_it() {
    for host in [
        "0.0.0.0",
        "::",
        "127.0.0.1",
        "127.1.2.3",
        "::1",
        "::ffff:127.0.0.1",
        "localhost",
        "",
    ] {
        assert_eq!(
            given(&with("remote_host", json!(host))),
            with("remote_host", json!(IP)),
            "{host}"
        );
    }
    assert_eq!(
        given(&with("remote_host", Value::Null)),
        with("remote_host", json!(IP))
    );
    assert_eq!(
        given(&without(params(), "remote_host")),
        with("remote_host", json!(IP))
    );
    for host in ["10.1.1.1", "prefill-0.pods.svc", "fd00::1"] {
        assert_eq!(
            given(&with("remote_host", json!(host)))["remote_host"],
            host
        );
    }
    let reply = json!({"kv_transfer_params": with("remote_host", json!("127.0.0.1"))}).to_string();
    for local in ["127.0.0.1", "::1"] {
        let HandOver::Members(kept) = hand_over(reply.as_bytes(), KvConnector::Shfs, local) else {
            panic!("usable");
        };
        assert!(
            str::from_utf8(&kept)
                .unwrap()
                .contains(r#""remote_host":"127.0.0.1""#)
        );
    }
}

/// Blocks of a long prompt, and `more`.
fn long(more: &[Value]) -> Vec<Value> {
    let blocks = (1000..1100).map(Value::from);
    blocks.chain(more.iter().cloned()).collect()
}

#[test]
fn long_lists_of_blocks_are_passed_on() {
    for end in [json!(0), json!(7)] {
        let lists = json!([long(std::slice::from_ref(&end)), long(&[])]);
        let params = with("remote_block_ids", lists);
        assert_eq!(given(&params), params);
        let flat = Value::from(long(&[end]));
        let params = without(with("remote_block_ids", flat), "remote_request_id");
        assert_eq!(given(&params), params);
    }
}

#[test]
fn anything_that_could_hurt_a_decode_engine_is_not_passed_on() {
    use Unusable::*;
    let flat = with("remote_block_ids", json!([1, 2]));
    let cases = [
        (Value::Null, Missing),
        (json!([]), NotAnObject),
        (json!("x"), NotAnObject),
        (json!({}), NotRemote),
        (with("do_remote_prefill", json!(false)), NotRemote),
        (with("do_remote_prefill", json!(1)), NotRemote),
        (with("remote_block_ids", Value::Null), BlockIds),
        (with("remote_block_ids", json!([])), BlockIds),
        (with("remote_block_ids", json!([[]])), BlockIds),
        (with("remote_block_ids", json!([[1], []])), BlockIds),
        (with("remote_block_ids", json!([[1], 2])), BlockIds),
        (with("remote_block_ids", json!([[-1]])), BlockIds),
        (
            with("remote_block_ids", json!([long(&[]), long(&[json!(1.5)])])),
            BlockIds,
        ),
        (
            with("remote_block_ids", json!([long(&[json!([1])])])),
            BlockIds,
        ),
        (
            with("remote_block_ids", Value::from(long(&[json!([1])]))),
            BlockIds,
        ),
        (with("remote_block_ids", json!([["1"]])), BlockIds),
        (with("remote_block_ids", json!("1")), BlockIds),
        (flat.clone(), BlockIds),
        (without(params(), "remote_block_ids"), BlockIds),
        (with("remote_engine_id", json!("")), EngineId),
        (with("remote_engine_id", json!(7)), EngineId),
        (without(params(), "remote_engine_id"), EngineId),
        (with("remote_request_id", json!("")), RequestId),
        (with("remote_request_id", Value::Null), RequestId),
        (with("remote_host", json!(1)), Host),
        (with("remote_port", json!(0)), Port),
        (with("remote_port", json!(65536)), Port),
        (with("remote_port", json!("15601")), Port),
        (without(params(), "remote_port"), Port),
    ];
    for (params, reason) in cases {
        assert_eq!(give(&params), HandOver::Unusable(reason), "{params}");
    }
    // Older engines send neither request id nor groups.
    let old = without(flat, "remote_request_id");
    assert_eq!(given(&old), old);
    let twice =
        br#"{"kv_transfer_params":{"remote_port":1,"do_remote_prefill":true,"remote_port":2}}"#;
    assert_eq!(
        hand_over(twice, KvConnector::Shfs, IP),
        HandOver::Unusable(Repeated)
    );
    assert_eq!(
        hand_over(b"{}", KvConnector::Shfs, IP),
        HandOver::Unusable(Missing)
    );
}

#[test]
fn a_reply_that_is_no_object_is_told_apart() {
    for reply in ["", "null", "[]", "\"x\"", "{", "{} x", "<html>"] {
        for connector in [KvConnector::Shfs, KvConnector::Nixl] {
            let out = hand_over(reply.as_bytes(), connector, IP);
            assert_eq!(out, HandOver::NotAnObject, "{reply}");
        }
    }
    assert_eq!(
        hand_over(b"{\"a\":\"\xff\"}", KvConnector::Nixl, IP),
        HandOver::NotAnObject
    );
}

#[test]
fn neuron_is_given_the_whole_reply() {
    assert_eq!(
        hand_over(b"\n{\"id\": 1.50, \"x\":[]}\n", KvConnector::Nixl, IP),
        HandOver::Members(b"\"disagg_prefill_resp\":{\"id\": 1.50, \"x\":[]}".to_vec())
    );
    let body = br#"{"model":"m","prompt":"p"}"#;
    let scanned = scan(Endpoint::Completions, body).unwrap();
    let edits = prefill_edits(Endpoint::Completions, &scanned, KvConnector::Nixl).unwrap();
    assert_eq!(
        build(body, &scanned, &edits),
        br#"{"max_tokens":1,"stream":false,"model":"m","prompt":"p"}"#
    );
}

#[test]
fn mooncake_is_refused_by_name() {
    let scanned = scan(Endpoint::Chat, br#"{"model":"m"}"#).unwrap();
    let error = prefill_edits(Endpoint::Chat, &scanned, KvConnector::Mooncake).unwrap_err();
    assert!(error.to_string().contains("mooncake"));
}

#[test]
fn the_releasing_request_is_complete_and_asks_for_the_impossible() {
    let HandOver::Members(members) = give(&params()) else {
        panic!("usable")
    };
    for (endpoint, prompt, cap) in [
        (Endpoint::Chat, "messages", "max_tokens"),
        (Endpoint::Completions, "prompt", "max_tokens"),
        (Endpoint::Responses, "input", "max_output_tokens"),
        (Endpoint::Messages, "messages", "max_tokens"),
    ] {
        let body: Value =
            serde_json::from_slice(&release_body("a\"b", &members, endpoint)).unwrap();
        assert_eq!(body["model"], "a\"b");
        assert_eq!(body["temperature"], -1);
        assert_eq!(body[cap], 1);
        assert!(body[prompt].is_string() || body[prompt].is_array());
        assert_eq!(body["kv_transfer_params"], params());
    }
}
