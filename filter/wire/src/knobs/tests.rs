use super::*;
use serde_json::json;
use std::collections::{BTreeSet, HashMap};

/// A value just inside each end of the range, and values just outside.
fn edges(kind: &Kind) -> (Vec<serde_json::Value>, Vec<serde_json::Value>) {
    match *kind {
        Kind::Bool => (
            vec![json!(true), json!(false)],
            vec![json!(1), json!("true")],
        ),
        Kind::Integer { min, max } => {
            let mut outside = vec![json!(-1), json!(min as f64 + 0.5), json!("1"), json!(1e300)];
            outside.extend(min.checked_sub(1).map(|n| json!(n)));
            outside.extend(max.checked_add(1).map(|n| json!(n)));
            (vec![json!(min), json!(max)], outside)
        }
        Kind::Number { min, max } | Kind::Duration { min, max, .. } => (
            vec![json!(min), json!(max), json!(((min + max) / 2.0).floor())],
            vec![json!(min - 0.0005), json!(max + 0.5), json!("1"), json!(-1)],
        ),
        Kind::Positive { max } => (
            vec![json!(1e-9), json!(max)],
            vec![json!(0), json!(-1), json!(max * 2.0), json!("1")],
        ),
        Kind::Choice(names) => (
            names.iter().map(|n| json!(n)).collect(),
            vec![
                json!(""),
                json!("other"),
                json!(names[0].to_uppercase()),
                json!(1),
            ],
        ),
        Kind::Text | Kind::Secret => (
            vec![json!(""), json!("x".repeat(1024))],
            vec![json!("x".repeat(1025)), json!(1)],
        ),
        Kind::Hashes => (
            vec![
                json!([]),
                json!(["Ab".repeat(32)]),
                json!(vec!["ab".repeat(32); 32]),
            ],
            vec![
                json!("ab".repeat(32)),
                json!(["ab".repeat(31)]),
                json!(["zz".repeat(32)]),
                json!([1]),
                json!(vec!["ab".repeat(32); 33]),
            ],
        ),
    }
}

#[test]
fn every_knob_accepts_its_range_and_nothing_else() {
    for knob in KNOBS {
        let (inside, outside) = edges(&knob.kind);
        for json in inside {
            let value = knob.kind.parse_json(&json);
            let value = value.unwrap_or_else(|| panic!("{} refuses {json}", knob.name));
            let mut knobs = Knobs::default();
            assert!(knobs.set(knob.name, &value), "{} {json}", knob.name);
            if !knob.kind.is_hidden() && json != "" {
                assert_eq!(knobs.get(knob.name), Some(value), "{}", knob.name);
            }
        }
        for json in outside.into_iter().chain([json!(null), json!({})]) {
            assert_eq!(
                knob.kind.parse_json(&json),
                None,
                "{} takes {json}",
                knob.name
            );
        }
    }
}

#[test]
fn every_knob_keeps_its_value_when_given_another_type() {
    for knob in KNOBS {
        for value in [
            Value::Bool(true),
            Value::Integer(u64::MAX),
            Value::Number(f64::NAN),
            Value::Number(f64::INFINITY),
            Value::Text("x".repeat(2000)),
            Value::List(vec!["x".into()]),
        ] {
            if !knob.kind.accepts(&value) {
                let mut knobs = Knobs::default();
                assert!(!knobs.set(knob.name, &value), "{} {value:?}", knob.name);
                assert_eq!(knobs, Knobs::default());
            }
        }
    }
}

#[test]
fn defaults_lie_in_their_ranges() {
    let knobs = Knobs::default();
    for knob in KNOBS.iter().filter(|knob| !knob.kind.is_hidden()) {
        if let Some(value) = knobs.get(knob.name) {
            assert!(knob.kind.accepts(&value), "{}: {value:?}", knob.name);
        }
    }
}

#[test]
fn names_variables_and_fields_are_unique() {
    let unique = |of: &dyn Fn(&Knob) -> Option<&'static str>| {
        let all: Vec<_> = KNOBS.iter().filter_map(of).collect();
        let set: BTreeSet<_> = all.iter().collect();
        assert_eq!(set.len(), all.len());
    };
    unique(&|knob| Some(knob.name));
    unique(&|knob| knob.variable);
    unique(&|knob| knob.profile);
}

