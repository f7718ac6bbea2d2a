//! Config profiles: named, unknown, chosen automatically, and what each may change.

use std::time::Duration;

use pd_e2e::{Answer, Call, Stand};

use super::policies::{charged, finish, idle, scores, start, when};
use super::{BUCKETING, all, chat, pair, pair_in, served_alone, served_by_pair, stand, text};

/// Several profiles, one of them the default.
const NAMED: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "defaultProfile": "everyday",
      "profiles": {
        "everyday": { "routingStrategy": "pd" },
        "default": { "routingStrategy": "random" },
        "one-leg": { "routingStrategy": "least-request" }
      }
    }
"#;

/// Profiles that say which requests they are for.
const HINTS: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "defaultProfile": "rest",
      "profiles": {
        "rest": { "routingStrategy": "session-affinity" },
        "long": {
          "routingStrategy": "pd",
          "routingConfig": { "promptTokensGte": 2000 }
        },
        "short": {
          "routingStrategy": "random",
          "routingConfig": { "promptTokensLt": 1000, "maxTokensGte": 8 }
        },
        "brief": {
          "routingStrategy": "least-request",
          "routingConfig": { "promptTokensGte": 0, "promptTokensLt": 1000, "maxTokensLt": 8 }
        }
      }
    }
"#;

/// Settings of single profiles.
const SETTINGS: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": { "routingStrategy": "pd" },
        "cheap": {
          "routingConfig": {
            "prefillScorePolicy": "token_load",
            "pd": { "tokenLoadRequestCost": 1000 }
          }
        },
        "sticky": {
          "routingConfig": {
            "prefillScorePolicy": "hybrid_cache_load",
            "pd": { "hybridCacheLoadFactor": 1 }
          }
        },
        "choosy": {
          "routingConfig": {
            "prefillScorePolicy": "hybrid_cache_load",
            "pd": { "minMatchPct": 60 }
          }
        },
        "hurried": {
          "routingConfig": {
            "pd": { "prefillRequestTimeout": 0.1, "prefillRetries": 0 }
          }
        },
        "even-prefill": {
          "routingConfig": { "pd": { "prefillLoadImbalanceMinSpread": 1 } }
        },
        "even-decode": {
          "routingConfig": { "pd": { "decodeLoadImbalanceMinSpread": 2 } }
        }
      }
    }
"#;

/// Each profile has a range of its own.
const RANGES: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": { "promptLenBucketMaxLength": 2048 }
        },
        "wide": {
          "routingStrategy": "pd",
          "routingConfig": { "promptLenBucketMinLength": 0, "promptLenBucketMaxLength": 0 }
        }
      }
    }
"#;

/// A request under a profile.
fn under(profile: &str, call: Call) -> Call {
    call.header("config-profile", profile)
}

