use super::*;
use crate::knobs::{DecodePolicy, KNOBS, Knobs, PrefillPolicy};
use serde_json::json;

fn parse(text: &str) -> ModelConfig {
    let (config, warnings) = ModelConfig::parse(text);
    assert_eq!(warnings, Vec::<String>::new());
    config.unwrap()
}

/// Config and warnings of one profile with this `routingConfig`.
fn routing_config(json: serde_json::Value) -> (Profile, Vec<String>) {
    let text = json!({"profiles": {"default": {"routingConfig": json}}}).to_string();
    let (config, warnings) = ModelConfig::parse(&text);
    (config.unwrap().profiles["default"].clone(), warnings)
}

#[test]
fn the_snippets_of_the_aibrix_documentation_parse() {
    let combined = parse(
        r#"
      {
        "profiles": {
          "default": {
            "routingStrategy": "pd",
            "routingConfig": { "combined": true }
          }
        }
      }
"#,
    );
    let profile = combined.profile(None).unwrap();
    assert_eq!(profile.routing_strategy.as_deref(), Some("pd"));
    assert!(profile.combined && profile.knobs.is_empty());
    assert!(profile.takes(0) && profile.takes(u64::MAX));

    let range = parse(
        r#"
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "promptLenBucketMinLength": 0,
            "promptLenBucketMaxLength": 2048
          }
        }
      }
    }
"#,
    );
    let profile = range.profile(None).unwrap();
    assert!(profile.takes(0) && profile.takes(2048) && !profile.takes(2049));
    assert!(!profile.combined);

    let overflow = parse(
        r#"
      {
        "profiles": {
          "default": {
            "routingStrategy": "pd",
            "routingConfig": {
              "combined": true,
              "promptLenBucketMinLength": 2048
            }
          }
        }
      }
"#,
    );
    let profile = overflow.profile(None).unwrap();
    assert!(profile.combined && !profile.takes(2047) && profile.takes(2048));

    let conductor = parse(
        r#"
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "prefillScorePolicy": "conductor",
            "decodeScorePolicy": "conductor"
          }
        }
      }
    }
"#,
    );
    let knobs = Knobs::default().with(&conductor.profile(None).unwrap().knobs);
    assert_eq!(knobs.prefill_score_policy, PrefillPolicy::Conductor);
    assert_eq!(knobs.decode_score_policy, DecodePolicy::Conductor);

    for (name, policy) in [
        ("token_load", PrefillPolicy::TokenLoad),
        ("hybrid_cache_load", PrefillPolicy::HybridCacheLoad),
    ] {
        let config = parse(
            &r#"
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "prefillScorePolicy": "NAME"
          }
        }
      }
    }
"#
            .replace("NAME", name),
        );
        let knobs = Knobs::default().with(&config.profile(None).unwrap().knobs);
        assert_eq!(knobs.prefill_score_policy, policy);
    }
}

#[test]
fn every_threshold_under_pd_is_read() {
    let (profile, warnings) = routing_config(json!({
        "promptLengthBucketing": false,
        "bucketServe": true,
        "bucketServeMode": "rps",
        "prefillFallback": "strict",
        "prefixCache": {"standardDeviationFactor": 3},
        "pd": {
            "prefillRequestTimeout": 12.5,
            "prefillLoadImbalanceMinSpread": 1,
            "decodeLoadImbalanceMinSpread": 2.5,
            "decodeThroughputImbalanceMinSpread": 3,
            "decodeScoreRatioThreshold": 4,
            "decodeLBWeightRunning": 5,
            "decodeLBWeightThroughput": 6,
            "tokenLoadKVWeight": 0.7,
            "tokenLoadRequestCost": 8,
            "tokenLoadTTLSeconds": 9,
            "tokenLoadSessionTTLSeconds": 0,
            "hybridCacheLoadFactor": 0,
            "minMatchPct": 12,
            "decodeAbortTimeout": 0,
            "decodeAbortRetryDelay": 14,
            "decodeFirstResponseTimeout": 15,
            "decodeResponseTimeout": 16,
            "decodeStreamIdleTimeout": 0.5,
            "prefillTimeoutPerKiloToken": 1,
            "prefillRetries": 0,
            "localPrefillMaxTokens": 64,
            "maxPrefillPerPod": 2,
            "maxDecodePerPod": 3
        }
    }));
    assert_eq!(warnings, Vec::<String>::new());
    let set: Vec<_> = profile.knobs.iter().map(|(name, _)| name).collect();
    let missing: Vec<_> = KNOBS
        .iter()
        .filter(|k| k.profile.is_some() && !set.contains(&k.name))
        .map(|k| k.name)
        .collect();
    assert_eq!(missing, ["prefillScorePolicy", "decodeScorePolicy"]);
    let knobs = Knobs::default().with(&profile.knobs);
    assert_eq!(knobs.prefill_request_timeout_ms, 12_500);
    assert_eq!(knobs.decode_stream_idle_timeout_ms, 500);
    assert_eq!(knobs.token_load_session_ttl_ms, 0);
    assert_eq!(knobs.prefix_cache_standard_deviation_factor, 3);
    assert!(knobs.hybrid_cache_load_factor.abs() < f64::EPSILON);
}

