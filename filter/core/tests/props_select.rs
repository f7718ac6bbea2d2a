//! Properties of every choice, over random fleets.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

mod scenario;

use pd_core::score::{decode, prefill};
use pd_core::select::{Decision, DecodeImbalance, Reason, Shape, Strategy as Plain, Target};
use pd_wire::knobs::{DecodePolicy, PrefillPolicy};
use proptest::prelude::*;
use scenario::{Overrides, PodSpec, Scenario};
use std::collections::BTreeMap;

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
const SHAPES: [Shape; 6] = [
    Shape::Pair,
    Shape::OneLeg,
    Shape::Plain(Plain::Random),
    Shape::Plain(Plain::LeastRequest),
    Shape::Plain(Plain::PrefixCache),
    Shape::Plain(Plain::Affinity {
        pod: None,
        key: Some(7),
    }),
];

/// Small numbers tie often; large ones cross the thresholds.
fn count() -> impl Strategy<Value = u32> {
    prop_oneof![3 => 0..3_u32, 1 => 0..60_u32]
}

fn reported() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![
        3 => Just(None),
        2 => (0..4_u32).prop_map(|value| Some(f64::from(value))),
        2 => (0.0..5000.0).prop_map(Some),
        1 => prop_oneof![Just(Some(f64::NAN)), Just(Some(f64::INFINITY)), Just(Some(-1.0))],
    ]
}

prop_compose! {
    fn pod()(
        role in prop_oneof![Just("prefill"), Just("decode"), Just("all")],
        roleset in 0..4_usize,
        unusable in prop::bool::weighted(0.1),
        requests in count(),
        matched in prop_oneof![Just(0_u8), Just(100), any::<u8>()],
        charged in (count(), count()),
        sample_age in prop_oneof![Just(None), Just(Some(0)), Just(Some(60_000))],
        sampled in (reported(), reported(), reported(), reported(), reported()),
        queue in (reported(), reported()),
        tokens in (0..9000_u64, 0..9000_u64, 0..9000_u64, 0..90_000_u64),
        combined in any::<bool>(),
        range in (prop_oneof![Just(0), 0..300_u64], prop::option::of(0..300_u64)),
    ) -> PodSpec {
        PodSpec {
            role: role.into(),
            roleset: format!("r{roleset}"),
            unusable,
            requests,
            matched,
            running: charged.0,
            pending: charged.1,
            sample_age,
            sampled_running: sampled.0,
            remote_running: sampled.1,
            throughput: sampled.2,
            kv_usage: sampled.3.map(|value| value / 4.0),
            drain_rate: sampled.4,
            waiting: queue.0,
            prefill_ms: queue.1,
            active_tokens: tokens.0,
            kv_tokens: tokens.1,
            decode_tokens: tokens.2,
            routed_ago_ms: tokens.3,
            combined,
            prompt_min: range.0,
            prompt_max: range.1,
            ..PodSpec::default()
        }
    }
}