/// The variables AIBrix documents and their defaults there.
const AIBRIX: &[(&str, &str)] = &[
    ("AIBRIX_PROMPT_LENGTH_BUCKETING", "false"),
    ("AIBRIX_BUCKET_SERVE", "false"),
    ("AIBRIX_BUCKET_SERVE_MODE", "\"throughput\""),
    ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "30"),
    ("AIBRIX_PREFILL_SCORE_POLICY", "\"prefix_cache\""),
    ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "0.3"),
    ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "3500"),
    ("AIBRIX_TOKEN_LOAD_TTL_SECONDS", "3600"),
    ("AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS", "1800"),
    ("AIBRIX_TOKEN_LOAD_MAX_SESSIONS", "100000"),
    ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "0.5"),
    ("AIBRIX_MIN_MATCH_PCT", "0"),
    ("AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH", "true"),
    ("AIBRIX_TOKEN_LOAD_SHARED_LEDGER", "true"),
    ("AIBRIX_DECODE_SCORE_POLICY", "\"load_balancing\""),
    ("AIBRIX_KV_CONNECTOR_TYPE", "\"shfs\""),
    ("AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD", "16"),
    ("AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD", "16"),
    ("AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD", "2048"),
    ("AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", "1.5"),
    ("AIBRIX_DECODE_LB_WEIGHT_RUNNING", "1"),
    ("AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", "1"),
    ("AIBRIX_TRT_MACHINE_ID", "0"),
    ("AIBRIX_TRT_SCHEDULE_STYLE", "\"context_first\""),
    ("AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", "60"),
    ("AIBRIX_DECODE_RESPONSE_TIMEOUT", "0"),
    ("AIBRIX_DECODE_STREAM_IDLE_TIMEOUT", "120"),
    ("AIBRIX_DECODE_ABORT_TIMEOUT", "3"),
    ("AIBRIX_DECODE_ABORT_RETRY_DELAY", "2"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
    ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "200000"),
    ("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", "20"),
    ("AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS", "1"),
    ("AIBRIX_PREFIX_CACHE_HASH_SEED", "unset"),
    ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "2"),
    ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "\"character\""),
    ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "200"),
    ("ROUTING_ALGORITHM", "unset"),
    ("REDIS_HOST", "unset"),
    ("REDIS_PORT", "6379"),
    ("REDIS_PASSWORD", "unset"),
];

#[test]
fn all_variables_of_aibrix_exist_with_its_defaults() {
    let ours: Vec<_> = KNOBS
        .iter()
        .filter_map(|knob| {
            let value = Knobs::default().get(knob.name);
            let shown = value.map_or("unset".into(), |v| v.to_json().to_string());
            Some((knob.variable?, shown))
        })
        .collect();
    for (variable, default) in AIBRIX {
        let found = ours.iter().find(|(name, _)| name == variable);
        assert_eq!(found.map(|(_, d)| d.as_str()), Some(*default), "{variable}");
    }
    assert_eq!(ours.len(), AIBRIX.len());
}

fn variables(reader: Reader, set: &[(&str, &str)]) -> (Knobs, Variables) {
    let set: HashMap<_, _> = set.iter().copied().collect();
    let mut knobs = Knobs::default();
    let wrong = knobs.apply_variables(
        reader,
        |name| name == "minMatchPct",
        |name| set.get(name).map(|text| (*text).to_owned()),
    );
    (knobs, wrong)
}

#[test]
fn variables_are_read_in_every_spelling_of_aibrix() {
    let (knobs, wrong) = variables(
        Reader::Filter,
        &[
            ("AIBRIX_BUCKET_SERVE_MODE", "RPS"),
            ("AIBRIX_DECODE_SCORE_POLICY", " Token_Load "),
            ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "0.25"),
            ("AIBRIX_DECODE_RESPONSE_TIMEOUT", "0"),
            ("AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS", "1.5"),
            ("AIBRIX_PREFIX_CACHE_HASH_SEED", "18446744073709551615"),
            ("AIBRIX_MIN_MATCH_PCT", "not consulted"),
            ("ROUTING_ALGORITHM", ""),
            ("REDIS_HOST", "for the agent"),
        ],
    );
    let expected = Knobs {
        bucket_serve_mode: BucketServeMode::Rps,
        decode_score_policy: DecodePolicy::TokenLoad,
        prefill_request_timeout_ms: 250,
        decode_response_timeout_ms: 0,
        prefix_cache_eviction_duration_ms: 90_000,
        prefix_cache_hash_seed: Some(u64::MAX),
        ..Knobs::default()
    };
    assert_eq!((knobs, wrong), (expected, Variables::default()));
}

