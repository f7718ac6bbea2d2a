//! Scores and choices equal the source each file names.

// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

mod scenario;

use scenario::Scenario;
use serde::Deserialize;
use std::collections::BTreeMap;

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
}

fn check(text: &str) {
    let file: File = serde_json::from_str(text).unwrap();
    assert!(!file.source.is_empty() && !file.cases.is_empty());
    for case in file.cases {
        let name = &case.name;
        let mut met: BTreeMap<String, u32> = BTreeMap::new();
        let tries = if case.expect.target.len() > 1 { 200 } else { 1 };
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
    ($($test:ident: $path:literal,)+) => {$(
        #[test]
        fn $test() {
            check(include_str!(concat!("vectors/", $path)));
        }
    )+};
}

vectors! {
    prefix_cache_scores: "prefix_cache/scores.json",
    least_request_scores: "least_request/scores.json",
    load_balancing_scores: "load_balancing/scores.json",
    conductor_scores: "conductor/scores.json",
    token_load_scores: "token_load/scores.json",
    hybrid_cache_load_scores: "hybrid_cache_load/scores.json",
    buckets: "selection/buckets.json",
    capacity_and_fallback: "selection/fallback.json",
    one_leg: "selection/one_leg.json",
    plain_strategies: "selection/plain.json",
    pair_selection: "selection/pair.json",
    fast_paths: "selection/fast_paths.json",
}