prop_compose! {
    fn scenario()(
        pods in prop::collection::vec(pod(), 0..24),
        prefill in prop::sample::select(&PREFILL[..]),
        decode in prop::sample::select(&DECODE[..]),
        ties_by_pod_id in any::<bool>(),
        tie in any::<u64>(),
        disallowed in prop::collection::vec(0..24_usize, 0..3),
        blocked in prop::collection::vec((0..24_usize, 0..24_usize), 0..12),
        excluded in prop::collection::vec(0..4_usize, 0..2),
        shape in prop::sample::select(&SHAPES[..]),
        bucketing in any::<bool>(),
        capacity in (prop_oneof![Just(0), 0..40_u32], prop_oneof![Just(0), 0..40_u32]),
        local_prefill_max_tokens in prop_oneof![Just(0), 0..300_u64],
        prompt_tokens in 0..300_u64,
        banded in prop::option::of(0..5_usize),
    ) -> Scenario {
        let pods: Vec<PodSpec> = pods
            .into_iter()
            .enumerate()
            .map(|(at, pod)| PodSpec { name: format!("pod-{at:02}"), ..pod })
            .collect();
        let name = |at: usize| pods.get(at).map(|pod| pod.name.clone());
        let disallowed = disallowed.into_iter().filter_map(name).collect();
        let blocked = blocked.into_iter().filter_map(|(p, d)| Some((name(p)?, name(d)?)));
        let blocked = blocked.collect();
        Scenario {
            settings: Overrides {
                prefill_policy: Some(prefill),
                decode_policy: Some(decode),
                ties_by_pod_id: Some(ties_by_pod_id),
                bucketing: Some(bucketing),
                max_prefill_per_pod: Some(capacity.0),
                max_decode_per_pod: Some(capacity.1),
                local_prefill_max_tokens: Some(local_prefill_max_tokens),
                ..Overrides::default()
            },
            pods,
            disallowed,
            blocked,
            excluded: excluded.into_iter().map(|roleset| format!("r{roleset}")).collect(),
            tie,
            shape: Some(shape),
            prompt_tokens,
            banded: banded.map(|roleset| format!("r{roleset}")),
            text_bytes: 4 * prompt_tokens,
            ..Scenario::default()
        }
    }
}

/// What the gate must hold back.
fn may_serve(scenario: &Scenario, pod: &PodSpec) -> bool {
    let settings = scenario.settings();
    let phases = matches!(scenario.shape, Some(Shape::Pair | Shape::OneLeg));
    let fits = pod.prompt_min <= scenario.prompt_tokens
        && pod
            .prompt_max
            .is_none_or(|max| scenario.prompt_tokens <= max);
    let full = match pod.role.as_str() {
        "prefill" => {
            settings.max_prefill_per_pod > 0 && pod.requests >= settings.max_prefill_per_pod
        }
        "decode" => {
            settings.max_decode_per_pod > 0
                && pod.running + pod.pending >= settings.max_decode_per_pod
        }
        _ => false,
    };
    !pod.unusable
        && !scenario.disallowed.contains(&pod.name)
        && (fits || !settings.bucketing || !phases)
        && !full
}

