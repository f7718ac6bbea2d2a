//! A gateway with the filter, a pushed topology and scripted vLLM engines.

use pd_wasm_tests::{
    CallRecord, Exchange, Flight, Gateway, GatewayConfig, Module, Outcome, Script, Sent,
    filter_path,
};
use pd_wire::control::{Charged, Ledgers, Status};
use pd_wire::names;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The hand-over of the scripted prefill engines, as it came.
pub(crate) const PARAMS: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[6, 7],[8]],"remote_engine_id":"4a2c","remote_request_id":"cmpl-1","remote_host":"10.1.2.3","remote_port":15601,"tp_size":1}"#;
/// What the prefill leg of vLLM's connector carries.
pub(crate) const KEEP: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// First event of a chat stream.
pub(crate) const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
/// An event with text.
pub(crate) const TOKEN: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
/// What vLLM streams when it could not pull the KV.
pub(crate) const ERROR: &str =
    "data: {\"error\": {\"message\": \"KV pull failed\", \"code\": 500}}\n\n";
/// Last event of a stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// Addresses of the pods of [`two_pairs`].
pub(crate) const P0: &str = "10.0.0.1:8000";
pub(crate) const D0: &str = "10.0.0.2:8000";
pub(crate) const P1: &str = "10.0.1.1:8000";
pub(crate) const D1: &str = "10.0.1.2:8000";
/// Address of a combined pod.
pub(crate) const C: &str = "10.0.9.1:8000";

/// How a gateway with the filter is set up.
pub(crate) fn config(workers: usize, plugin: &str) -> GatewayConfig {
    GatewayConfig {
        vm_count: workers,
        vm_id: names::VM_ID.into(),
        plugin_config: plugin.into(),
        clusters: Some(vec![names::CLUSTER.into()]),
        ..GatewayConfig::default()
    }
}

/// A gateway with two pairs and no engine scripted: a test answers by itself.
pub(crate) fn bare(workers: usize, plugin: &str) -> Gateway {
    let mut gateway = Gateway::new(config(workers, plugin));
    push(&mut gateway, &topology(1, &two_pairs())).expect(200);
    gateway
}

/// The same with pods of another engine.
pub(crate) fn pairs_of(workers: usize, engine: &str, plugin: &str) -> Gateway {
    let mut gateway = Gateway::new(config(workers, plugin));
    let mut pods = two_pairs();
    for pod in &mut pods {
        pod["engine"] = json!(engine);
    }
    push(&mut gateway, &topology(1, &pods)).expect(200);
    gateway
}

/// A gateway with one pair and no engine scripted.
pub(crate) fn one_pair(plugin: &str) -> Gateway {
    let mut gateway = Gateway::new(config(1, plugin));
    push(&mut gateway, &topology(1, &two_pairs()[..2])).expect(200);
    gateway
}

/// A gateway with two pairs of healthy engines.
pub(crate) fn healthy(workers: usize, plugin: &str) -> Gateway {
    let mut gateway = bare(workers, plugin);
    gateway.other_engines(vllm);
    gateway
}

/// The file of a build that only tests use.
pub(crate) fn variant(name: &str) -> PathBuf {
    let release = filter_path();
    let target = release.ancestors().nth(3).unwrap_or(&release);
    target.join(format!("e2e/pd_filter_{name}.wasm"))
}

/// The filter that counts with tokenizers.
pub(crate) fn with_tokenizers(workers: usize, plugin: &str) -> Gateway {
    let file = filter_path().with_file_name("pd_filter_tokenizers.wasm");
    let module = Some(Module::load(&file));
    let config = GatewayConfig {
        module,
        ..config(workers, plugin)
    };
    Gateway::new(config)
}

// === topologies ===

/// A ready vLLM pod.
pub(crate) fn pod(name: &str, role: &str, roleset: Option<&str>, address: &str) -> Value {
    json!({
        "namespace": "ns", "name": name, "uid": format!("uid-{name}"), "address": address,
        "role": role, "roleset": roleset, "engine": "vllm", "ready": true,
    })
}