#[test]
fn booleans_are_those_of_go() {
    for (texts, value) in [
        (["1", "t", "T", "TRUE", "true", "True"], true),
        (["0", "f", "F", "FALSE", "false", "False"], false),
    ] {
        for text in texts {
            assert_eq!(
                Kind::Bool.parse_text(text),
                Some(Value::Bool(value)),
                "{text}"
            );
        }
    }
    for text in ["yes", "on", "tRUE", "2", "-1"] {
        assert_eq!(Kind::Bool.parse_text(text), None, "{text}");
    }
}

#[test]
fn a_bad_variable_warns_once_and_the_default_stands() {
    let bad = [
        ("AIBRIX_PROMPT_LENGTH_BUCKETING", "yes"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "0"),
        ("AIBRIX_DECODE_STREAM_IDLE_TIMEOUT", "-1"),
        ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "0"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "1.01"),
        ("AIBRIX_DECODE_LB_WEIGHT_RUNNING", "NaN"),
        ("AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", "inf"),
        ("AIBRIX_PREFILL_SCORE_POLICY", "fastest"),
        ("AIBRIX_DECODE_SCORE_POLICY", "fastest"),
        ("ROUTING_ALGORITHM", "least-latency"),
        ("AIBRIX_TRT_MACHINE_ID", "-1"),
        ("AIBRIX_TRT_SCHEDULE_STYLE", "both"),
    ];
    let (knobs, wrong) = variables(Reader::Filter, &bad);
    assert_eq!(knobs, Knobs::default());
    assert_eq!(wrong.refused, []);
    for (variable, value) in bad {
        let found: Vec<_> = wrong
            .warnings
            .iter()
            .filter(|w| w.field == variable)
            .collect();
        assert_eq!(found.len(), 1, "{variable}");
        assert_eq!(found[0].value, value);
        assert!(!found[0].allowed.is_empty());
    }
}

#[test]
fn a_machine_id_that_does_not_fit_is_refused() {
    for id in ["1024", "1e9", "99999999999999999999"] {
        let (_, wrong) = variables(Reader::Filter, &[("AIBRIX_TRT_MACHINE_ID", id)]);
        assert_eq!(wrong.refused.len(), 1, "{id}");
        assert_eq!(
            wrong.refused[0].to_string(),
            format!(
                "AIBRIX_TRT_MACHINE_ID: {id} is not allowed; give a whole number from 0 to 1023"
            )
        );
    }
    let (knobs, wrong) = variables(Reader::Filter, &[("AIBRIX_TRT_MACHINE_ID", "1023")]);
    assert_eq!((knobs.trt_machine_id, wrong), (1023, Variables::default()));
}

#[test]
fn the_agent_reads_its_own_variables_and_shows_no_password() {
    let (knobs, wrong) = variables(
        Reader::Agent,
        &[
            ("REDIS_HOST", "redis.local"),
            ("REDIS_PORT", "70000"),
            ("REDIS_PASSWORD", " s3cret "),
            ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "50"),
            ("AIBRIX_BUCKET_SERVE", "true"),
        ],
    );
    assert_eq!(&*knobs.redis_host, "redis.local");
    assert_eq!(knobs.redis_password.expose(), " s3cret ");
    assert_eq!(knobs.pod_metric_refresh_interval_ms, 50);
    assert!(!knobs.bucket_serve);
    assert_eq!(wrong.warnings.len(), 1);
    assert_eq!(knobs.get("redisPassword"), None);
    assert!(!format!("{knobs:?}").contains("s3cret"));
}

