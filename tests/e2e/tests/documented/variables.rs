//! Every variable of the documentation, with its default and with another value.

use pd_e2e::{Call, Stand};
use serde_json::{Value, json};

use super::{pair, stand};

/// Setting, variable, documented default, another value, and what the setting is then.
fn table() -> Vec<(&'static str, &'static str, Value, &'static str, Value)> {
    macro_rules! row {
        ($name:literal, $variable:literal, $default:tt, $text:literal, $value:tt) => {
            ($name, $variable, json!($default), $text, json!($value))
        };
    }
    vec![
        row!(
            "promptLengthBucketing",
            "AIBRIX_PROMPT_LENGTH_BUCKETING",
            false,
            "true",
            true
        ),
        row!("bucketServe", "AIBRIX_BUCKET_SERVE", false, "true", true),
        row!(
            "bucketServeMode",
            "AIBRIX_BUCKET_SERVE_MODE",
            "throughput",
            "rps",
            "rps"
        ),
        row!(
            "prefillRequestTimeout",
            "AIBRIX_PREFILL_REQUEST_TIMEOUT",
            30.0,
            "60",
            60.0
        ),
        row!(
            "prefillScorePolicy",
            "AIBRIX_PREFILL_SCORE_POLICY",
            "prefix_cache",
            "hybrid_cache_load",
            "hybrid_cache_load"
        ),
        row!(
            "tokenLoadKVWeight",
            "AIBRIX_TOKEN_LOAD_KV_WEIGHT",
            0.3,
            "0.5",
            0.5
        ),
        row!(
            "tokenLoadRequestCost",
            "AIBRIX_TOKEN_LOAD_REQUEST_COST",
            3500.0,
            "1000",
            1000.0
        ),
        row!(
            "tokenLoadTTLSeconds",
            "AIBRIX_TOKEN_LOAD_TTL_SECONDS",
            3600.0,
            "600",
            600.0
        ),
        row!(
            "tokenLoadSessionTTLSeconds",
            "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS",
            1800.0,
            "0",
            0.0
        ),
        row!(
            "tokenLoadMaxSessions",
            "AIBRIX_TOKEN_LOAD_MAX_SESSIONS",
            100_000.0,
            "500",
            500.0
        ),
        row!(
            "hybridCacheLoadFactor",
            "AIBRIX_HYBRID_CACHE_LOAD_FACTOR",
            0.5,
            "0",
            0.0
        ),
        row!("minMatchPct", "AIBRIX_MIN_MATCH_PCT", 0.0, "45", 45.0),
        row!(
            "decodeTokenLoadOutputGrowth",
            "AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH",
            true,
            "false",
            false
        ),
        row!(
            "decodeScorePolicy",
            "AIBRIX_DECODE_SCORE_POLICY",
            "load_balancing",
            "token_load",
            "token_load"
        ),
        row!(
            "kvConnectorType",
            "AIBRIX_KV_CONNECTOR_TYPE",
            "shfs",
            "nixl",
            "nixl"
        ),
        row!(
            "prefillLoadImbalanceMinSpread",
            "AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD",
            16.0,
            "4",
            4.0
        ),
        row!(
            "decodeLoadImbalanceMinSpread",
            "AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD",
            16.0,
            "4",
            4.0
        ),
        row!(
            "decodeThroughputImbalanceMinSpread",
            "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD",
            2048.0,
            "512",
            512.0
        ),
        row!(
            "decodeScoreRatioThreshold",
            "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD",
            1.5,
            "2.5",
            2.5
        ),
        row!(
            "decodeLBWeightRunning",
            "AIBRIX_DECODE_LB_WEIGHT_RUNNING",
            1.0,
            "2",
            2.0
        ),
        row!(
            "decodeLBWeightThroughput",
            "AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT",
            1.0,
            "0.5",
            0.5
        ),
        row!("trtMachineId", "AIBRIX_TRT_MACHINE_ID", 0.0, "1023", 1023.0),
        row!(
            "trtScheduleStyle",
            "AIBRIX_TRT_SCHEDULE_STYLE",
            "context_first",
            "generation_first",
            "generation_first"
        ),
        row!(
            "decodeFirstResponseTimeout",
            "AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT",
            60.0,
            "15",
            15.0
        ),
        row!(
            "decodeResponseTimeout",
            "AIBRIX_DECODE_RESPONSE_TIMEOUT",
            0.0,
            "90",
            90.0
        ),
        row!(
            "decodeStreamIdleTimeout",
            "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT",
            120.0,
            "0",
            0.0
        ),
    ]
}

