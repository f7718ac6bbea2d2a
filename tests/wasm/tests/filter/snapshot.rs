//! Pushes: accepted, refused with what is held left whole, seen by every worker.

use crate::stand::{
    bare, chat, config, control, healthy, pod, push, status_at, topology, two_pairs, vllm,
};
use pd_wasm_tests::{Exchange, Gateway, Outcome};
use pd_wire::names;
use pd_wire::samples::{PodSample, Samples};
use pd_wire::topology::{MAX_MESSAGE, Stamp};
use serde_json::json;

const TOKENS: &str =
    r#"{"controlTokens":["2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"]}"#;

fn samples(sequence: u64, topology_sequence: u64, ordinal: u32) -> Samples {
    Samples {
        stamp: Stamp {
            version: 1,
            agent: "agent-0".into(),
            epoch: 1,
            sequence,
        },
        topology_sequence,
        pods: vec![PodSample {
            ordinal,
            ..PodSample::default()
        }],
    }
}

fn put(gateway: &mut Gateway, path: &str, body: impl Into<Vec<u8>>) -> Outcome {
    gateway.run(control("PUT", path).body(body))
}

fn held(gateway: &mut Gateway) -> (u64, u64, Option<u64>) {
    let status = status_at(gateway, 0);
    let topology = status.topology.unwrap();
    (
        topology.epoch,
        topology.sequence,
        status.samples.map(|samples| samples.sequence),
    )
}

#[test]
fn what_is_accepted_is_seen_by_every_worker_at_once() {
    let mut gateway = healthy(2, "");
    for worker in 0..2 {
        gateway.run(chat(true).worker(worker)).expect(200);
    }
    let reply = push(&mut gateway, &topology(2, &two_pairs()[..2]));
    let reply = reply.expect(200).json();
    assert_eq!(
        (&reply["epoch"], &reply["sequence"]),
        (&json!(1), &json!(2))
    );
    let status = status_at(&mut gateway, 1);
    assert_eq!(status.topology.unwrap().pods, 2);
}

#[test]
fn refusals_leave_the_snapshot_whole() {
    let mut gateway = healthy(1, "");
    let encoded = samples(1, 1, 0).encode();
    put(&mut gateway, names::PATH_SAMPLES, encoded.clone()).expect(200);

    let older = push(&mut gateway, &topology(1, &two_pairs()));
    let older = older.expect(409).json();
    assert_eq!(
        (&older["epoch"], &older["sequence"]),
        (&json!(1), &json!(1))
    );
    assert_eq!(older["agent"], "agent-0");

    let mut wrong = topology(2, &two_pairs());
    wrong["models"][0]["pods"][0]["address"] = json!("nowhere");
    push(&mut gateway, &wrong).expect(400);
    put(&mut gateway, names::PATH_TOPOLOGY, "{").expect(400);
    put(&mut gateway, names::PATH_TOPOLOGY, "").expect(400);

    let mut unknown = topology(2, &two_pairs());
    unknown["stamp"]["version"] = json!(99);
    push(&mut gateway, &unknown).expect(426);

    let large = put(
        &mut gateway,
        names::PATH_TOPOLOGY,
        vec![b' '; MAX_MESSAGE + 1],
    );
    large.expect(413);

    // Samples: seen before, of another topology, of no pod, broken, of another version.
    put(&mut gateway, names::PATH_SAMPLES, encoded.clone()).expect(409);
    let conflict = put(&mut gateway, names::PATH_SAMPLES, samples(2, 7, 0).encode());
    assert_eq!(conflict.expect(409).json()["topologySequence"], 1);
    put(
        &mut gateway,
        names::PATH_SAMPLES,
        samples(2, 1, 99).encode(),
    )
    .expect(400);
    put(
        &mut gateway,
        names::PATH_SAMPLES,
        &encoded[..encoded.len() - 1],
    )
    .expect(400);
    let mut unknown = encoded;
    unknown[3] = 9;
    put(&mut gateway, names::PATH_SAMPLES, unknown).expect(426);

    assert_eq!(held(&mut gateway), (1, 1, Some(1)));
    gateway.run(chat(true)).expect(200);
}