#[test]
fn text_without_a_config_counts_as_no_annotation() {
    for blank in ["", "  \n\t "] {
        assert_eq!(ModelConfig::parse(blank), (None, vec![]));
    }
    for bad in [
        "{",
        "[]",
        "null",
        "\"pd\"",
        "{}",
        r#"{"profiles":{}}"#,
        "{\"a\":1}}",
    ] {
        let (config, warnings) = ModelConfig::parse(bad);
        assert_eq!((config, warnings.len()), (None, 1), "{bad}");
    }
}

#[test]
fn a_lock_holds_without_profiles() {
    for text in [
        r#"{"lockedRoutingStrategy": " pd "}"#,
        r#"{"lockedRoutingStrategy": "pd", "profiles": {}}"#,
        r#"{"lockedRoutingStrategy": "pd", "profiles": null}"#,
    ] {
        let config = parse(text);
        assert_eq!(config.locked_routing_strategy.as_deref(), Some("pd"));
        assert_eq!(config.profile(Some("x")), None);
    }
}

#[test]
fn one_bad_field_costs_that_field_only() {
    let (profile, warnings) = routing_config(json!({
        "combined": "true",
        "promptLenBucketMinLength": "10",
        "promptLenBucketMaxLength": 2048,
        "prefillScorePolicy": "fastest",
        "bucketServeMode": "RPS",
        "promptTokensGte": -1,
        "pd": {"minMatchPct": 101, "prefillRequestTimeout": 0, "decodeResponseTimeout": 20, "futureField": 1},
        "minMatchPct": 20,
        "futureField": {},
    }));
    let expected = Profile {
        prompt_max: Some(2048),
        knobs: serde_json::from_value(json!([["decodeResponseTimeout", {"number": 20.0}]]))
            .unwrap(),
        ..Profile::default()
    };
    assert_eq!(profile, expected);
    let at = |field: &str| {
        let field = format!("profiles.default.routingConfig.{field}: ");
        warnings.iter().filter(|w| w.starts_with(&field)).count()
    };
    for field in [
        "combined",
        "promptLenBucketMinLength",
        "prefillScorePolicy",
        "bucketServeMode",
        "promptTokensGte",
        "pd.minMatchPct",
        "pd.prefillRequestTimeout",
        "minMatchPct",
        "futureField",
        "pd.futureField",
    ] {
        assert_eq!(at(field), 1, "{field}: {warnings:#?}");
    }
    assert_eq!(warnings.len(), 10);
}