proptest! {
    #[test]
    fn a_target_has_the_right_roles_and_passes_the_gate(scenario in scenario()) {
        let pod = |ordinal: u16| &scenario.pods[usize::from(ordinal)];
        let phases = matches!(scenario.shape, Some(Shape::Pair | Shape::OneLeg));
        let chosen = match scenario.run().result.map(|decision| decision.target) {
            Ok(Target::Pair(pair)) => {
                let (prefill, decode) = (pod(pair.prefill), pod(pair.decode));
                prop_assert_eq!(scenario.shape, Some(Shape::Pair));
                prop_assert_eq!(&prefill.role, "prefill");
                prop_assert_eq!(&decode.role, "decode");
                prop_assert_eq!(&prefill.roleset, &decode.roleset);
                let fleet = scenario.fleet();
                let roleset = &fleet.rolesets[usize::from(pair.roleset)];
                prop_assert_eq!(&roleset.name, &prefill.roleset);
                prop_assert!(!scenario.excluded.contains(&roleset.name));
                let names = (prefill.name.clone(), decode.name.clone());
                prop_assert!(!scenario.blocked.contains(&names));
                vec![prefill, decode]
            }
            Ok(Target::Combined(combined)) => {
                prop_assert!(phases && pod(combined).combined);
                prop_assert_eq!(&pod(combined).role, "all");
                vec![pod(combined)]
            }
            Ok(Target::OneLeg(one)) => {
                prop_assert_ne!(&pod(one).role, "prefill");
                prop_assert!(!phases || pod(one).role == "decode");
                vec![pod(one)]
            }
            Err(_) => Vec::new(),
        };
        for pod in chosen {
            prop_assert!(may_serve(&scenario, pod), "{:?}", pod);
        }
    }

    #[test]
    fn a_complete_roleset_always_serves_a_pair(scenario in scenario()) {
        let scenario = Scenario {
            shape: Some(Shape::Pair),
            excluded: Vec::new(),
            blocked: Vec::new(),
            settings: Overrides {
                bucketing: None,
                max_prefill_per_pod: None,
                max_decode_per_pod: None,
                local_prefill_max_tokens: None,
                ..scenario.settings.clone()
            },
            ..scenario
        };
        let complete = (0..4).any(|roleset| {
            let has = |role: &str| scenario.pods.iter().any(|pod| {
                pod.role == role && pod.roleset == format!("r{roleset}")
                    && may_serve(&scenario, pod)
            });
            has("prefill") && has("decode")
        });
        let outcome = scenario.run();
        let pair = outcome.result.as_ref().is_ok_and(|decision| {
            matches!(decision.target, Target::Pair(_))
        });
        prop_assert_eq!(pair, complete, "{:?}", outcome.result);
        for score in outcome.prefill.values().chain(outcome.decode.values()) {
            prop_assert!(score.is_finite());
        }
    }

    #[test]
    fn a_band_moves_a_pair_to_its_roleset_and_refuses_nothing(
        scenario in scenario(),
        excluded in prop::collection::vec(0..4_usize, 0..3),
        blocked in prop::collection::vec((0..24_usize, 0..24_usize), 0..12),
        banded in 0..4_usize,
    ) {
        let name = |at: usize| Some(scenario.pods.get(at)?.name.clone());
        let without = Scenario {
            banded: None,
            excluded: excluded.iter().map(|roleset| format!("r{roleset}")).collect(),
            blocked: blocked
                .iter()
                .filter_map(|(prefill, decode)| Some((name(*prefill)?, name(*decode)?)))
                .collect(),
            ..scenario.clone()
        };
        let with = Scenario { banded: Some(format!("r{banded}")), ..without.clone() };
        let plain = without.run();
        let advised = with.run();
        match (&plain.result, &advised.result) {
            (Ok(plain), Ok(advised)) => {
                let pods = |decision: &Decision| match decision.target {
                    Target::Pair(pair) => Some(pair.decode),
                    Target::OneLeg(pod) if decision.explanation.reason == Reason::LocalPrefill => {
                        Some(pod)
                    }
                    _ => None,
                };
                let roleset = pods(advised).map(|pod| &scenario.pods[usize::from(pod)].roleset);
                if advised.explanation.banded {
                    prop_assert_eq!(roleset, with.banded.as_ref());
                } else {
                    prop_assert_eq!(pods(plain), pods(advised));
                }
                prop_assert_eq!(pods(plain).is_some(), pods(advised).is_some());
            }
            (plain, advised) => prop_assert_eq!(plain, advised),
        }
    }

    #[test]
    fn the_order_of_pods_and_rolesets_does_not_matter(
        (scenario, shuffled) in scenario().prop_flat_map(|scenario| {
            let pods = Just(scenario.pods.clone()).prop_shuffle();
            (Just(scenario), pods)
        })
    ) {
        let other = Scenario { pods: shuffled, ..scenario.clone() };
        prop_assert_eq!(scenario.run().target, other.run().target);
    }

    #[test]
    fn pods_that_may_not_be_chosen_change_nothing(scenario in scenario()) {
        let gone = |pod: &PodSpec| pod.unusable || scenario.disallowed.contains(&pod.name);
        let names: Vec<String> =
            scenario.pods.iter().filter(|pod| gone(pod)).map(|pod| pod.name.clone()).collect();
        let without = Scenario {
            pods: scenario.pods.iter().filter(|pod| !gone(pod)).cloned().collect(),
            disallowed: Vec::new(),
            blocked: scenario
                .blocked
                .iter()
                .filter(|(prefill, decode)| !names.contains(prefill) && !names.contains(decode))
                .cloned()
                .collect(),
            ..scenario.clone()
        };
        let (with, without) = (scenario.run(), without.run());
        if with.result.is_err() && without.result.is_err() {
            // Why nobody serves may well depend on who is there.
            return Ok(());
        }
        prop_assert_eq!(with.target, without.target);
        prop_assert_eq!((with.prefill, with.decode), (without.prefill, without.decode));
    }

    #[test]
    fn estimates_grow_with_what_they_estimate(
        load in (0.0..1e6, 0.0..1e5, prop::option::of(0.0..1e5), 0..=100_u8),
        text in 0.0..1e7,
        more in 0.0..1e5,
    ) {
        let (requests, tokens, throughput, matched) = load;
        let prefill = |requests, text_bytes| {
            let load = prefill::Load {
                requests,
                match_percent: f64::from(matched),
                ..prefill::Load::default()
            };
            let batch = prefill::Batch { max_requests: 1.0, text_bytes };
            let weights = prefill::Weights { kv: 0.3, hybrid_factor: 0.5 };
            prefill::score(PrefillPolicy::Conductor, &load, &batch, &weights)
        };
        prop_assert!(prefill(requests, text) <= prefill(requests + more, text));
        prop_assert!(prefill(requests, text) <= prefill(requests, text + more));
        let decode = |policy, running, age_s| {
            let load = decode::Load { sampled: true, running, throughput, tokens, age_s, ..decode::Load::default() };
            let mean = decode::mean_rate([load].iter());
            let batch = decode::Batch::measure([load].iter(), mean);
            let weights = decode::Weights { running: 1.0, throughput: 1.0, output_growth: true };
            decode::score(policy, &load, &batch, &weights)
        };
        let (growth, batch) = (DecodePolicy::TokenLoad, DecodePolicy::Conductor);
        prop_assert!(tokens <= decode(growth, requests, more));
        prop_assert!(decode(growth, requests, text) <= decode(growth, requests, text + more));
        prop_assert!(decode(batch, requests, 0.0) <= decode(batch, requests + more, 0.0));
    }

    #[test]
    fn the_same_query_gives_the_same_answer(scenario in scenario()) {
        prop_assert_eq!(scenario.run(), scenario.run());
    }
}

