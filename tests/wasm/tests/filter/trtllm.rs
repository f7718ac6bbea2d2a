//! TensorRT-LLM: bodies byte for byte, ids of several VMs, look-ups.

use crate::stand::{
    assert_quiet, chat, chat_body, endings, engine_error, finish, good, last_pending, pairs_of,
    target,
};
use pd_wasm_tests::{Exchange, Gateway, Script};
use std::collections::BTreeSet;

const GENERATION_FIRST: &str = r#"{"trtScheduleStyle":"generation_first"}"#;
const PARAMS: &str = r#""disaggregated_params":{"request_type":"generation_only","first_gen_tokens":[5],"ctx_request_id":9223372036854775807}"#;

fn answer_well(gateway: &mut Gateway) {
    let call = last_pending(gateway);
    gateway.answer(call.id, good(&call));
}

#[test]
fn the_context_and_the_token_ids_reach_the_generation_worker_byte_for_byte() {
    let mut gateway = pairs_of(1, "trtllm", "");
    let flight = gateway.send(chat(false));
    answer_well(&mut gateway);
    let sent = gateway.outcome(flight).upstream().clone();
    let expected =
        chat_body(false).replacen('{', &format!(r#"{{{PARAMS},"prompt_token_ids":[1, 2],"#), 1);
    assert_eq!(String::from_utf8(sent.body.clone()).unwrap(), expected);

    let body = r#"{"model":"m", "prompt":"Hello" ,"seed":9007199254740993}"#;
    let exchange =
        Exchange::post("/v1/completions", body).header("content-type", "application/json");
    let flight = gateway.send(exchange);
    answer_well(&mut gateway);
    let sent = gateway.outcome(flight).upstream().clone();
    let expected = format!(r#"{{{PARAMS},"model":"m", "prompt":[1, 2] ,"seed":9007199254740993}}"#);
    let length = sent.header("content-length").unwrap();
    assert_eq!(length, expected.len().to_string());
    assert_eq!(String::from_utf8(sent.body.clone()).unwrap(), expected);
}

#[test]
fn ids_of_two_workers_never_meet() {
    let mut gateway = pairs_of(2, "trtllm", r#"{"trtMachineId":7}"#);
    let mut ids = BTreeSet::new();
    for n in 0..300 {
        gateway.send(chat(false).worker(n % 2));
        let body = last_pending(&gateway).json();
        let id = body["disaggregated_params"]["disagg_request_id"]
            .as_u64()
            .unwrap();
        assert!(id > 1 << 42 && (id >> 12) & 1023 == 7, "{id}");
        assert!(ids.insert(id), "{id} twice");
    }
}

#[test]
fn one_look_up_serves_all_who_wait_for_it() {
    let mut gateway = pairs_of(1, "trtllm", GENERATION_FIRST);
    let flights: Vec<_> = (0..12).map(|_| gateway.send(chat(true))).collect();
    let asked = gateway.pending_calls();
    let targets: BTreeSet<String> = asked.iter().map(target).collect();
    assert_eq!(asked.len(), targets.len(), "one per worker: {targets:?}");
    for call in &asked {
        assert_eq!(
            (call.path(), call.header(":method")),
            ("/server_info", Some("GET"))
        );
        assert_eq!((call.body.len(), call.header("content-type")), (0, None));
        gateway.answer(call.id, good(call));
    }
    gateway.advance(200);
    assert_eq!(gateway.pending_calls().len(), flights.len());
    for call in gateway.pending_calls() {
        gateway.answer(call.id, good(&call));
    }
    for flight in flights {
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
    }
    assert_quiet(&mut gateway, 1);
    assert_eq!(endings(&mut gateway), 12);
}

#[test]
fn a_look_up_takes_three_seconds_at_most_and_another_pair_is_tried() {
    for (script, wait_ms) in [
        (Script::stall(), 3100),
        (engine_error(404), 0),
        (Script::reset(), 0),
        (Script::answer(200, "{}"), 0),
    ] {
        let mut gateway = pairs_of(1, "trtllm", GENERATION_FIRST);
        let flight = gateway.send(chat(true));
        let first = last_pending(&gateway);
        gateway.answer(first.id, script);
        gateway.advance(wait_ms);
        let second = last_pending(&gateway);
        assert_eq!(second.path(), "/server_info");
        assert_ne!(target(&first), target(&second));
        gateway.answer(second.id, good(&second));
        answer_well(&mut gateway);
        finish(&mut gateway, flight);
        gateway.outcome(flight).expect(200);
        assert_quiet(&mut gateway, 1);
    }
}