#[test]
fn members_that_do_not_exist_are_named_with_what_was_probably_meant() {
    let (config, warnings) = ModelConfig::parse(
        r#"{"defaultProfil": "a", "combined": true, "profiles": {"a": {
            "routingStrategie": "pd", "combined": true, "defaultProfile": "a",
            "routingConfig": {
                "prefilScorePolicy": "token_load", "requestsPerSecond": 3, "somethingElse": 1,
                "absent": null, "loadBalance": {"queuedWeight": 1}, "preble": {}, "vtc": {},
                "autoBlend": {},
                "pd": {"minMatchPtc": 1, "combined": true},
                "prefixCache": {"standardDeviationfactor": 2}}}}}"#,
    );
    let config = config.unwrap();
    assert_eq!(config.profiles["a"], Profile::default());
    let no = "there is no such member, it does nothing";
    let mut expected = [
        format!("combined: {no}; a profile has it, give it as routingConfig.combined there"),
        format!("defaultProfil: {no}; did you mean defaultProfile?"),
        format!(
            "profiles.a.combined: {no}; a profile has it, give it as routingConfig.combined there"
        ),
        format!(
            "profiles.a.defaultProfile: {no}; defaultProfile belongs at the top of the annotation"
        ),
        format!("profiles.a.routingStrategie: {no}; did you mean routingStrategy?"),
        format!(
            "profiles.a.routingConfig.prefilScorePolicy: {no}; did you mean prefillScorePolicy?"
        ),
        format!(
            "profiles.a.routingConfig.requestsPerSecond: {no}; a profile has it, give it as requestsPerSecond there"
        ),
        format!("profiles.a.routingConfig.somethingElse: {no}"),
        format!(
            "profiles.a.routingConfig.pd.combined: {no}; a profile has it, give it as routingConfig.combined there"
        ),
        format!("profiles.a.routingConfig.pd.minMatchPtc: {no}; did you mean minMatchPct?"),
        format!(
            "profiles.a.routingConfig.prefixCache.standardDeviationfactor: {no}; did you mean standardDeviationFactor?"
        ),
    ];
    expected.sort();
    let mut sorted = warnings;
    sorted.sort();
    assert_eq!(sorted, expected);
}

#[test]
fn a_misspelt_profiles_says_why_the_annotation_is_ignored() {
    let (config, warnings) = ModelConfig::parse(r#"{"profile": {"default": {}}}"#);
    assert_eq!(config, None);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("profile: ") && warnings[0].ends_with("profiles?"));
}

#[test]
fn of_many_unknown_members_only_the_first_are_named() {
    let many: serde_json::Map<_, _> = (0..30)
        .map(|n| (format!("unknown{n:02}"), json!(n)))
        .collect();
    let (_, warnings) = routing_config(json!({"pd": many}));
    assert_eq!(warnings.len(), 9, "{warnings:?}");
    assert_eq!(
        warnings[8],
        "profiles.default.routingConfig.pd: 22 more members do not exist"
    );
}

#[test]
fn wrong_types_above_the_fields_are_reported() {
    let (config, warnings) = ModelConfig::parse(
        r#"{"lockedRoutingStrategy": 1, "defaultProfile": [], "profiles": {
            "a": 1, "b": {"routingStrategy": {}, "routingConfig": 2, "requestsPerSecond": -3},
            "c": {"requestsPerSecond": 5000000000, "routingConfig": {"pd": [], "prefixCache": 1}}}}"#,
    );
    let config = config.unwrap();
    assert_eq!(config.profiles.keys().collect::<Vec<_>>(), ["b", "c"]);
    assert_eq!(config.profiles["b"], Profile::default());
    assert_eq!(config.profiles["c"].requests_per_second, u32::MAX);
    assert_eq!(warnings.len(), 8, "{warnings:#?}");
}

#[test]
fn prompt_ranges_have_a_defined_outcome() {
    // (min, max) -> lengths that match, and whether a warning says so.
    for (min, max, takes, refuses, warned) in [
        (json!(-5), json!(10), vec![0, 10], vec![11], false),
        (json!(5), json!(0), vec![5, u64::MAX], vec![4], false),
        (json!(null), json!(null), vec![0, u64::MAX], vec![], false),
        (json!(7), json!(7), vec![7], vec![6, 8], false),
        (json!(10), json!(5), vec![], vec![0, 5, 7, 10], true),
        (json!(0), json!(-1), vec![], vec![0, 1], true),
        (
            json!(1e3),
            json!(2e3),
            vec![1000, 2000],
            vec![999, 2001],
            false,
        ),
    ] {
        let (profile, warnings) = routing_config(json!({
            "promptLenBucketMinLength": min, "promptLenBucketMaxLength": max
        }));
        assert_eq!(!warnings.is_empty(), warned, "{min} {max}");
        for length in takes {
            assert!(profile.takes(length), "{min} {max} {length}");
        }
        for length in refuses {
            assert!(!profile.takes(length), "{min} {max} {length}");
        }
    }
}

