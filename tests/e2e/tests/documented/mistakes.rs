//! Bad annotations and headers: a defined outcome for each, and service goes on.

use std::time::Duration;

use pd_e2e::{Answer, Pod, Stand};

use super::policies::scores;
use super::{BUCKETING, DECODE, PREFILL, chat, chat_with, served_by_pair, stand, text};

/// The annotation with this text.
fn annotation(config: &str) -> String {
    let lines: Vec<String> = config.lines().map(|line| format!("    {line}")).collect();
    format!(
        "annotations:\n  model.aibrix.ai/config: |\n{}\n",
        lines.join("\n")
    )
}

/// A pair that serves a model of its own under this annotation: `MODEL-prefill-0`,
/// `MODEL-decode-0`.
fn model(name: &str, config: &str) -> Vec<Pod> {
    let pod = |role: &str, template: &str| {
        let pod = Pod::documented(
            &format!("{name}-{role}-0"),
            &[template, &annotation(config)],
        );
        pod.in_roleset(name).model(name)
    };
    vec![pod("prefill", PREFILL), pod("decode", DECODE)]
}

/// A request for a model that must be served by its pair.
async fn served(stand: &Stand, model: &str) -> Answer {
    let answer = stand.send(chat_with(model, "still served?")).await;
    let answer = answer.expect(200);
    let (prefill, _) = served_by_pair(stand, &answer);
    assert_eq!(prefill, format!("{model}-prefill-0"));
    answer
}

/// Everything that the agent and the filter have logged.
fn logs(stand: &Stand) -> String {
    let agent = stand.agent.as_ref().map(pd_e2e::Agent::log);
    agent.unwrap_or_default() + &stand.envoy.log()
}