/// Two rolesets with one prefill and one decode pod each.
pub(crate) fn two_pairs() -> Vec<Value> {
    vec![
        pod("r0-d", "decode", Some("r0"), D0),
        pod("r0-p", "prefill", Some("r0"), P0),
        pod("r1-d", "decode", Some("r1"), D1),
        pod("r1-p", "prefill", Some("r1"), P1),
    ]
}

/// A topology of one model `m`.
pub(crate) fn topology(sequence: u64, pods: &[Value]) -> Value {
    json!({
        "stamp": {"version": 1, "agent": "agent-0", "epoch": 1, "sequence": sequence},
        "models": [{"name": "m", "configs": [], "pods": pods}],
    })
}

/// The two pairs and a combined pod.
pub(crate) fn with_combined(sequence: u64) -> Value {
    let mut pods = two_pairs();
    let mut combined = pod("c", "standard", None, C);
    combined["config"] = json!(0);
    pods.insert(0, combined);
    let mut topology = topology(sequence, &pods);
    topology["models"][0]["configs"] = json!([{"profiles": {"default": {"combined": true}}}]);
    topology
}

// === the control endpoint ===

/// A request of the control listener.
pub(crate) fn control(method: &str, path: &str) -> Exchange {
    Exchange::new(method, path).property("xds.filter_chain_name", names::CONTROL)
}

/// Pushes a topology.
pub(crate) fn push(gateway: &mut Gateway, topology: &Value) -> Outcome {
    gateway.run(control("PUT", names::PATH_TOPOLOGY).body(topology.to_string()))
}

/// What is charged, as a worker sees it.
pub(crate) fn ledgers_at(gateway: &mut Gateway, worker: usize) -> Ledgers {
    let outcome = gateway.run(control("GET", names::PATH_LEDGERS).worker(worker));
    serde_json::from_value(outcome.expect(200).json()).unwrap()
}

/// The sum of all charges.
pub(crate) fn charged(gateway: &mut Gateway) -> Charged {
    ledgers_at(gateway, 0).total
}

/// The status page of a worker.
pub(crate) fn status_at(gateway: &mut Gateway, worker: usize) -> Status {
    let outcome = gateway.run(control("GET", names::PATH_STATUS).worker(worker));
    serde_json::from_value(outcome.expect(200).json()).unwrap()
}

/// Asserts that nothing is charged and nothing is live, on every worker.
pub(crate) fn assert_quiet(gateway: &mut Gateway, workers: usize) {
    // Charges given back and live flows are shown at every tick.
    gateway.advance(200);
    for worker in 0..workers {
        assert_eq!(ledgers_at(gateway, worker), Ledgers::default());
    }
    assert_eq!(status_at(gateway, 0).live_flows, 0);
}

/// Requests counted as ended, whatever the ending.
pub(crate) fn endings(gateway: &mut Gateway) -> u64 {
    total(gateway, "gateway_request_model_success_total")
        + total(gateway, "gateway_request_model_fail_total")
}

/// A counter, after the tick that shows it.
pub(crate) fn counter(gateway: &mut Gateway, name: &str) -> u64 {
    gateway.advance(100);
    gateway.meters().counter(name)
}

/// Sum of a counter over all its labels, after the tick that shows it.
pub(crate) fn total(gateway: &mut Gateway, name: &str) -> u64 {
    gateway.advance(100);
    let meters = gateway.meters();
    let names = meters.names();
    let of_name = names
        .iter()
        .filter(|full| full.split('{').next() == Some(name));
    of_name.map(|full| meters.counter(full)).sum()
}

/// Whether any VM logged a line containing `text`.
pub(crate) fn logged(gateway: &Gateway, text: &str) -> bool {
    gateway.logs().iter().any(|line| line.text.contains(text))
}