/// Sends under a profile; it must be a 200.
async fn send(stand: &Stand, profile: &str, prompt: &str) -> Answer {
    stand.send(under(profile, chat(prompt))).await.expect(200)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_named_profile_is_used_and_an_unknown_one_falls_back() {
    let stand = stand("profiles", pair(&[NAMED]), &[BUCKETING]).await;
    for (profile, strategy) in [
        ("everyday", "pd"),
        ("default", "random"),
        ("one-leg", "least-request"),
        ("no-such-profile", "pd"),
        ("", "pd"),
        (" one-leg ", "least-request"),
    ] {
        let answer = send(&stand, profile, "which profile is it?").await;
        assert_eq!(answer.header("routing-strategy"), strategy, "{profile:?}");
        if strategy == "pd" {
            served_by_pair(&stand, &answer);
        } else {
            served_alone(&stand, &answer);
        }
        // Only a profile that was chosen automatically is told.
        assert_eq!(answer.header("x-aibrix-config-profile"), "");
    }
    served_by_pair(
        &stand,
        &stand.send(chat("no header at all")).await.expect(200),
    );
    let long = "p".repeat(4000);
    served_by_pair(&stand, &send(&stand, &long, "a long name").await);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_takes_the_profile_whose_hints_fit_best() {
    let stand = stand("auto", pair(&[HINTS]), &[]).await;
    let request = |bytes: usize, max_tokens: &str| {
        let message = serde_json::json!([{ "role": "user", "content": text(bytes, bytes) }]);
        let body = format!(r#"{{"model":"my-model","messages":{message}{max_tokens}}}"#);
        Call::post(super::CHAT, body)
    };
    for (tokens, max_tokens, profile, strategy) in [
        (3000, "", "long", "pd"),
        (3000, r#","max_tokens":4"#, "long", "pd"),
        (1500, r#","max_tokens":4"#, "rest", "session-affinity"),
        (100, r#","max_tokens":8"#, "short", "random"),
        (100, r#","max_completion_tokens":8"#, "short", "random"),
        // Three hints hold: more than the two of "short".
        (100, r#","max_tokens":7"#, "brief", "least-request"),
        // What a hint asks of `max_tokens` does not hold without it.
        (100, "", "rest", "session-affinity"),
    ] {
        for auto in ["auto", "AUTO", " Auto "] {
            let call = under(auto, request(tokens * 4, max_tokens));
            let answer = stand.send(call).await.expect(200);
            let shown = ["x-aibrix-config-profile", "routing-strategy"].map(|h| answer.header(h));
            assert_eq!(shown, [profile, strategy], "{auto}: {tokens} {max_tokens}");
        }
    }
    // Asked for by name it is not told.
    let answer = stand.send(under("long", request(40, ""))).await.expect(200);
    assert_eq!(answer.header("routing-strategy"), "pd");
    assert_eq!(answer.header("x-aibrix-config-profile"), "");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_brings_its_own_ranges_when_bucketing_is_on() {
    let stand = stand("profile-ranges", pair(&[RANGES]), &[BUCKETING]).await;
    let long = text(1, 16_000);
    stand.send(chat(&long)).await.expect(503);
    served_by_pair(&stand, &send(&stand, "wide", &long).await);
    stand.send(under("unknown", chat(&long))).await.expect(503);
    served_by_pair(&stand, &send(&stand, "default", "short").await);
    stand.settled(Duration::from_secs(5)).await;
}

/// Two pairs with a profile for each setting.
async fn settings(name: &str, change: impl Fn(&mut pd_engine_sim::EngineConfig)) -> Stand {
    let mut pods = pair(&[SETTINGS]);
    pods.extend(pair_in("1", &[SETTINGS]));
    stand(name, all(pods, change), &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_changes_charges_and_timeouts_of_its_own_requests_only() {
    let stand = settings("settings", |engine| engine.prefill_delay_ms = 700.0).await;
    let prompt = text(1, 4000);
    let call = start(&stand, under("cheap", chat(&prompt)));
    let ledgers = when(&stand, "the prefill is charged", |ledgers| {
        ledgers.total.prefill_requests == 1
    })
    .await;
    let answer = finish(call).await;
    let cost = charged(&ledgers, answer.header("prefill-target-pod")).active_tokens;
    assert!(
        (2000..2030).contains(&cost),
        "1000 and the prompt's 1000: {cost}"
    );

    let answer = stand
        .send(under("hurried", chat("quick")))
        .await
        .expect(504);
    assert_eq!(answer.header("x-error-pd-prefill"), "true");
    assert!(
        answer.total < Duration::from_millis(650),
        "{:?}",
        answer.total
    );
    served_by_pair(&stand, &stand.send(chat("no hurry")).await.expect(200));
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_changes_the_scores_of_its_own_requests_only() {
    let stand = settings("setting-scores", |_| ()).await;
    let known = text(1, 8000);
    let home = served_by_pair(&stand, &send(&stand, "sticky", &known).await).0;
    idle(&stand).await;
    // A full discount: nothing is left of the score.
    let answer = send(&stand, "sticky", &known).await;
    assert_eq!(served_by_pair(&stand, &answer).0, home);
    let found = scores(&answer, "prefill");
    assert!(found[&home] < 0.1, "{found:?}");
    idle(&stand).await;
    // A third of this prompt is known: below 60 % that counts as nothing.
    let third = format!("{known}{}", text(2, 16_000));
    let answer = send(&stand, "choosy", &third).await;
    let found = scores(&answer, "prefill");
    assert!(found.values().all(|score| *score == 1.0), "{found:?}");
    idle(&stand).await;
    // Without that threshold it is 1 − (1/3)² · 1 = 0.89.
    let other = format!("{known}{}", text(3, 16_000));
    let answer = send(&stand, "sticky", &other).await;
    let found = scores(&answer, "prefill");
    assert!((found[&home] - 0.89).abs() < 0.03, "{found:?}");
    idle(&stand).await;
    // And under the default policy it is (100 − match) · 0.1.
    let answer = stand.send(chat(&known)).await.expect(200);
    let found = scores(&answer, "prefill");
    assert!(found[&home] < 0.6 && found.len() == 2, "{found:?}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_changes_the_spreads_of_its_own_requests_only() {
    let stand = settings("setting-spreads", |engine| {
        engine.prefill_delay_ms = 1000.0;
        engine.token_interval_ms = 600.0;
    })
    .await;
    let shared = text(1, 8000);
    let ask = |n: usize| chat(&format!("{shared} {n}"));
    let home = served_by_pair(&stand, &finish(start(&stand, ask(0))).await);
    idle(&stand).await;
    let mut busy = Vec::new();
    for n in 1..=2 {
        busy.push(start(&stand, ask(n)));
        when(&stand, "one more prefill", |ledgers| {
            ledgers.total.prefill_requests == n as u64
        })
        .await;
    }
    // Two prefills on one pod and none on the other: more than a spread of 1, less than 16.
    let spread = start(&stand, under("even-prefill", ask(3)));
    when(&stand, "the third prefill", |ledgers| {
        ledgers.total.prefill_requests == 3
    })
    .await;
    let stays = start(&stand, ask(4));
    when(&stand, "the fourth prefill", |ledgers| {
        ledgers.total.prefill_requests == 4
    })
    .await;
    // Now three decode there and one on the other pod: a spread of 2 is reached.
    when(&stand, "all are decoded", |ledgers| {
        ledgers.total.prefill_requests == 0 && ledgers.total.decode_running == 4
    })
    .await;
    let decode = start(&stand, under("even-decode", ask(5)));
    let answer = finish(decode).await;
    println!("{}", answer.header("x-pd-decision"));
    assert_ne!(served_by_pair(&stand, &answer), home);
    let answer = finish(spread).await;
    println!("{}", answer.header("x-pd-decision"));
    assert_ne!(served_by_pair(&stand, &answer), home);
    assert_eq!(served_by_pair(&stand, &finish(stays).await), home);
    for call in busy {
        assert_eq!(served_by_pair(&stand, &finish(call).await), home);
    }
    stand.settled(Duration::from_secs(5)).await;
}
