//! What a request is charged equals what `vectors/charges.json` works out by hand, natively and
//! in wasm.

// A test that meets something unexpected must fail at once.
#![allow(clippy::unwrap_used, reason = "panics are how a test fails")]

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

use pd_core::config::Config;
use pd_core::fleet::accept_topology;
use pd_core::flow::{Event, Flow, Head};
use pd_core::ledger::Amounts;
use pd_core::request::Endpoint;
use pd_core::testkit::{MemoryStore, model, pod, topology};
use pd_core::worker::{Scene, Worker};
use serde::Deserialize;

const HANDED_OVER: &[u8] = br#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":15601}}"#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// The arithmetic.
    how: String,
    config: serde_json::Value,
    turns: Vec<Turn>,
}

/// A completion of a prompt of `chars` letters; a longer prompt begins with the shorter one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    chars: usize,
    /// Tokens charged to the prefill pod, and to the decode pod.
    prefill: u64,
    decode: u64,
}

/// One VM in front of one roleset of two prefill pods and a decode pod.
struct Stage {
    store: MemoryStore,
    worker: Worker,
    config: Config,
}

impl Stage {
    fn new(config: &serde_json::Value) -> Self {
        let served = ["p0", "p1"]
            .iter()
            .fold(model("m"), |model, name| {
                model.pod(pod(name).prefill().roleset("r"))
            })
            .pod(pod("d0").decode().roleset("r"));
        let mut stage = Self {
            store: MemoryStore::new(),
            worker: Worker::new([5; 32]),
            config: Config::parse(config.to_string().as_bytes(), |_| None).unwrap(),
        };
        accept_topology(&stage.store, &topology(1, 1).model(served).json(), 0).unwrap();
        stage.worker.fleet.refresh(&stage.store);
        stage
    }

    fn scene(&mut self) -> Scene<'_> {
        Scene {
            worker: &mut self.worker,
            config: &self.config,
            store: &self.store,
            now_ms: 1000,
        }
    }

    /// Sum over the pods.
    fn charged(&mut self) -> Amounts {
        let slot = self.worker.fleet.model("m").unwrap().slot;
        let totals = self.worker.ledger.totals(&self.store, slot).sorted();
        totals.iter().fold(Amounts::default(), |mut sum, (_, pod)| {
            sum.add(pod);
            sum
        })
    }

    /// Serves a prompt to its end; what was charged when it was chosen.
    fn serve(&mut self, chars: usize) -> Amounts {
        let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(chars));
        let none = std::iter::empty::<(&str, &[u8])>();
        let head = Head::read("/v1/completions", Endpoint::Completions, none);
        let mut flow = Flow::new(head, false, &mut self.scene());
        flow.on(Event::Body(body.as_bytes()), &mut self.scene());
        let charged = self.charged();
        let reply = Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        };
        flow.on(reply, &mut self.scene());
        let gone = Event::Gone {
            engine_cut: false,
            unsent: false,
        };
        flow.on(gone, &mut self.scene());
        assert!(flow.is_ended());
        assert_eq!(self.charged(), Amounts::default());
        charged
    }
}

#[test]
fn charges_equal_the_vectors() {
    let text = include_str!("vectors/charges.json");
    let cases: Vec<Case> = serde_json::from_str(text).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let mut stage = Stage::new(&case.config);
        for (nth, turn) in case.turns.iter().enumerate() {
            let expected = Amounts {
                prefill_requests: 1,
                active_tokens: turn.prefill,
                kv_tokens: turn.prefill,
                decode_pending: 1,
                decode_tokens: turn.decode,
                routed_at_sum_ms: 1000,
                ..Amounts::default()
            };
            let charged = stage.serve(turn.chars);
            assert_eq!(charged, expected, "{}: {nth}: {}", case.name, case.how);
        }
    }
}
