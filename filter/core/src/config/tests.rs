use super::*;
use pd_wire::knobs::{BucketServeMode, PrefillPolicy, Strategy};
use pd_wire::profile::ModelConfig;
use serde_json::json;

fn unset(_: &str) -> Option<String> {
    None
}

fn parse(json: &Json) -> Config {
    Config::parse(json.to_string().as_bytes(), unset).unwrap()
}

fn model(json: &Json) -> ModelConfig {
    ModelConfig::parse(&json.to_string()).0.unwrap()
}

#[test]
fn nothing_given_means_all_defaults() {
    for text in ["", " \n", "{}"] {
        assert_eq!(Config::parse(text.as_bytes(), unset), Ok(Config::default()));
    }
}

#[test]
fn every_mistake_is_named_at_once_and_nothing_is_applied() {
    let text = r#"{
        "prefillRetries": 4,
        "prefillRequestTimeout": "30",
        "hybridCacheLoadFactor": 1.5,
        "decodeScorePolicy": "fastest",
        "prefil_request_timeout": 1,
        "prefill_request_timeout": 1,
        "AIBRIX_MIN_MATCH_PCT": 3,
        "controlTokens": ["my plain token"],
        "allowExplain": true,
        "allowExplain": false
    }"#;
    let variable = |name: &str| (name == "AIBRIX_TRT_MACHINE_ID").then(|| "1024".to_owned());
    let mistakes = Config::parse(text.as_bytes(), variable).unwrap_err();
    let lines: Vec<_> = mistakes.iter().map(Mistake::to_string).collect();
    assert_eq!(
        lines,
        [
            "prefillRetries: 4 is not allowed; give a whole number from 0 to 3",
            "prefillRequestTimeout: \"30\" is not allowed; give a time from 0.001 to 604800 s",
            "hybridCacheLoadFactor: 1.5 is not allowed; give a number from 0 to 1",
            "decodeScorePolicy: \"fastest\" is not allowed; give one of load_balancing, \
             least_request, conductor, token_load",
            "prefil_request_timeout: this name is not allowed; there is no such setting",
            "prefill_request_timeout: this name is not allowed; write prefillRequestTimeout",
            "AIBRIX_MIN_MATCH_PCT: this name is not allowed; write minMatchPct",
            "controlTokens: the value given (hidden) is not allowed; give a list of at most 32 \
             SHA-256 hashes, 64 hexadecimal digits each",
            "allowExplain: given twice is not allowed; give every setting once",
            "AIBRIX_TRT_MACHINE_ID: 1024 is not allowed; give a whole number from 0 to 1023",
        ]
    );
}

#[test]
fn text_that_is_no_object_is_one_mistake() {
    for text in [
        &b"["[..],
        b"[]",
        b"null",
        b"{\"a\":}",
        b"{} {}",
        b"\xff\xfe",
    ] {
        let mistakes = Config::parse(text, unset).unwrap_err();
        assert_eq!(mistakes.len(), 1);
        // The host prints "plugin config: " in front of every mistake.
        assert_eq!(mistakes[0].field, "JSON");
    }
}

#[test]
fn plugin_config_beats_variable_beats_default() {
    let variable = |name: &str| match name {
        "AIBRIX_MIN_MATCH_PCT" => Some("10".to_owned()),
        "AIBRIX_HYBRID_CACHE_LOAD_FACTOR" => Some("0".to_owned()),
        // Not consulted: the plugin config sets it.
        "AIBRIX_TRT_MACHINE_ID" => Some("4000".to_owned()),
        "AIBRIX_TOKEN_LOAD_KV_WEIGHT" => Some("-1".to_owned()),
        _ => None,
    };
    let text = json!({"minMatchPct": 20, "trtMachineId": 7, "snapshotWait": 0.5}).to_string();
    let config = Config::parse(text.as_bytes(), variable).unwrap();
    let expected = Knobs {
        min_match_pct: 20.0,
        hybrid_cache_load_factor: 0.0,
        trt_machine_id: 7,
        snapshot_wait_ms: 500,
        ..Knobs::default()
    };
    assert_eq!(*config.knobs, expected);
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].starts_with("AIBRIX_TOKEN_LOAD_KV_WEIGHT: -1 "));
}