#[test]
fn without_the_token_nothing_is_answered() {
    let mut gateway = Gateway::new(config(1, TOKENS));
    let body = topology(1, &two_pairs()).to_string();
    let push = control("PUT", names::PATH_TOPOLOGY).body(body);
    for wrong in ["", "Bearer", "Bearer wrong", "Basic secret", "secret"] {
        let outcome = gateway.run(push.clone().header("authorization", wrong));
        assert!(outcome.expect(401).upstream.is_none(), "{wrong}");
        for path in [names::PATH_STATUS, names::PATH_LEDGERS, "/pd/v1/other"] {
            let outcome = gateway.run(control("GET", path).header("authorization", wrong));
            outcome.expect(401);
        }
    }
    gateway.run(Exchange::get("/readyz")).expect(503);
    gateway
        .run(push.header("authorization", "Bearer secret"))
        .expect(200);
    gateway.run(Exchange::get("/readyz")).expect(200);
}

#[test]
fn the_data_listener_knows_no_control_path() {
    let mut gateway = bare(1, "");
    let body = topology(2, &[]).to_string();
    let push = Exchange::new("PUT", names::PATH_TOPOLOGY).body(body);
    for other in ["", "pd-data", "pd-control2"] {
        let push = push.clone().property("xds.filter_chain_name", other);
        gateway.run(push).expect(404);
        for path in [names::PATH_STATUS, names::PATH_LEDGERS] {
            gateway
                .run(Exchange::get(path).property("xds.filter_chain_name", other))
                .expect(404);
        }
    }
    // A header that spells the property means nothing.
    let forged = Exchange::get(names::PATH_STATUS).header("xds.filter_chain_name", names::CONTROL);
    gateway.run(forged).expect(404);
    assert_eq!(held(&mut gateway), (1, 1, None));
    gateway.run(control("GET", "/pd/v1/nothing")).expect(404);
    gateway
        .run(control("DELETE", names::PATH_TOPOLOGY))
        .expect(404);
}

#[test]
fn a_request_before_the_first_snapshot_waits_for_it() {
    let mut gateway = Gateway::new(config(2, ""));
    gateway.other_engines(vllm);
    gateway.run(Exchange::get("/readyz")).expect(503);
    let early = gateway.send(chat(true));
    gateway.advance(1500);
    assert_eq!(gateway.outcome(early).status, None);
    let push = control("PUT", names::PATH_TOPOLOGY).worker(1);
    let push = push.body(topology(1, &two_pairs()).to_string());
    gateway.run(push).expect(200);
    gateway.settle(early, 500);
    gateway.outcome(early).expect(200);
}

#[test]
fn a_request_waits_two_seconds_for_a_snapshot_and_no_longer() {
    let mut gateway = Gateway::new(config(1, ""));
    let sent_at = gateway.now_ms();
    let outcome = gateway.run(chat(true));
    assert_eq!(outcome.expect(503).header("x-error-routing"), Some("true"));
    let waited = outcome.ended_at_ms - sent_at;
    assert!((2000..2200).contains(&waited), "{waited}");
}

#[test]
fn models_and_unknown_paths_are_answered_here() {
    let mut gateway = bare(1, "");
    let models = gateway.run(Exchange::get("/v1/models"));
    assert_eq!(models.expect(200).json()["data"][0]["id"], "m");
    gateway.run(Exchange::get("/v1/models/m")).expect(200);
    let unknown = gateway.run(Exchange::get("/v1/models/x"));
    assert_eq!(
        unknown.expect(404).json()["error"]["code"],
        "model_not_found"
    );
    for exchange in [
        Exchange::get("/"),
        Exchange::get("/v1/chat/completions"),
        Exchange::post("/v1/nothing", "{}"),
        Exchange::get("/metrics").header("target-pod", "10.0.0.1:8000"),
    ] {
        let outcome = gateway.run(exchange);
        assert!(outcome.expect(404).upstream.is_none());
    }
}

#[test]
fn a_pod_that_leaves_takes_no_new_request_and_finishes_what_it_has() {
    let mut gateway = bare(1, "");
    gateway.other_engines(|sent| vllm(sent).after(500));
    let running = gateway.send(chat(false));
    gateway.advance(600);
    let replaced = [
        pod("r2-d", "decode", Some("r2"), "10.0.2.2:8000"),
        pod("r2-p", "prefill", Some("r2"), "10.0.2.1:8000"),
    ];
    push(&mut gateway, &topology(2, &replaced)).expect(200);
    let fresh = gateway.run(chat(false));
    assert_eq!(fresh.expect(200).header("target-pod"), Some("r2-d"));
    gateway.settle(running, 2000);
    let old = gateway.outcome(running);
    assert!(
        old.expect(200)
            .header("target-pod")
            .unwrap()
            .starts_with('r')
    );
    assert_ne!(old.header("target-pod"), Some("r2-d"));
    crate::stand::assert_quiet(&mut gateway, 1);
}
