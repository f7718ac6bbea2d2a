//! Properties of choosing and charging as one step, over random fleets: what is charged is what
//! was chosen, and all of it comes back.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

use pd_core::config::Config;
use pd_core::fleet::accept_topology;
use pd_core::flow::{Effect, Event, Flow, Head};
use pd_core::ledger::{Amounts, DecodeCharge, Ledger, Pick, PodKey, PrefillCharge};
use pd_core::request::Endpoint;
use pd_core::testkit::{MemoryStore, model, pod, topology};
use pd_core::worker::{Scene, Worker};
use pd_wire::profile::{ModelConfig, Profile};
use pd_wire::topology::Role;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::convert::Infallible;

const HANDED_OVER: &[u8] = br#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":15601}}"#;
const PREFILL: [&str; 5] = [
    "prefix_cache",
    "least_request",
    "conductor",
    "token_load",
    "hybrid_cache_load",
];
const DECODE: [&str; 4] = ["load_balancing", "least_request", "conductor", "token_load"];
/// Charged for each request beside its tokens.
const REQUEST_COST: u64 = 3500;

#[derive(Clone, Debug)]
struct Case {
    /// Prefill and decode pods of each roleset.
    rolesets: Vec<(usize, usize)>,
    combined: usize,
    policies: (&'static str, &'static str),
    bucketing: bool,
    /// Longest prompt of the pods of each roleset.
    longest: Vec<Option<u64>>,
    capacity: u64,
    local_prefill: u64,
    /// Charges of another VM, by position of the pod.
    others: Vec<(usize, u64)>,
    words: usize,
    answers: u8,
}

prop_compose! {
    fn case()(
        rolesets in prop::collection::vec((0..3_usize, 0..3_usize), 0..4),
        combined in 0..3_usize,
        prefill in prop::sample::select(&PREFILL[..]),
        decode in prop::sample::select(&DECODE[..]),
        bucketing in any::<bool>(),
        longest in prop::collection::vec(prop::option::of(0..200_u64), 4),
        capacity in prop_oneof![Just(0), 1..3_u64],
        local_prefill in prop_oneof![3 => Just(0), 1 => 0..200_u64],
        others in prop::collection::vec((0..16_usize, 0..90_000_u64), 0..12),
        words in 0..200_usize,
        answers in prop_oneof![3 => Just(1_u8), 1 => Just(2)],
    ) -> Case {
        Case {
            rolesets,
            combined,
            policies: (prefill, decode),
            bucketing,
            longest,
            capacity,
            local_prefill,
            others,
            words,
            answers,
        }
    }
}

/// A VM among others, with a snapshot.
struct Stage {
    store: MemoryStore,
    worker: Worker,
    config: Config,
}

impl Stage {
    fn new(case: &Case) -> Self {
        let profile = |combined, prompt_max| ModelConfig {
            profiles: BTreeMap::from([(
                "default".to_owned(),
                Profile {
                    combined,
                    prompt_max,
                    ..Profile::default()
                },
            )]),
            ..ModelConfig::default()
        };
        let mut served = model("m");
        let mut port = 8000;
        let mut address = || {
            port += 1;
            format!("10.0.0.1:{port}")
        };
        for (nth, (prefill, decode)) in case.rolesets.iter().enumerate() {
            let set = format!("r{nth}");
            let config = profile(false, case.longest[nth]);
            for at in 0..*prefill {
                let pod = pod(&format!("p{nth}-{at}")).prefill().roleset(&set);
                served = served.pod(pod.address(&address()).config(config.clone()));
            }
            for at in 0..*decode {
                let pod = pod(&format!("d{nth}-{at}")).decode().roleset(&set);
                served = served.pod(pod.address(&address()).config(config.clone()));
            }
        }
        for nth in 0..case.combined {
            let pod = pod(&format!("c{nth}")).config(profile(true, None));
            served = served.pod(pod.address(&address()));
        }
        let knobs = serde_json::json!({
            "prefillScorePolicy": case.policies.0,
            "decodeScorePolicy": case.policies.1,
            "promptLengthBucketing": case.bucketing,
            "maxPrefillPerPod": case.capacity,
            "maxDecodePerPod": case.capacity,
            "localPrefillMaxTokens": case.local_prefill,
            "routingAlgorithm": "pd",
        });
        let mut stage = Self {
            store: MemoryStore::new(),
            worker: Worker::new([7; 32]),
            config: Config::parse(knobs.to_string().as_bytes(), |_| None).unwrap(),
        };
        let bytes = topology(1, 1).model(served).json();
        accept_topology(&stage.store, &bytes, 0).unwrap();
        stage.worker.fleet.refresh(&stage.store);
        stage
    }

    /// Another VM's charges, which this one must leave as they are.
    fn charge_others(&mut self, case: &Case) {
        let fleet = self.worker.fleet.model("m").unwrap();
        let mut other = Ledger::new(9);
        for (at, tokens) in &case.others {
            let Some(pod) = fleet.pods.get(*at) else {
                continue;
            };
            let pick = match pod.role {
                Role::Prefill => Pick {
                    prefill: Some(PrefillCharge {
                        pod: pod.key,
                        tokens: *tokens,
                    }),
                    ..Pick::default()
                },
                _ => Pick {
                    decode: Some(DecodeCharge {
                        pod: pod.key,
                        tokens: *tokens,
                    }),
                    ..Pick::default()
                },
            };
            let Ok(_) = other.charge(&self.store, fleet.slot, 1, |_| {
                Ok::<_, Infallible>((pick, ()))
            });
        }
    }