#[test]
fn a_time_above_zero_never_becomes_off() {
    let mut knobs = Knobs::default();
    assert!(knobs.set("decodeStreamIdleTimeout", &Value::Number(0.0001)));
    assert_eq!(knobs.decode_stream_idle_timeout_ms, 1);
    assert!(knobs.set("decodeStreamIdleTimeout", &Value::Number(0.0)));
    assert_eq!(knobs.decode_stream_idle_timeout_ms, 0);
    assert!(knobs.set("decodeStreamIdleTimeout", &Value::Number(1.1)));
    assert_eq!(knobs.decode_stream_idle_timeout_ms, 1100);
}

#[test]
fn whole_numbers_may_be_written_as_floats() {
    let kind = Knob::find("tokenLoadMaxSessions").unwrap().kind;
    assert_eq!(
        kind.parse_json(&json!(1e6)),
        Some(Value::Integer(1_000_000))
    );
    assert_eq!(kind.parse_json(&json!(1.5)), None);
}

fn overrides(values: &[(&str, Value)]) -> Overrides {
    let mut overrides = Overrides::default();
    for (name, value) in values {
        assert!(
            overrides.set(Knob::find(name).unwrap(), value.clone()),
            "{name}"
        );
    }
    overrides
}

#[test]
fn a_profile_overrides_what_it_may_and_nothing_else() {
    let base = Knobs {
        prompt_length_bucketing: true,
        bucket_serve: true,
        ..Knobs::default()
    };
    assert_eq!(base.with(&Overrides::default()), base);
    for knob in KNOBS {
        let (inside, _) = edges(&knob.kind);
        let value = knob.kind.parse_json(&inside[0]).unwrap();
        let mut overrides = Overrides::default();
        assert_eq!(
            overrides.set(knob, value.clone()),
            knob.profile.is_some(),
            "{}",
            knob.name
        );
        if knob.profile.is_some() {
            assert_eq!(
                base.with(&overrides).get(knob.name),
                Some(value),
                "{}",
                knob.name
            );
        }
    }
}

#[test]
fn overrides_of_another_version_are_left_out() {
    let text = r#"[["noSuchKnob",{"bool":true}],["prefillRetries",{"integer":4}],
        ["prefillRetries",{"text":"1"}],["maxOrphans",{"integer":5}],["minMatchPct",{"number":20.0}]]"#;
    let foreign: Overrides = serde_json::from_str(text).unwrap();
    let expected = Knobs {
        min_match_pct: 20.0,
        ..Knobs::default()
    };
    assert_eq!(Knobs::default().with(&foreign), expected);
}

#[test]
fn bucketing_and_adaptive_buckets_are_switched_off_by_a_profile_but_not_on() {
    let on = overrides(&[
        ("promptLengthBucketing", Value::Bool(true)),
        ("bucketServe", Value::Bool(true)),
    ]);
    let off = overrides(&[("promptLengthBucketing", Value::Bool(false))]);
    let without = Knobs::default();
    let with = Knobs {
        prompt_length_bucketing: true,
        bucket_serve: true,
        ..Knobs::default()
    };
    assert_eq!(without.with(&on), without);
    assert_eq!(with.with(&off), without);
    assert_eq!(with.with(&on), with);
    let buckets_only = Knobs {
        bucket_serve: false,
        ..with
    };
    assert_eq!(buckets_only.with(&on), buckets_only);
}

#[test]
fn an_unknown_decode_policy_is_kept_and_an_unknown_prefill_policy_is_not() {
    let unknown = overrides(&[("decodeScorePolicy", Value::Text("fastest".into()))]);
    let knobs = Knobs::default().with(&unknown);
    assert_eq!(knobs.invalid_decode_policy.as_deref(), Some("fastest"));
    let prefill = Knob::find("prefillScorePolicy").unwrap();
    assert!(!Overrides::default().set(prefill, Value::Text("fastest".into())));
}

#[test]
fn excerpts_are_short_and_printable() {
    assert_eq!(excerpt("a\r\nb"), "a  b");
    let long = excerpt(&"é".repeat(81));
    assert_eq!(long.chars().count(), 81);
    assert!(long.ends_with('…'));
}
