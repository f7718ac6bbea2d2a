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

use pd_core::select::{DecodeImbalance, Shape, Strategy as Plain, Target};
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
        shape in prop::sample::select(&SHAPES[..]),
        bucketing in any::<bool>(),
        capacity in (prop_oneof![Just(0), 0..40_u32], prop_oneof![Just(0), 0..40_u32]),
        local_prefill_max_tokens in prop_oneof![Just(0), 0..300_u64],
        prompt_tokens in 0..300_u64,
    ) -> Scenario {
        let pods: Vec<PodSpec> = pods
            .into_iter()
            .enumerate()
            .map(|(at, pod)| PodSpec { name: format!("pod-{at:02}"), ..pod })
            .collect();
        let disallowed = disallowed
            .into_iter()
            .filter_map(|at| Some(pods.get(at)?.name.clone()))
            .collect();
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
            tie,
            shape: Some(shape),
            prompt_tokens,
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