/// A setting in force; numbers as floats, so that 30 and 30.0 are the same.
async fn in_force(stand: &Stand, name: &str) -> Value {
    let knobs = stand.envoy.status().await.unwrap().knobs;
    let value = knobs.get(name).cloned().unwrap_or_default();
    value.as_f64().map_or(value, Value::from)
}

/// Variables as a Deployment lists them.
fn deployment(variables: impl Iterator<Item = (&'static str, String)>) -> String {
    let entries = variables.map(|(name, value)| json!({ "name": name, "value": value }));
    json!({ "env": entries.collect::<Vec<_>>() }).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_defaults_are_the_documented_ones() {
    let stand = stand(
        "defaults",
        pair(&[]),
        &["env: [{name: UNRELATED, value: x}]"],
    )
    .await;
    for (name, _, default, _, _) in table() {
        assert_eq!(in_force(&stand, name).await, default, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_variable_is_taken_from_envoys_environment() {
    let rows = table();
    let variables = rows.iter().map(|row| (row.1, row.3.to_owned()));
    let variables = deployment(variables);
    let stand = stand("all-variables", pair(&[]), &[&variables]).await;
    for (name, variable, _, _, value) in &rows {
        assert_eq!(in_force(&stand, name).await, *value, "{variable}");
    }
    let log = stand.envoy.log();
    for (_, variable, ..) in &rows {
        assert!(
            !log.contains(variable),
            "nothing to complain of in {variable}"
        );
    }
    let body = super::chat("served all the same");
    stand.send(body).await.expect(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_value_leaves_the_default_with_a_warning() {
    // What no setting takes, or what is outside its documented range.
    let bad = [
        (
            "promptLengthBucketing",
            "AIBRIX_PROMPT_LENGTH_BUCKETING",
            "perhaps",
        ),
        ("bucketServeMode", "AIBRIX_BUCKET_SERVE_MODE", "fair"),
        (
            "prefillRequestTimeout",
            "AIBRIX_PREFILL_REQUEST_TIMEOUT",
            "-5",
        ),
        (
            "prefillScorePolicy",
            "AIBRIX_PREFILL_SCORE_POLICY",
            "horoscope",
        ),
        ("tokenLoadKVWeight", "AIBRIX_TOKEN_LOAD_KV_WEIGHT", "0"),
        (
            "tokenLoadRequestCost",
            "AIBRIX_TOKEN_LOAD_REQUEST_COST",
            "0",
        ),
        ("tokenLoadTTLSeconds", "AIBRIX_TOKEN_LOAD_TTL_SECONDS", "0"),
        (
            "tokenLoadSessionTTLSeconds",
            "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS",
            "-1",
        ),
        (
            "tokenLoadMaxSessions",
            "AIBRIX_TOKEN_LOAD_MAX_SESSIONS",
            "many",
        ),
        (
            "hybridCacheLoadFactor",
            "AIBRIX_HYBRID_CACHE_LOAD_FACTOR",
            "1.5",
        ),
        ("minMatchPct", "AIBRIX_MIN_MATCH_PCT", "101"),
        (
            "decodeScorePolicy",
            "AIBRIX_DECODE_SCORE_POLICY",
            "horoscope",
        ),
        (
            "decodeScoreRatioThreshold",
            "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD",
            "NaN",
        ),
        (
            "decodeStreamIdleTimeout",
            "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT",
            "-0.5",
        ),
        (
            "trtScheduleStyle",
            "AIBRIX_TRT_SCHEDULE_STYLE",
            "both_first",
        ),
    ];
    let variables = bad.iter().map(|row| (row.1, row.2.to_owned()));
    let variables = deployment(variables);
    let stand = stand("bad-variables", pair(&[]), &[&variables]).await;
    let defaults = table();
    let log = stand.envoy.log();
    for (name, variable, value) in bad {
        let default = defaults.iter().find(|row| row.0 == name).unwrap();
        assert_eq!(
            in_force(&stand, name).await,
            default.2,
            "{variable}={value}"
        );
        assert!(log.contains(variable), "no warning of {variable}={value}");
    }
    stand
        .send(super::chat("served all the same"))
        .await
        .expect(200);
    assert_eq!(stand.send(Call::get("/readyz")).await.status, 200);
}