#[test]
fn decode_policies_are_read_in_any_case_and_unknown_ones_fail_requests() {
    let (profile, warnings) = routing_config(json!({"decodeScorePolicy": " Least_Request "}));
    assert!(warnings.is_empty());
    let knobs = Knobs::default().with(&profile.knobs);
    assert_eq!(knobs.decode_score_policy, DecodePolicy::LeastRequest);

    let (profile, warnings) = routing_config(json!({"decodeScorePolicy": "fastest"}));
    assert!(warnings[0].contains("503") && warnings[0].contains("fastest"));
    let knobs = Knobs::default().with(&profile.knobs);
    assert_eq!(knobs.invalid_decode_policy.as_deref(), Some("fastest"));

    let (profile, warnings) = routing_config(json!({"decodeScorePolicy": ""}));
    assert!(profile.knobs.is_empty() && warnings.is_empty());
}

#[test]
fn a_profile_that_switches_bucketing_on_is_told_that_it_cannot() {
    let (_, warnings) = routing_config(json!({"promptLengthBucketing": true}));
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("off, not on"));
}

#[test]
fn profiles_are_found_by_name_then_by_default() {
    let config = parse(
        r#"{"defaultProfile": "b", "profiles": {"a": {"requestsPerSecond": 1}, "b": {"requestsPerSecond": 2}}}"#,
    );
    let rate = |name| config.profile(name).unwrap().requests_per_second;
    assert_eq!((rate(Some("a")), rate(Some("x")), rate(None)), (1, 2, 2));

    let text = r#"{"defaultProfile": "x", "profiles": {"default": {}}}"#;
    let (config, warnings) = ModelConfig::parse(text);
    assert_eq!(config.unwrap().profile(None), None);
    assert_eq!(warnings.len(), 1);
}

#[test]
fn auto_prefers_more_hints_then_narrower_ones_then_names() {
    let config = parse(
        r#"{"profiles": {
            "default": {},
            "long": {"routingConfig": {"promptTokensGte": 1000}},
            "longer": {"routingConfig": {"promptTokensGte": 2000}},
            "z-mid": {"routingConfig": {"promptTokensGte": 1000, "promptTokensLt": 1500}},
            "a-mid": {"routingConfig": {"promptTokensGte": 1000, "promptTokensLt": 1500}},
            "chatty": {"routingConfig": {"promptTokensLt": 1000, "maxTokensGte": 500}},
            "terse": {"routingConfig": {"promptTokensLt": 1000, "maxTokensLt": 500}}
        }}"#,
    );
    let auto = |prompt, max| config.auto_profile(prompt, max).map(|(name, _)| name);
    assert_eq!(auto(Some(1600), None), Some("long"));
    assert_eq!(auto(Some(2000), None), Some("longer"));
    assert_eq!(auto(Some(1499), None), Some("a-mid"));
    assert_eq!(auto(Some(1500), None), Some("long"));
    assert_eq!(auto(Some(10), Some(500)), Some("chatty"));
    assert_eq!(auto(Some(10), Some(499)), Some("terse"));
    assert_eq!(auto(Some(10), None), None);
    assert_eq!(auto(None, None), None);
}

#[test]
fn configs_survive_json() {
    let config = parse(
        r#"{"lockedRoutingStrategy": "pd", "profiles": {"default": {"routingStrategy": "pd",
            "requestsPerSecond": 3, "routingConfig": {"combined": true, "promptTokensLt": 9,
            "promptLenBucketMaxLength": 7, "decodeScorePolicy": "conductor",
            "pd": {"minMatchPct": 12.5, "maxDecodePerPod": 4}}}}}"#,
    );
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), config);
}
