//! Scores and choices equal the source each file names, and scores have the bits of
//! `vectors/scores.snap` wherever this runs, natively or in wasm.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test -p pd-core --test vectors` writes that file anew; read the diff.

// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

mod scenario;

use pd_core::prefix::chain;
use pd_core::select::Explanation;
use scenario::Scenario;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    source: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Case {
    name: String,
    /// The arithmetic, where the numbers do not speak for themselves.
    #[serde(default)]
    how: String,
    given: Scenario,
    expect: Expect,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[derive(Default)]
struct Expect {
    /// The choice; several when a tie decides, and each of them must come up.
    target: Vec<String>,
    /// All prefill scores, by pod.
    prefill: Option<BTreeMap<String, f64>>,
    /// All decode scores, by pod.
    decode: Option<BTreeMap<String, f64>>,
    /// Fast paths that fired: `prefill`, then the check of step 2.
    fired: Option<Vec<String>>,
    /// Prefill pods left out as outliers.
    skipped: Option<u32>,
    /// Pods left out because their score was not finite.
    ineligible: Option<u32>,
    /// What decided.
    reason: Option<String>,
}

impl Expect {
    /// Compares what only the explanation tells.
    fn check_facts(&self, name: &str, facts: &Explanation) {
        let fired = facts
            .prefill_imbalance
            .then(|| "prefill".to_owned())
            .into_iter()
            .chain(facts.decode_imbalance.map(|check| check.name().to_owned()));
        if let Some(expected) = &self.fired {
            assert_eq!(expected, &fired.collect::<Vec<_>>(), "{name}: fast paths");
        }
        if let Some(expected) = self.skipped {
            assert_eq!(expected, facts.skipped, "{name}: skipped");
        }
        if let Some(expected) = self.ineligible {
            assert_eq!(expected, facts.ineligible, "{name}: ineligible");
        }
        if let Some(expected) = &self.reason {
            assert_eq!(expected, facts.reason.name(), "{name}: reason");
        }
    }
}

fn check(path: &str, text: &str) {
    let file: File = serde_json::from_str(text).unwrap();
    assert!(!file.source.is_empty() && !file.cases.is_empty());
    for case in file.cases {
        let name = &case.name;
        let mut met: BTreeMap<String, u32> = BTreeMap::new();
        let tries = if case.expect.target.len() > 1 { 200 } else { 1 };
        let scored = [&case.expect.prefill, &case.expect.decode];
        if path.ends_with("edges.json") && scored.into_iter().any(Option::is_some) {
            assert!(!case.how.is_empty(), "{name}: the arithmetic is missing");
        }
        for tie in 0..tries {
            let outcome = Scenario {
                tie,
                ..case.given.clone()
            }
            .run();
            assert!(
                case.expect.target.contains(&outcome.target),
                "{name}: chose {} instead of {:?}: {:?}",
                outcome.target,
                case.expect.target,
                outcome.result,
            );
            if let Ok(decision) = &outcome.result {
                case.expect.check_facts(name, &decision.explanation);
            }
            *met.entry(outcome.target).or_default() += 1;
            for (expected, scores) in [
                (&case.expect.prefill, &outcome.prefill),
                (&case.expect.decode, &outcome.decode),
            ] {
                let Some(expected) = expected else { continue };
                let pods =
                    |scores: &BTreeMap<String, f64>| scores.keys().cloned().collect::<Vec<_>>();
                assert_eq!(pods(expected), pods(scores), "{name}: scored pods");
                for (pod, score) in expected {
                    let off = (scores[pod] - score).abs();
                    assert!(
                        off <= 1e-9 * score.abs(),
                        "{name}: {pod} {} != {score}",
                        scores[pod]
                    );
                }
            }
        }
        assert_eq!(
            met.len(),
            case.expect.target.len(),
            "{name}: every tied target comes up"
        );
    }
}

macro_rules! vectors {
    ($($test:ident: $path:literal,)+) => {
        $(
            #[test]
            fn $test() {
                check($path, include_str!(concat!("vectors/", $path)));
            }
        )+

        /// Path and text of every file, as built in: a wasm module has no file system.
        const VECTORS: &[(&str, &str)] = &[$(($path, include_str!(concat!("vectors/", $path)))),+];
    };
}

vectors! {
    prefix_cache_scores: "prefix_cache/scores.json",
    prefix_cache_edges: "prefix_cache/edges.json",
    least_request_scores: "least_request/scores.json",
    least_request_edges: "least_request/edges.json",
    load_balancing_scores: "load_balancing/scores.json",
    load_balancing_edges: "load_balancing/edges.json",
    conductor_scores: "conductor/scores.json",
    conductor_edges: "conductor/edges.json",
    token_load_scores: "token_load/scores.json",
    token_load_edges: "token_load/edges.json",
    hybrid_cache_load_scores: "hybrid_cache_load/scores.json",
    hybrid_cache_load_edges: "hybrid_cache_load/edges.json",
    buckets: "selection/buckets.json",
    capacity_and_fallback: "selection/fallback.json",
    one_leg: "selection/one_leg.json",
    plain_strategies: "selection/plain.json",
    pair_selection: "selection/pair.json",
    fast_paths: "selection/fast_paths.json",
    fast_path_edges: "selection/fast_path_edges.json",
    pair_edges: "selection/pair_edges.json",
    bucket_edges: "selection/bucket_edges.json",
    bands: "selection/bands.json",
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Hashed {
    text: String,
    /// How often the text is repeated.
    times: usize,
    block_size: usize,
    seed: u64,
    hashes: Vec<u64>,
}

#[test]
fn prefix_chains() {
    let text = include_str!("vectors/prefix_chain.json");
    let cases: Vec<Hashed> = serde_json::from_str(text).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let text = case.text.repeat(case.times);
        let chain = chain([text.as_bytes()], case.block_size, case.seed);
        assert_eq!(chain.hashes(), case.hashes, "{text}");
    }
}

/// The scores of every case, one a line, with their bits.
fn scores() -> String {
    let mut lines = String::new();
    for (path, text) in VECTORS {
        let file: File = serde_json::from_str(text).unwrap();
        for Case { name, given, .. } in file.cases {
            let outcome = given.run();
            for (leg, scores) in [("prefill", outcome.prefill), ("decode", outcome.decode)] {
                for (pod, score) in scores {
                    let bits = score.to_bits();
                    writeln!(lines, "{path}: {name}: {leg} {pod} {bits:016x} {score}").unwrap();
                }
            }
        }
    }
    lines
}

#[test]
fn scores_have_the_same_bits_everywhere() {
    let actual = scores();
    #[cfg(not(target_family = "wasm"))]
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(disk::folder().join("scores.snap"), actual).unwrap();
        return;
    }
    let expected = include_str!("vectors/scores.snap");
    for (actual, expected) in actual.lines().zip(expected.lines()) {
        assert_eq!(actual, expected);
    }
    assert_eq!(actual.lines().count(), expected.lines().count());
}

/// What needs the files themselves.
#[cfg(not(target_family = "wasm"))]
mod disk {
    use super::VECTORS;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Files that are not of a policy.
    const ALONE: [&str; 3] = ["scores.snap", "prefix_chain.json", "charges.json"];

    pub(super) fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors")
    }

    #[test]
    fn every_file_is_listed() {
        let names = |folder: PathBuf| {
            fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        };
        let files: BTreeSet<String> = names(folder())
            .filter(|name| !ALONE.contains(&name.as_str()))
            .flat_map(|policy| {
                names(folder().join(&policy)).map(move |file| format!("{policy}/{file}"))
            })
            .collect();
        let listed: BTreeSet<String> = VECTORS.iter().map(|(path, _)| (*path).to_owned()).collect();
        assert_eq!(files, listed);
    }
}
