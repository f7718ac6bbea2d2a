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
use pd_wire::knobs::PrefillPolicy;
use pd_wire::profile::{ModelConfig, Profile};
use std::collections::BTreeMap;
use table::Row;
use workload::{Dice, Session};
use world::{Outcome, play};

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

fn compare(
    name: &'static str,
    fleet: &ModelFleet,
    settings: Settings,
    measure_from: Micros,
    work: impl Fn(&mut Dice) -> Vec<Session>,
) -> Row {
    let outcomes: Vec<Outcome> = SEEDS
        .iter()
        .map(|seed| {
            let sessions = work(&mut Dice::new(*seed));
            play(fleet, settings, &sessions, measure_from, *seed)
        })
        .collect();
    Row::new(name, outcomes)
}

fn policy(prefill_policy: PrefillPolicy) -> Settings {
    Settings {
        prefill_policy,
        ..Settings::default()
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
        let run = |name, prefill| compare(name, &fleet, policy(prefill), 20 * SECOND, work);
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
        let run = |name, prefill| compare(name, &fleet, policy(prefill), 60 * SECOND, work);
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
fn fixed_buckets_suffer_when_the_lengths_shift() {
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
    let settings = Settings {
        bucketing: true,
        ..policy(PrefillPolicy::TokenLoad)
    };
    let run = |name, ranges| {
        let fleet = fleet(4, 2, ranges);
        compare(name, &fleet, settings, 90 * SECOND, work)
    };
    let fixed = run("fixed", &cuts[..]);
    let shared = run("every length everywhere", &[]);
    table::print("lengths shift", &[&fixed, &shared]);
    shared.assert_beats(&fixed, 0.5);
}