/// `rolesets` rolesets with `pods` idle pods of each role, under 1,000 random words.
fn picks(rolesets: usize, pods: usize) -> BTreeMap<String, u32> {
    let mut scenario = Scenario::default();
    for roleset in 0..rolesets {
        for role in ["prefill", "decode"] {
            for pod in 0..pods {
                scenario.pods.push(PodSpec {
                    name: format!("{role}-{roleset}-{pod}"),
                    role: role.into(),
                    roleset: format!("r{roleset}"),
                    ..PodSpec::default()
                });
            }
        }
    }
    let mut picks = BTreeMap::new();
    for tie in 0..1000_u64 {
        // Consecutive words are the hardest input: they share almost all bits.
        scenario.tie = tie;
        *picks.entry(scenario.run().target).or_default() += 1;
    }
    picks
}

#[test]
fn ties_between_equal_rolesets_are_even() {
    let picks = picks(8, 1);
    assert_eq!(picks.len(), 8);
    for (pair, count) in picks {
        assert!(
            (100..=150).contains(&count),
            "{pair}: {count} of 1000, 125 expected"
        );
    }
}

#[test]
fn ties_inside_a_roleset_are_even_and_independent_on_both_sides() {
    let picks = picks(1, 2);
    assert_eq!(picks.len(), 4);
    for (pair, count) in picks {
        assert!(
            (200..=300).contains(&count),
            "{pair}: {count} of 1000, 250 expected"
        );
    }
}

#[test]
fn a_roleset_with_more_tied_pods_does_not_win_more_often() {
    let mut scenario = Scenario::default();
    for (name, role, roleset) in [
        ("p0", "prefill", "a"),
        ("p1", "prefill", "a"),
        ("p2", "prefill", "a"),
        ("d0", "decode", "a"),
        ("p3", "prefill", "b"),
        ("d1", "decode", "b"),
    ] {
        scenario.pods.push(PodSpec {
            name: name.into(),
            role: role.into(),
            roleset: roleset.into(),
            ..PodSpec::default()
        });
    }
    let other = (0..1000).filter(|tie| {
        let outcome = Scenario {
            tie: *tie,
            ..scenario.clone()
        }
        .run();
        outcome.target == "p3+d1"
    });
    let count = other.count();
    assert!(
        (400..=600).contains(&count),
        "{count} of 1000, 500 expected"
    );
}