/// A warning that names all of these words.
fn assert_warned(stand: &Stand, words: &[&str]) {
    let logs = logs(stand);
    let found = logs.lines().find(|line| {
        let low = line.to_lowercase();
        low.contains("warn") && words.iter().all(|word| line.contains(word))
    });
    assert!(found.is_some(), "no warning with {words:?} in:\n{logs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_annotation_that_is_not_json_counts_as_none() {
    let mut pods = Vec::new();
    let broken = [
        (
            "cut",
            r#"{ "profiles": { "default": { "routingStrategy": "pd" }"#,
        ),
        ("text", "pd please"),
        ("number", "7"),
        ("list", r#"[{ "profiles": {} }]"#),
        ("empty-object", "{}"),
        ("typed", r#"{ "profiles": 3 }"#),
    ];
    for (name, config) in broken {
        pods.extend(model(name, config));
    }
    pods.extend(model(
        "good",
        r#"{ "profiles": { "default": { "routingStrategy": "pd" } } }"#,
    ));
    let stand = stand("not-json", pods, &[BUCKETING]).await;
    for (name, _) in broken {
        served(&stand, name).await;
    }
    served(&stand, "good").await;
    for name in ["cut", "text", "number", "list", "typed"] {
        assert_warned(&stand, &[&format!("{name}-decode-0")]);
    }
    assert!(
        !logs(&stand).contains("good-decode-0: "),
        "nothing is wrong with it"
    );
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_prefill_policy_keeps_the_configured_one_and_an_unknown_decode_policy_is_an_error()
 {
    let mut pods = model(
        "prefill",
        r#"{ "profiles": { "default": { "routingStrategy": "pd", "routingConfig": { "prefillScorePolicy": "horoscope" } } } }"#,
    );
    pods.extend(model(
        "decode",
        r#"{ "profiles": {
          "default": { "routingStrategy": "pd", "routingConfig": { "decodeScorePolicy": "tea_leaves" } },
          "good": { "routingStrategy": "pd", "routingConfig": { "decodeScorePolicy": " Least_Request " } } } }"#,
    ));
    let variable = "env: [{name: AIBRIX_PREFILL_SCORE_POLICY, value: hybrid_cache_load}]";
    let stand = stand("policies", pods, &[variable]).await;
    // An idle pod scores 1 under the policy of the variable, 10 under the default one.
    let answer = served(&stand, "prefill").await;
    let found = scores(&answer, "prefill");
    assert!(found.values().eq(&[1.0]), "{found:?}");
    assert_warned(&stand, &["horoscope"]);

    let answer = stand.send(chat_with("decode", "tell me")).await.expect(503);
    assert_eq!(answer.header("x-error-routing"), "true");
    let message = answer.json()["error"]["message"].to_string();
    println!("{message}");
    assert!(message.contains("tea_leaves"), "{message}");
    let call = chat_with("decode", "tell me").header("config-profile", "good");
    served_by_pair(&stand, &stand.send(call).await.expect(200));
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_range_matches_nothing_and_a_negative_end_is_none() {
    let range = |min: i64, max: i64| {
        format!(
            r#"{{ "profiles": {{ "default": {{ "routingStrategy": "pd", "routingConfig": {{
            "promptLenBucketMinLength": {min}, "promptLenBucketMaxLength": {max} }} }} }} }}"#
        )
    };
    let mut pods = model("empty", &range(4096, 1024));
    pods.extend(model("no-max", &range(0, -1)));
    pods.extend(model("no-min", &range(-5, 2048)));
    let stand = stand("empty-range", pods, &[BUCKETING]).await;
    for bytes in [40, 8_000, 40_000] {
        let answer = stand
            .send(chat_with("empty", &text(1, bytes)))
            .await
            .expect(503);
        assert_eq!(answer.header("x-error-routing"), "true");
        stand
            .send(chat_with("no-max", &text(1, bytes)))
            .await
            .expect(503);
    }
    served(&stand, "no-min").await;
    let beyond = chat_with("no-min", &text(1, 16_000));
    stand.send(beyond).await.expect(503);
    assert_warned(&stand, &["empty-"]);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_out_of_range_or_of_another_type_leave_what_is_configured() {
    let mut pods = Vec::new();
    let wrong = [
        (
            "timeout",
            r#""pd": { "prefillRequestTimeout": -1 }"#,
            "prefillRequestTimeout",
        ),
        (
            "cost",
            r#""pd": { "tokenLoadRequestCost": -3500 }"#,
            "tokenLoadRequestCost",
        ),
        (
            "weight",
            r#""pd": { "tokenLoadKVWeight": -0.3 }"#,
            "tokenLoadKVWeight",
        ),
        (
            "factor",
            r#""pd": { "hybridCacheLoadFactor": 7 }"#,
            "hybridCacheLoadFactor",
        ),
        ("percent", r#""pd": { "minMatchPct": -1 }"#, "minMatchPct"),
        (
            "spread",
            r#""pd": { "decodeLoadImbalanceMinSpread": "wide" }"#,
            "decodeLoadImbalanceMinSpread",
        ),
        (
            "ratio",
            r#""pd": { "decodeScoreRatioThreshold": -1.5 }"#,
            "decodeScoreRatioThreshold",
        ),
        (
            "session",
            r#""pd": { "tokenLoadSessionTTLSeconds": -1 }"#,
            "tokenLoadSessionTTLSeconds",
        ),
        ("policy", r#""prefillScorePolicy": 5"#, "prefillScorePolicy"),
        ("flat", r#""pd": [1, 2]"#, "pd"),
    ];
    for (name, field, _) in wrong {
        let config = format!(
            r#"{{ "profiles": {{ "default": {{ "routingStrategy": "pd", "routingConfig": {{ {field} }} }} }} }}"#
        );
        pods.extend(model(name, &config));
    }
    let stand = stand("bad-settings", pods, &[]).await;
    for (name, _, field) in wrong {
        served(&stand, name).await;
        assert_warned(&stand, &[field]);
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_strategy_is_refused_in_a_header_and_skipped_anywhere_else() {
    let mut pods = model(
        "profile",
        r#"{ "profiles": { "default": { "routingStrategy": "dice" } } }"#,
    );
    pods.extend(model(
        "lock",
        r#"{ "lockedRoutingStrategy": "oracle", "profiles": { "default": { "routingStrategy": "random" } } }"#,
    ));
    let variable = "env: [{name: ROUTING_ALGORITHM, value: tarot}]";
    let stand = stand("strategies", pods, &[variable]).await;
    for strategy in ["roulette", "pd,random", "🎲"] {
        let call = chat_with("profile", "x").header("routing-strategy", strategy);
        let answer = stand.send(call).await.expect(400);
        assert_eq!(answer.header("x-error-routing"), "true");
        let message = answer.json()["error"]["message"].to_string();
        for valid in [
            "pd",
            "random",
            "least-request",
            "prefix-cache",
            "session-affinity",
        ] {
            assert!(message.contains(valid), "{message}");
        }
    }
    // Neither the profile nor the variable knows one: a complete roleset serves with `pd`.
    served(&stand, "profile").await;
    assert_warned(&stand, &["dice"]);
    assert_warned(&stand, &["tarot"]);
    // The lock does not know one: the profile decides.
    let answer = stand.send(chat_with("lock", "x")).await.expect(200);
    assert_eq!(answer.header("routing-strategy"), "random");
    assert_warned(&stand, &["oracle"]);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_key_of_any_length_is_served() {
    let config = r#"{ "profiles": { "default": { "routingStrategy": "pd", "routingConfig": { "prefillScorePolicy": "token_load" } } } }"#;
    let stand = stand("session-keys", model("my-model", config), &[]).await;
    for length in [0, 1, 256, 257, 4096] {
        for turn in 1..4 {
            let call = chat(&text(length, 400 * turn));
            let call = call.header("x-aibrix-session-key", &"k".repeat(length));
            served_by_pair(&stand, &stand.send(call).await.expect(200));
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}
