//! A discrete-event simulation: the real choice, ledger and prefix index route Poisson traffic to
//! modelled engines, and the policies are compared by their time to first token.
//!
//! `cargo test -p pd-core --test simulation -- --nocapture` prints the tables.

// One run natively is enough: nothing here depends on the target.
#![cfg(not(target_family = "wasm"))]
// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

mod engine;
mod gateway;
mod table;
mod workload;
mod world;

use engine::Micros;
use pd_core::fleet::ModelFleet;
use pd_core::select::Settings;
use pd_core::testkit::{model, pod};
use pd_wire::knobs::{BucketServeMode, PrefillPolicy};
use pd_wire::profile::{ModelConfig, Profile};
use std::collections::BTreeMap;
use table::Row;
use workload::{Dice, Session};
use world::play;

const SEEDS: [u64; 3] = [1, 2, 3];
const SECOND: Micros = 1_000_000;

/// `rolesets` rolesets of `pods` prefill and `pods` decode pods, for prompts of the given lengths.
fn fleet(rolesets: usize, pods: usize, ranges: &[(u64, Option<u64>)]) -> ModelFleet {
    let mut builder = model("m");
    for roleset in 0..rolesets {
        let (prompt_min, prompt_max) = ranges.get(roleset).copied().unwrap_or((0, None));
        let profile = Profile {
            prompt_min,
            prompt_max,
            ..Profile::default()
        };
        let config = ModelConfig {
            profiles: BTreeMap::from([("default".to_owned(), profile)]),
            ..ModelConfig::default()
        };
        for nth in 0..pods {
            let name = |role: &str| format!("r{roleset}-{role}{nth}");
            let member = |pod: pd_core::testkit::PodBuilder| {
                pod.roleset(&format!("r{roleset}")).config(config.clone())
            };
            builder = builder
                .pod(member(pod(&name("p")).prefill()))
                .pod(member(pod(&name("d")).decode()));
        }
    }
    (*builder.fleet()).clone()
}

/// How a gateway is set up.
#[derive(Clone, Copy)]
struct Setup<'a> {
    fleet: &'a ModelFleet,
    settings: Settings,
    /// Adaptive bucket serving.
    bands: Option<BucketServeMode>,
}

// === impl Setup ===

impl<'a> Setup<'a> {
    fn policy(fleet: &'a ModelFleet, prefill_policy: PrefillPolicy) -> Self {
        let settings = Settings {
            prefill_policy,
            ..Settings::default()
        };
        Self {
            fleet,
            settings,
            bands: None,
        }
    }

    /// Plays the work of every seed and measures the requests from a time on.
    fn play(
        self,
        name: &'static str,
        measure_from: Micros,
        work: impl Fn(&mut Dice) -> Vec<Session>,
    ) -> Row {
        let outcome = |seed: &u64| {
            let sessions = work(&mut Dice::new(*seed));
            play(
                self.fleet,
                self.settings,
                self.bands,
                &sessions,
                measure_from,
                *seed,
            )
        };
        Row::new(name, SEEDS.iter().map(outcome).collect())
    }
}

/// How pods are grouped: rolesets, and prefill pods as well as decode pods in each.
///
/// In a roleset of one pair, whoever picks the prefill pod has picked the decode pod too; both
/// sides weigh the same, so the prefill policy decides less. That row is printed and not judged.
const SHAPES: [(&str, usize, usize); 3] = [
    ("1 roleset of 8 + 8 pods", 1, 8),
    ("4 rolesets of 2 + 2 pods", 4, 2),
    ("8 rolesets of 1 + 1 pods, not judged", 8, 1),
];

#[test]
fn token_load_beats_least_request_on_short_and_long_prompts() {
    // One prompt of ten has 30,000 tokens; the prefill pods are busy for three quarters.
    let work = |dice: &mut Dice| {
        workload::single(dice, 16.0, 120, |dice, _| {
            if dice.chance(0.1) {
                30_000
            } else {
                dice.between(100, 1_000)
            }
        })
    };
    for (shape, rolesets, pods) in SHAPES {
        let fleet = fleet(rolesets, pods, &[]);
        let run = |name, prefill| Setup::policy(&fleet, prefill).play(name, 20 * SECOND, work);
        let count = run("least_request", PrefillPolicy::LeastRequest);
        let load = run("token_load", PrefillPolicy::TokenLoad);
        table::print(
            &format!("short and long prompts, {shape}"),
            &[&count, &load],
        );
        if pods > 1 {
            load.assert_beats(&count, 0.9);
        }
    }
}

#[test]
fn hybrid_cache_load_beats_both_on_conversations() {
    let work = |dice: &mut Dice| workload::conversations(dice, 3.0, 180);
    for (shape, rolesets, pods) in SHAPES {
        let fleet = fleet(rolesets, pods, &[]);
        let run = |name, prefill| Setup::policy(&fleet, prefill).play(name, 60 * SECOND, work);
        let count = run("least_request", PrefillPolicy::LeastRequest);
        let load = run("token_load", PrefillPolicy::TokenLoad);
        let hybrid = run("hybrid_cache_load", PrefillPolicy::HybridCacheLoad);
        table::print(
            &format!("conversations, {shape}"),
            &[&count, &load, &hybrid],
        );
        if pods > 1 {
            hybrid.assert_beats(&count, 0.8);
            hybrid.assert_beats(&load, 0.8);
        }
    }
}

#[test]
fn adaptive_buckets_beat_fixed_ones_when_the_lengths_shift() {
    // Cut so that each quarter of the fleet gets a quarter of the tokens of the first minute.
    let cuts = [
        (0, Some(4_000)),
        (4_001, Some(8_000)),
        (8_001, Some(12_000)),
        (12_001, None),
    ];
    let work = |dice: &mut Dice| {
        workload::single(dice, 14.0, 180, |dice, at| {
            if at < 60 * SECOND {
                dice.log_between(200.0, 16_000.0)
            } else {
                dice.log_between(1_000.0, 10_000.0)
            }
        })
    };
    let run = |name, ranges, bands| {
        let fleet = fleet(4, 2, ranges);
        let mut setup = Setup::policy(&fleet, PrefillPolicy::TokenLoad);
        setup.settings.bucketing = true;
        setup.bands = bands;
        setup.play(name, 90 * SECOND, work)
    };
    let fixed = run("fixed ranges", &cuts[..], None);
    let mass = run(
        "adaptive, throughput",
        &[],
        Some(BucketServeMode::Throughput),
    );
    let count = run("adaptive, rps", &[], Some(BucketServeMode::Rps));
    // What the engines of this model, all alike, would do without any bucket.
    let none = run("every length everywhere", &[], None);
    table::print(
        "lengths shift, 4 rolesets of 2 + 2 pods",
        &[&fixed, &mass, &count, &none],
    );
    mass.assert_beats(&fixed, 0.3);
    count.assert_beats(&fixed, 0.3);
}