// === requests ===

/// A chat request's body.
pub(crate) fn chat_body(stream: bool) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"Hello"}}],"stream":{stream}}}"#)
}

/// A chat request.
pub(crate) fn chat(stream: bool) -> Exchange {
    Exchange::post("/v1/chat/completions", chat_body(stream))
        .header("content-type", "application/json")
}

/// The call that was dispatched last, which nobody answered yet.
pub(crate) fn last_pending(gateway: &Gateway) -> CallRecord {
    gateway.pending_calls().pop().unwrap()
}

/// The address a call goes to.
pub(crate) fn target(call: &CallRecord) -> String {
    call.header(names::HEADER_TARGET).unwrap().to_owned()
}

/// Answers the last pending call as a healthy prefill engine.
pub(crate) fn prefill_ok(gateway: &mut Gateway) {
    let call = last_pending(gateway);
    gateway.answer(call.id, prefilled());
}

/// A request whose decode leg is at its pod.
pub(crate) fn decoding(gateway: &mut Gateway, exchange: Exchange) -> Flight {
    let flight = gateway.send(exchange);
    prefill_ok(gateway);
    assert!(gateway.outcome(flight).upstream().ended);
    flight
}

/// Starts an event stream on a decode leg.
pub(crate) fn stream_headers(gateway: &mut Gateway, flight: Flight) {
    let headers = [(":status", "200"), ("content-type", "text/event-stream")];
    gateway.respond_headers(flight, &headers, false);
}

/// Answers the pending calls, by which KV is freed, as an engine's serving layer does.
pub(crate) fn freed(gateway: &mut Gateway) {
    let calls = gateway.pending_calls();
    assert!(!calls.is_empty());
    for call in calls {
        assert_eq!(call.json()["temperature"], -1);
        gateway.answer(call.id, engine_error(400));
    }
}

/// Answers a decode leg with a whole event stream.
pub(crate) fn finish(gateway: &mut Gateway, flight: Flight) {
    stream_headers(gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}{DONE}").as_bytes(), true);
}

// === engines ===

/// The answer of a healthy prefill engine.
pub(crate) fn prefilled() -> Script {
    let body = format!(r#"{{"id":"cmpl-1","choices":[],"kv_transfer_params":{PARAMS}}}"#);
    Script::answer(200, body).header("content-type", "application/json")
}

/// The answer of a healthy engine of any kind to a call.
pub(crate) fn good(call: &CallRecord) -> Script {
    match call.path() {
        "/abort_request" => Script::answer(200, ""),
        "/server_info" => Script::json(
            200,
            &json!({"disaggregated_params": {"ctx_dp_rank": 0, "ctx_info_endpoint": ["tcp://h:1/a"]}}),
        ),
        _ if call.json()["disaggregated_params"].is_null() => prefilled(),
        _ => Script::answer(200, CONTEXT).header("content-type", "application/json"),
    }
}

/// The answer of a healthy context worker.
pub(crate) const CONTEXT: &str = r#"{"choices":[{"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":9223372036854775807}}],"prompt_token_ids":[1, 2]}"#;

/// An engine's error in its own words.
pub(crate) fn engine_error(status: u16) -> Script {
    let body = json!({"error": {"message": "engine says no", "code": status}});
    // What Envoy adds to every answer that came from upstream.
    Script::json(status, &body).header("x-envoy-upstream-service-time", "1")
}

/// A healthy vLLM pod of any role.
pub(crate) fn vllm(sent: &Sent) -> Script {
    let body = sent.json();
    if body["kv_transfer_params"]["do_remote_decode"] == true {
        return prefilled();
    }
    if body["temperature"] == -1 {
        return engine_error(400);
    }
    if body["stream"] == true {
        return Script::stream(10, &[ROLE, TOKEN, TOKEN, DONE]);
    }
    Script::json(200, &json!({"choices": [{"message": {"content": "aa"}}]}))
}