#[test]
fn ties_by_pod_id_always_pick_the_first_name() {
    let mut scenario = Scenario::default();
    scenario.settings.ties_by_pod_id = Some(true);
    for (name, role, roleset) in [
        ("z", "decode", "b"),
        ("b", "prefill", "b"),
        ("d", "decode", "a"),
        ("c", "prefill", "a"),
        ("a", "decode", "a"),
    ] {
        scenario.pods.push(PodSpec {
            name: name.into(),
            role: role.into(),
            roleset: roleset.into(),
            ..PodSpec::default()
        });
    }
    for tie in 0..50 {
        let outcome = Scenario {
            tie,
            ..scenario.clone()
        }
        .run();
        assert_eq!(outcome.target, "b+z");
    }
}

#[test]
fn a_score_that_is_not_finite_makes_a_pod_ineligible_and_is_counted() {
    let mut scenario = Scenario::default();
    scenario.settings.weight_running = Some(f64::MAX);
    let decode = |name: &str, running, kv_usage| PodSpec {
        name: name.into(),
        role: "decode".into(),
        roleset: "a".into(),
        sample_age: Some(0),
        sampled_running: Some(running),
        kv_usage: Some(kv_usage),
        ..PodSpec::default()
    };
    scenario.pods = vec![
        PodSpec {
            name: "p".into(),
            role: "prefill".into(),
            roleset: "a".into(),
            ..PodSpec::default()
        },
        decode("full", 4.0, 1.0),
        decode("free", 4.0, 0.0),
    ];
    let outcome = scenario.run();
    assert_eq!(outcome.target, "p+free");
    assert_eq!(outcome.result.unwrap().explanation.ineligible, 1);
}

#[test]
fn the_explanation_names_the_check_that_fired() {
    let text = include_str!("vectors/selection/fast_paths.json");
    let file: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut fired = Vec::new();
    for case in file["cases"].as_array().unwrap() {
        let scenario: Scenario = serde_json::from_value(case["given"].clone()).unwrap();
        let explanation = scenario.run().result.unwrap().explanation;
        fired.push((explanation.prefill_imbalance, explanation.decode_imbalance));
    }
    use DecodeImbalance::{Drain, Requests, Throughput};
    let expected = [
        (false, None),
        (true, None),
        (true, None),
        (false, Some(Requests)),
        (false, None),
        (false, None),
        (false, Some(Throughput)),
        (false, None),
        (false, Some(Drain)),
        (false, None),
        (false, None),
        (false, None),
        (true, Some(Requests)),
    ];
    assert_eq!(fired, expected);
}

#[test]
fn the_explanation_says_where_a_band_left_others_out() {
    let text = include_str!("vectors/selection/bands.json");
    let file: serde_json::Value = serde_json::from_str(text).unwrap();
    let cases = file["cases"].as_array().unwrap();
    let scenario = |case: &serde_json::Value| -> Scenario {
        serde_json::from_value(case["given"].clone()).unwrap()
    };
    let banded = |scenario: &Scenario| scenario.run().result.unwrap().explanation.banded;
    let decided: Vec<bool> = cases.iter().map(|case| banded(&scenario(case))).collect();
    let mut expected = vec![false; cases.len()];
    for at in [0, 1, 3] {
        expected[at] = true;
    }
    assert_eq!(decided, expected);
    let first = scenario(&cases[0]);
    let explanation = first.run().result.unwrap().explanation;
    assert_eq!(
        explanation.render(&first.fleet()),
        "reason=score; prompt_tokens=0; band=length; prefill=ns/p1:9; decode=ns/d1:9"
    );
    // A band that leaves nobody out decides nothing.
    let alone = Scenario {
        pods: first.pods[2..].to_vec(),
        ..first
    };
    assert!(!banded(&alone));
}

