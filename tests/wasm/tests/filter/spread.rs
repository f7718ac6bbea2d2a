//! A thousand requests at once on sixteen workers: how even they spread, how many swaps they lose
//! to each other and what that costs.
//!
//! Every worker is a gateway with one VM on a thread of its own; all share one store, as Envoy's
//! workers do. `cargo test -p pd-wasm-tests --test filter spread -- --nocapture` prints the table.

use crate::stand::{config, control, last_pending, ledgers_at, pod, push, target, topology};
use pd_wasm_tests::{Exchange, Gateway, GatewayConfig, SharedStore};
use pd_wire::names;
use pd_wire::samples::{PodSample, Samples};
use pd_wire::topology::Stamp;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

const WORKERS: usize = 16;
/// 1,008 requests in all.
const REQUESTS: usize = 63;
const ROLESETS: usize = 8;
/// After this a worker has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// What one worker saw: where its requests went, and how long each choice took.
type Log = Vec<(String, Duration)>;

/// Eight equal pairs. Positions in the message are those of the samples.
fn pods() -> Vec<serde_json::Value> {
    let pairs = (0..ROLESETS).flat_map(|nth| {
        [(1, "decode"), (0, "prefill")].map(|(side, role)| {
            let address = format!("10.0.{nth}.{side}:8000");
            let roleset = format!("r{nth}");
            pod(&format!("{roleset}-{role}"), role, Some(&roleset), &address)
        })
    });
    pairs.collect()
}

/// One refresh, the same numbers for all; there is no other.
fn samples() -> Vec<u8> {
    let pods = (0..2 * ROLESETS as u32).map(|ordinal| PodSample {
        ordinal,
        running: Some(5.0),
        waiting: Some(0.0),
        kv_usage: Some(0.3),
        generation_throughput: Some(400.0),
        drain_rate: Some(2.0),
        prefill_ms: Some(80.0),
        ..PodSample::default()
    });
    Samples {
        stamp: Stamp {
            version: 1,
            agent: "agent-0".into(),
            epoch: 1,
            sequence: 1,
        },
        topology_sequence: 1,
        pods: pods.collect(),
    }
    .encode()
}

/// A prompt nobody has sent before, of 100 to 1,100 tokens.
fn unique(worker: usize, nth: usize) -> Exchange {
    let words = format!("{worker}-{nth} ").repeat(80 + (worker * 31 + nth * 17) % 500);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{words}"}}]}}"#);
    Exchange::post("/v1/chat/completions", body).header("content-type", "application/json")
}

/// Sends the worker's requests, none of which is answered, when told to; says when it is ready
/// and when it is done.
fn work(
    worker: usize,
    store: SharedStore,
    plugin: String,
    ready: Sender<()>,
    go: Receiver<()>,
) -> Log {
    let mut gateway = Gateway::new(GatewayConfig {
        shared: store,
        seed: worker as u64 + 1,
        ..config(1, &plugin)
    });
    gateway.advance(100);
    ready.send(()).unwrap();
    go.recv().unwrap();
    let choices = (0..REQUESTS).map(|nth| {
        let exchange = unique(worker, nth);
        let begun = Instant::now();
        gateway.send(exchange);
        let took = begun.elapsed();
        (target(&last_pending(&gateway)), took)
    });
    let choices = choices.collect();
    ready.send(()).unwrap();
    go.recv().unwrap();
    // Charges that lost eight swaps show after a tick.
    gateway.advance(500);
    choices
}

/// Requests per prefill pod, swaps lost, and the times of all choices, sorted.
fn burst(plugin: &str) -> (BTreeMap<String, usize>, u64, Vec<Duration>) {
    let store = SharedStore::default();
    let mut first = Gateway::new(GatewayConfig {
        shared: store.clone(),
        ..config(1, plugin)
    });
    push(&mut first, &topology(1, &pods())).expect(200);
    first
        .run(control("PUT", names::PATH_SAMPLES).body(samples()))
        .expect(200);
    let mut lost = 0;
    let logs: Vec<Log> = thread::scope(|scope| {
        let (ready, all_ready) = channel();
        let mut gates = Vec::new();
        let mut workers = Vec::new();
        for worker in 0..WORKERS {
            let (gate, go) = channel();
            let (store, ready) = (store.clone(), ready.clone());
            gates.push(gate);
            workers.push(scope.spawn(move || work(worker, store, plugin.to_owned(), ready, go)));
        }
        // Drops the gates when a worker failed, so that the others end too.
        let meet = || {
            (0..WORKERS).for_each(|_| all_ready.recv_timeout(PATIENCE).unwrap());
        };
        let open = || gates.iter().for_each(|gate| gate.send(()).unwrap());
        meet();
        {
            let mut shared = store.lock();
            (shared.crowded, shared.counts.mismatches) = (true, 0);
        }
        open();
        meet();
        {
            let mut shared = store.lock();
            shared.crowded = false;
            lost = shared.counts.mismatches;
        }
        open();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect()
    });
    let charged = ledgers_at(&mut first, 0).total;
    assert_eq!(charged.prefill_requests as usize, WORKERS * REQUESTS);
    let mut spread = BTreeMap::new();
    let mut times = Vec::new();
    for (pod, took) in logs.into_iter().flatten() {
        *spread.entry(pod).or_default() += 1;
        times.push(took);
    }
    times.sort();
    (spread, lost, times)
}

#[test]
fn a_burst_on_sixteen_workers_spreads_evenly_under_every_policy() {
    println!(
        "{:<34} {:>11} {:>10} {:>12} {:>10} {:>10}",
        "policies", "lost swaps", "fewest", "most of 126", "p50", "p99 until the prefill leg"
    );
    for (prefill, decode) in [
        ("prefix_cache", "load_balancing"),
        ("least_request", "least_request"),
        ("conductor", "conductor"),
        ("token_load", "token_load"),
        ("hybrid_cache_load", "token_load"),
    ] {
        let plugin =
            format!(r#"{{"prefillScorePolicy":"{prefill}","decodeScorePolicy":"{decode}"}}"#);
        let (spread, lost, times) = burst(&plugin);
        let (low, high) = (
            spread.values().min().unwrap(),
            spread.values().max().unwrap(),
        );
        println!(
            "{:<34} {lost:>11} {low:>10} {high:>12} {:>10.1?} {:>10.1?}",
            format!("{prefill}, {decode}"),
            times[times.len() / 2],
            times[times.len() * 99 / 100],
        );
        let even = WORKERS * REQUESTS / ROLESETS;
        assert_eq!(spread.len(), ROLESETS);
        assert!(
            spread
                .values()
                .all(|count| count.abs_diff(even) <= even / 5),
            "{prefill}, {decode}: {spread:?}"
        );
        assert!(lost > 0, "the workers never met");
    }
}