#[test]
fn combinations_that_do_nothing_bring_a_warning() {
    let config = parse(&json!({
        "bucketServe": true,
        "prefixCacheTokenizerType": "tiktoken",
        "tokenLoadSharedLedger": false
    }));
    assert_eq!(config.warnings.len(), 3, "{:?}", config.warnings);
    assert!(!config.knobs.bucket_serve);
    let config = parse(&json!({"bucketServe": true, "promptLengthBucketing": true}));
    assert!(config.warnings.is_empty() && config.knobs.bucket_serve);
}

#[test]
fn adaptive_buckets_without_bucketing_are_off_and_said_to_be() {
    let expected = "bucketServe (AIBRIX_BUCKET_SERVE) does nothing without promptLengthBucketing \
                    (AIBRIX_PROMPT_LENGTH_BUCKETING)";
    let variable = |name: &str| (name == "AIBRIX_BUCKET_SERVE").then(|| "true".to_owned());
    for (text, bucketing) in [("{}", false), (r#"{"promptLengthBucketing": true}"#, true)] {
        let config = Config::parse(text.as_bytes(), variable).unwrap();
        assert_eq!(config.knobs.bucket_serve, bucketing);
        let warned = config.warnings.iter().any(|warning| warning == expected);
        assert_eq!(warned, !bucketing);
    }
}

#[test]
fn a_profile_switches_adaptive_buckets_off_and_never_on() {
    let model = model(&json!({"profiles": {
        "on": {"routingConfig": {"promptLengthBucketing": true, "bucketServe": true}},
        "off": {"routingConfig": {"bucketServe": false}},
        "no-buckets": {"routingConfig": {"promptLengthBucketing": false}},
        "rps": {"routingConfig": {"bucketServeMode": "rps"}}
    }}));
    let resolved = |config: &Config, profile| {
        let hints = RequestHints {
            profile: Some(profile),
            ..RequestHints::default()
        };
        let knobs = resolve(config, Some(&model), hints, true).unwrap().knobs;
        let rps = knobs.bucket_serve_mode == BucketServeMode::Rps;
        (knobs.prompt_length_bucketing, knobs.bucket_serve, rps)
    };
    let on = parse(&json!({"promptLengthBucketing": true, "bucketServe": true}));
    assert_eq!(resolved(&on, "on"), (true, true, false));
    assert_eq!(resolved(&on, "off"), (true, false, false));
    assert_eq!(resolved(&on, "no-buckets"), (false, false, false));
    assert_eq!(resolved(&on, "rps"), (true, true, true));
    let buckets_only = parse(&json!({"promptLengthBucketing": true}));
    assert_eq!(resolved(&buckets_only, "on"), (true, false, false));
    assert_eq!(resolved(&Config::default(), "on"), (false, false, false));
}

#[test]
fn the_report_lists_the_filters_settings_and_no_token() {
    let token = "AB".repeat(32);
    let report = parse(&json!({"controlTokens": [token], "prefillRequestTimeout": 1.5})).report();
    assert_eq!(report["controlTokens"], 1);
    assert_eq!(report["prefillRequestTimeout"], 1.5);
    assert_eq!(report["prefillScorePolicy"], "prefix_cache");
    assert_eq!(report["tieSeed"], Json::Null);
    assert!(!report.contains_key("redisHost"));
    let readers = KNOBS.iter().filter(|k| k.reader == Reader::Filter);
    assert_eq!(report.len(), readers.count());
}

fn strategy(
    config: &Config,
    model: Option<&ModelConfig>,
    header: Option<&str>,
    complete: bool,
) -> Result<(Strategy, StrategySource), UnknownStrategy> {
    let hints = RequestHints {
        strategy: header,
        ..RequestHints::default()
    };
    resolve(config, model, hints, complete).map(|r| (r.strategy, r.source))
}

#[test]
fn the_strongest_source_that_is_known_decides_the_strategy() {
    use Strategy::{LeastRequest, Pd, PrefixCache, Random, SessionAffinity};
    let none = Config::default();
    let config = parse(&json!({"routingAlgorithm": "random"}));
    let profile = json!({"default": {"routingStrategy": "prefix-cache"}});
    let locked = model(&json!({"lockedRoutingStrategy": "session-affinity", "profiles": profile}));
    let bad_lock = model(&json!({"lockedRoutingStrategy": "fastest", "profiles": profile}));
    let bad_profile = model(&json!({"profiles": {"default": {"routingStrategy": "fastest"}}}));

    for (config, model, header, complete, expected) in [
        (
            &config,
            Some(&locked),
            Some("fastest"),
            true,
            (SessionAffinity, StrategySource::Lock),
        ),
        (
            &config,
            Some(&bad_lock),
            Some(" pd "),
            true,
            (Pd, StrategySource::Header),
        ),
        (
            &config,
            Some(&bad_lock),
            Some("  "),
            true,
            (PrefixCache, StrategySource::Profile),
        ),
        (
            &config,
            Some(&bad_profile),
            None,
            true,
            (Random, StrategySource::Config),
        ),
        (&config, None, None, true, (Random, StrategySource::Config)),
        (
            &none,
            Some(&bad_profile),
            None,
            true,
            (Pd, StrategySource::Automatic),
        ),
        (
            &none,
            None,
            None,
            false,
            (LeastRequest, StrategySource::Automatic),
        ),
    ] {
        assert_eq!(strategy(config, model, header, complete), Ok(expected));
    }
    let error = strategy(&config, Some(&bad_lock), Some("PD"), true).unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown routing-strategy \"PD\": use one of pd, random, least-request, prefix-cache, \
         session-affinity"
    );
}

