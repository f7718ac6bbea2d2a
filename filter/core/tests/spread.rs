//! A thousand requests at once spread evenly over equal rolesets although the engines' numbers
//! stand still: under every policy, whichever of two workers they reach.

// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

use pd_core::fleet::ModelFleet;
use pd_core::ids::Ids;
use pd_core::ledger::{DecodeCharge, Ledger, Pick, PrefillCharge, record};
use pd_core::select::{Query, Refusal, Settings, Shape, Target, select};
use pd_core::testkit::{MemoryStore, model};
use pd_wire::knobs::{DecodePolicy, PrefillPolicy};
use pd_wire::samples::PodSample;
use std::cell::RefCell;
use std::rc::Rc;

const ROLESETS: usize = 8;
const REQUESTS: u32 = 1000;
const TAKEN_AT_MS: u64 = 1_000;
const PREFILL: [PrefillPolicy; 5] = [
    PrefillPolicy::PrefixCache,
    PrefillPolicy::LeastRequest,
    PrefillPolicy::Conductor,
    PrefillPolicy::TokenLoad,
    PrefillPolicy::HybridCacheLoad,
];
const DECODE: [DecodePolicy; 4] = [
    DecodePolicy::LoadBalancing,
    DecodePolicy::LeastRequest,
    DecodePolicy::Conductor,
    DecodePolicy::TokenLoad,
];

/// What one worker holds.
struct Worker {
    ledger: Ledger,
    ids: Ids,
    chosen: [u32; ROLESETS],
    lost: u32,
}

impl Worker {
    fn new(nth: u8) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            ledger: Ledger::new(u32::from(nth)),
            ids: Ids::new([nth; 32]),
            chosen: [0; ROLESETS],
            lost: 0,
        }))
    }

    /// A request of 100 to 2,000 tokens that nobody has seen before.
    fn choose(&mut self, store: &MemoryStore, fleet: &ModelFleet, settings: &Settings, now: u64) {
        let tokens = 100 + self.ids.word() % 1_900;
        let tie = self.ids.word();
        let charged = self.ledger.charge(store, fleet.slot, now, |totals| {
            let decision = select(&Query {
                fleet,
                loads: &totals.aligned(&fleet.pods),
                settings,
                profile: None,
                now_ms: now,
                prompt_tokens: tokens,
                text_bytes: 4 * tokens,
                match_percent: &[],
                allowed: &|_| true,
                excluded_rolesets: &[],
                blocked_pairs: &[],
                banded_roleset: None,
                tie,
                shape: Shape::Pair,
                listed: 0,
            })?;
            let Target::Pair(pair) = decision.target else {
                panic!("all rolesets are complete: {decision:?}")
            };
            let key = |pod| fleet.pod(pod).unwrap().key;
            let pick = Pick {
                prefill: Some(PrefillCharge {
                    pod: key(pair.prefill),
                    tokens: 3_500 + tokens,
                }),
                decode: Some(DecodeCharge {
                    pod: key(pair.decode),
                    tokens,
                }),
                ttl_ms: 0,
            };
            Ok::<_, Refusal>((pick, pair.roleset))
        });
        let charged = charged.unwrap();
        self.chosen[usize::from(charged.decision)] += 1;
        self.lost += charged.lost_races;
    }
}

/// Eight equal pairs; all decode pods reported the same numbers at [`TAKEN_AT_MS`].
fn fleet(sampled: bool) -> Rc<ModelFleet> {
    let names: Vec<String> = (0..ROLESETS).map(|nth| format!("r{nth}")).collect();
    let pairs = names
        .iter()
        .fold(model("m"), |model, name| model.pair(name));
    let sample = PodSample {
        running: Some(5.0),
        waiting: Some(0.0),
        kv_usage: Some(0.3),
        generation_throughput: Some(400.0),
        drain_rate: Some(2.0),
        prefill_ms: Some(80.0),
        ..PodSample::default()
    };
    let pods: Vec<String> = names
        .iter()
        .flat_map(|name| [format!("{name}-p"), format!("{name}-d")])
        .collect();
    let samples: Vec<(&str, PodSample)> = pods.iter().map(|name| (name.as_str(), sample)).collect();
    pairs.fleet_with(if sampled { &samples } else { &[] }, TAKEN_AT_MS)
}

/// Half of the requests reach each worker. Each choice of the first is overtaken by one of the
/// second between its read and its write.
fn spread(fleet: &Rc<ModelFleet>, settings: Settings, now: u64) -> [u32; ROLESETS] {
    let store = MemoryStore::new();
    let (one, two) = (Worker::new(1), Worker::new(2));
    for _ in 0..REQUESTS / 2 {
        let (rival, fleet_too) = (Rc::clone(&two), Rc::clone(fleet));
        store.interpose(&record::key(pd_core::FORMAT, fleet.slot), move |store| {
            rival.borrow_mut().choose(store, &fleet_too, &settings, now);
        });
        one.borrow_mut().choose(&store, fleet, &settings, now);
    }
    let (one, two) = (one.borrow(), two.borrow());
    assert_eq!((one.lost, two.lost), (REQUESTS / 2, 0));
    std::array::from_fn(|roleset| one.chosen[roleset] + two.chosen[roleset])
}

fn assert_even(fleet: &Rc<ModelFleet>, now: u64) {
    for prefill_policy in PREFILL {
        for decode_policy in DECODE {
            let settings = Settings {
                prefill_policy,
                decode_policy,
                ..Settings::default()
            };
            let chosen = spread(fleet, settings, now);
            let even = REQUESTS / 8;
            assert_eq!(chosen.iter().sum::<u32>(), REQUESTS);
            assert!(
                chosen.iter().all(|count| count.abs_diff(even) <= even / 5),
                "{prefill_policy:?} with {decode_policy:?}: {chosen:?}"
            );
        }
    }
}

#[test]
fn with_samples_that_stand_still() {
    assert_even(&fleet(true), TAKEN_AT_MS + 5_000);
}

#[test]
fn with_samples_too_old_to_count() {
    assert_even(&fleet(true), TAKEN_AT_MS + 60_000);
}

#[test]
fn without_samples() {
    assert_even(&fleet(false), TAKEN_AT_MS);
}