#[test]
fn a_session_key_keeps_its_pod_and_keys_spread() {
    let mut scenario = Scenario::default();
    for pod in 0..4 {
        scenario.pods.push(PodSpec {
            name: format!("s{pod}"),
            ..PodSpec::default()
        });
    }
    let home = |scenario: &Scenario, key: u64, tie: u64| {
        let shape = Shape::Plain(Plain::Affinity {
            pod: None,
            key: Some(key),
        });
        Scenario {
            shape: Some(shape),
            tie,
            ..scenario.clone()
        }
        .run()
        .target
    };
    let mut fewer = scenario.clone();
    fewer.pods[3].unusable = true;
    let mut homes: BTreeMap<String, u32> = BTreeMap::new();
    for key in 0..400 {
        let target = home(&scenario, key, 1);
        assert_eq!(target, home(&scenario, key, 2));
        if target != "one-leg:s3" {
            assert_eq!(
                target,
                home(&fewer, key, 3),
                "only the sessions of the lost pod move"
            );
        }
        *homes.entry(target).or_default() += 1;
    }
    assert_eq!(homes.len(), 4);
    assert!(
        homes.values().all(|count| (60..=140).contains(count)),
        "{homes:?}"
    );
}

#[test]
fn an_explanation_renders_on_one_bounded_line_of_ascii() {
    let text = include_str!("vectors/prefix_cache/scores.json");
    let file: serde_json::Value = serde_json::from_str(text).unwrap();
    let scenario: Scenario = serde_json::from_value(file["cases"][2]["given"].clone()).unwrap();
    let explanation = scenario.run().result.unwrap().explanation;
    assert_eq!(
        explanation.render(&scenario.fleet()),
        "reason=score; prompt_tokens=0; match=50; prefill=ns/p0:6,ns/p1:5.3333; decode=ns/d0:1"
    );

    let mut crowded = Scenario::default();
    for pod in 0..40 {
        for role in ["prefill", "decode"] {
            crowded.pods.push(PodSpec {
                name: format!("{role}-{pod}-{}", "x".repeat(240)),
                role: role.into(),
                roleset: "a".into(),
                ..PodSpec::default()
            });
        }
    }
    let explanation = crowded.run().result.unwrap().explanation;
    assert_eq!(
        (explanation.prefill.len(), explanation.decode.len()),
        (16, 16)
    );
    let line = explanation.render(&crowded.fleet());
    assert!(
        line.len() < 4200 && line.is_ascii() && !line.contains('\n'),
        "{}",
        line.len()
    );
}

#[test]
fn a_fast_path_that_would_leave_an_ejected_pair_alone_is_not_taken() {
    let spec = |name: &str, role: &str, busy: u32| PodSpec {
        name: name.into(),
        role: role.into(),
        roleset: "a".into(),
        requests: busy,
        sample_age: Some(0),
        sampled_running: Some(f64::from(busy)),
        ..PodSpec::default()
    };
    for (pods, free) in [
        (
            [
                spec("p0", "prefill", 0),
                spec("p1", "prefill", 20),
                spec("d0", "decode", 0),
            ],
            "p1+d0",
        ),
        (
            [
                spec("p0", "prefill", 0),
                spec("d0", "decode", 0),
                spec("d1", "decode", 20),
            ],
            "p0+d1",
        ),
    ] {
        let mut scenario = Scenario {
            pods: pods.into(),
            ..Scenario::default()
        };
        assert_eq!(scenario.run().target, "p0+d0");
        scenario.blocked = vec![("p0".into(), "d0".into())];
        let outcome = scenario.run();
        assert_eq!(outcome.target, free);
        let explanation = outcome.result.unwrap().explanation;
        assert!(!explanation.prefill_imbalance && explanation.decode_imbalance.is_none());
    }
}