#[test]
fn a_profile_changes_the_settings_of_its_requests_only() {
    let config = parse(&json!({"minMatchPct": 5}));
    let model = model(&json!({"profiles": {
        "default": {"requestsPerSecond": 3},
        "fast": {"routingConfig": {"prefillScorePolicy": "token_load", "pd": {"minMatchPct": 30}}}
    }}));
    let with = |profile| {
        let hints = RequestHints {
            profile,
            ..RequestHints::default()
        };
        resolve(&config, Some(&model), hints, true).unwrap()
    };
    let default = with(None);
    assert!(Arc::ptr_eq(&default.knobs, &config.knobs));
    assert_eq!(
        (default.profile_name, default.requests_per_second),
        (Some("default"), 3)
    );
    let fast = with(Some(" fast "));
    assert_eq!(fast.knobs.prefill_score_policy, PrefillPolicy::TokenLoad);
    assert_eq!(fast.knobs.min_match_pct, 30.0);
    assert_eq!(
        (fast.profile_name, fast.pod_profile),
        (Some("fast"), Some("fast"))
    );
    assert_eq!(fast.requests_per_second, 0);
    // Pods may have a profile that the request-level config lacks.
    let other = with(Some("other"));
    assert_eq!(
        (other.profile_name, other.pod_profile),
        (Some("default"), Some("other"))
    );
}

#[test]
fn auto_chooses_by_size_and_falls_back_to_the_default_profile() {
    let model = model(&json!({"profiles": {
        "default": {},
        "long": {"routingConfig": {"promptTokensGte": 100}}
    }}));
    let spelt = |name, model, prompt_tokens| {
        let hints = RequestHints {
            profile: Some(name),
            prompt_tokens: Some(prompt_tokens),
            ..RequestHints::default()
        };
        let resolved = resolve(&Config::default(), model, hints, true).unwrap();
        (resolved.profile_name, resolved.pod_profile, resolved.auto)
    };
    let auto = |model, prompt_tokens| spelt("auto", model, prompt_tokens);
    assert_eq!(auto(Some(&model), 100), (Some("long"), Some("long"), true));
    for name in ["AUTO", " Auto "] {
        let found = spelt(name, Some(&model), 100);
        assert_eq!(found, (Some("long"), Some("long"), true), "{name}");
    }
    assert_eq!(auto(Some(&model), 99), (Some("default"), None, true));
    assert_eq!(auto(None, 99), (None, None, false));
}

#[test]
fn configs_survive_the_stored_form() {
    let config = model(&json!({"defaultProfile": "a", "profiles": {"a": {
        "routingStrategy": "pd",
        "requestsPerSecond": 3,
        "routingConfig": {
            "combined": true,
            "promptLenBucketMinLength": 5,
            "promptTokensLt": 9,
            "decodeScorePolicy": "conductor",
            "bucketServe": false,
            "pd": {"minMatchPct": 12.5, "maxDecodePerPod": 4}
        }
    }, "b": {}}}));
    let stored = postcard::to_allocvec(&config).unwrap();
    assert_eq!(
        postcard::from_bytes::<ModelConfig>(&stored).unwrap(),
        config
    );
}