    fn on(&mut self, flow: &mut Flow, event: Event<'_>) -> Vec<Effect> {
        let mut scene = Scene {
            worker: &mut self.worker,
            config: &self.config,
            store: &self.store,
            now_ms: 1000,
        };
        flow.on(event, &mut scene)
    }

    fn flow(&mut self) -> Flow {
        let none = std::iter::empty::<(&str, &[u8])>();
        let head = Head::read("/v1/chat/completions", Endpoint::Chat, none);
        let mut scene = Scene {
            worker: &mut self.worker,
            config: &self.config,
            store: &self.store,
            now_ms: 1000,
        };
        Flow::new(head, false, &mut scene)
    }

    fn charged(&mut self) -> BTreeMap<PodKey, Amounts> {
        let slot = self.worker.fleet.model("m").unwrap().slot;
        let totals = self.worker.ledger.totals(&self.store, slot);
        totals.sorted().into_iter().collect()
    }
}

/// Name and charge of every pod whose charges are not what they were.
fn changed(stage: &mut Stage, before: &BTreeMap<PodKey, Amounts>) -> BTreeMap<String, Amounts> {
    let fleet = stage.worker.fleet.model("m").unwrap();
    let after = stage.charged();
    let mut changed = BTreeMap::new();
    for pod in fleet.pods.iter() {
        let amounts =
            |map: &BTreeMap<PodKey, Amounts>| map.get(&pod.key).copied().unwrap_or_default();
        let (before, after) = (amounts(before), amounts(&after));
        if before != after {
            changed.insert(pod.address.clone(), difference(&after, &before));
        }
    }
    let known = |key: &PodKey| fleet.pods.iter().any(|pod| pod.key == *key);
    assert!(
        after.keys().all(known),
        "only pods of the model are charged"
    );
    changed
}

fn difference(after: &Amounts, before: &Amounts) -> Amounts {
    Amounts {
        prefill_requests: after.prefill_requests - before.prefill_requests,
        active_tokens: after.active_tokens - before.active_tokens,
        kv_tokens: after.kv_tokens - before.kv_tokens,
        decode_pending: after.decode_pending - before.decode_pending,
        decode_running: after.decode_running - before.decode_running,
        decode_tokens: after.decode_tokens - before.decode_tokens,
        routed_at_sum_ms: after.routed_at_sum_ms - before.routed_at_sum_ms,
    }
}

proptest! {
    #[test]
    fn what_is_charged_is_what_was_chosen_and_it_comes_back(case in case()) {
        let mut stage = Stage::new(&case);
        stage.charge_others(&case);
        let before = stage.charged();
        let words = "word ".repeat(case.words);
        let body = format!(
            r#"{{"model":"m","n":{},"messages":[{{"role":"user","content":"{words}"}}]}}"#,
            case.answers
        );
        let tokens = body.len() as u64 / 4;
        let mut flow = stage.flow();
        let effects = stage.on(&mut flow, Event::Body(body.as_bytes()));
        let mut charged = changed(&mut stage, &before);
        let sent = |effects: &[Effect]| effects.iter().find_map(|effect| match effect {
            Effect::Send(leg) => Some(leg.address.clone()),
            _ => None,
        });
        let called = effects.iter().find_map(|effect| match effect {
            Effect::Call(call) => Some(call.address.clone()),
            _ => None,
        });
        let decode = Amounts { decode_tokens: tokens, routed_at_sum_ms: 1000, ..Amounts::default() };
        let running = Amounts { decode_running: 1, ..decode };
        match (called, sent(&effects)) {
            (Some(prefill), None) => {
                // The prompt was never seen before, so no policy takes anything off.
                let cost = REQUEST_COST + tokens;
                let computing =
                    Amounts { prefill_requests: 1, active_tokens: cost, kv_tokens: cost, ..Amounts::default() };
                prop_assert_eq!(charged.remove(&prefill), Some(computing));
                prop_assert_eq!(charged.len(), 1);
                let (target, pending) = charged.pop_first().unwrap();
                prop_assert_eq!(pending, Amounts { decode_pending: 1, ..decode });

                let reply = Event::CallReply { status: 200, body: HANDED_OVER };
                let effects = stage.on(&mut flow, reply);
                prop_assert_eq!(sent(&effects), Some(target.clone()));
                let held = Amounts { kv_tokens: cost, ..Amounts::default() };
                let expected = BTreeMap::from([(prefill, held), (target, running)]);
                prop_assert_eq!(changed(&mut stage, &before), expected);
            }
            (None, Some(target)) => {
                prop_assert_eq!(charged, BTreeMap::from([(target, running)]));
            }
            (None, None) => {
                let refused = effects.iter().any(|effect| matches!(effect, Effect::Reply(_)));
                prop_assert!(refused, "{:?}", effects);
                prop_assert_eq!(charged, BTreeMap::new());
            }
            both => prop_assert!(false, "both legs at once: {:?}", both),
        }
        if !flow.is_ended() {
            stage.on(&mut flow, Event::Gone { engine_cut: false, unsent: false });
        }
        prop_assert!(flow.is_ended());
        prop_assert_eq!(stage.charged(), before);
    }
}
