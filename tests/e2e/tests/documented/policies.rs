//! The scoring policies: what the annotations of each make of the same load.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use pd_e2e::{Answer, Call, Stand, eventually};
use pd_wire::control::{Charged, Ledgers};
use tokio::task::JoinHandle;

use super::steps::DEFAULT_PD;
use super::{all, chat, decision, pair, pair_in, served_by_pair, stand, text};

/// `conductor` for both legs.
const CONDUCTOR: &str = r#"
annotations:
  model.aibrix.ai/config: |
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
"#;

/// `token_load` for the prefill leg.
pub(super) const TOKEN_LOAD: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "prefillScorePolicy": "token_load"
          }
        }
      }
    }
"#;

/// `hybrid_cache_load` for the prefill leg.
const HYBRID: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "prefillScorePolicy": "hybrid_cache_load"
          }
        }
      }
    }
"#;

/// Tokens of every prefill charge beside the prompt's.
const REQUEST_COST: u64 = 3500;
/// A prompt of 30,000 tokens.
const LONG: usize = 120_000;

/// Scores of one leg by pod name.
pub(super) fn scores(answer: &Answer, leg: &str) -> BTreeMap<String, f64> {
    let entries = decision(answer, leg).split(',');
    let scores = entries.filter_map(|entry| {
        let (pod, score) = entry.rsplit_once(':')?;
        let name = pod.rsplit('/').next()?;
        Some((name.to_owned(), score.parse().ok()?))
    });
    scores.collect()
}

/// What is charged to a pod.
pub(super) fn charged(ledgers: &Ledgers, pod: &str) -> Charged {
    let pods = ledgers.models.iter().flat_map(|model| &model.pods);
    let mut of_pod = pods.filter(|entry| entry.name == pod);
    of_pod
        .next()
        .map_or_else(Charged::default, |entry| entry.charged)
}

/// Waits until the ledgers look like this to every worker. Each look is a connection of its own,
/// so another worker may answer: what happened to a charge reaches the others at the next tick.
pub(super) async fn when(stand: &Stand, what: &str, check: impl Fn(&Ledgers) -> bool) -> Ledgers {
    eventually(what, || async {
        let mut seen = Ledgers::default();
        for _ in 0..10 {
            seen = stand.envoy.ledgers().await?;
            ensure!(check(&seen), "{seen:?}");
        }
        anyhow::Ok(seen)
    })
    .await
}

/// Waits until no worker holds anything against a pod.
pub(super) async fn idle(stand: &Stand) {
    when(stand, "nothing is charged", |ledgers| {
        ledgers.total == Charged::default()
    })
    .await;
}

/// Sends without waiting for the answer.
pub(super) fn start(stand: &Stand, call: Call) -> JoinHandle<Result<Answer>> {
    tokio::spawn(call.send(stand.envoy.data()))
}

/// Waits for the answer of a request that was started; it must be a 200.
pub(super) async fn finish(call: JoinHandle<Result<Answer>>) -> Answer {
    call.await.unwrap().unwrap().expect(200)
}

/// Two pairs with these annotations whose prefill takes a second and a half.
async fn slow_pairs(name: &str, annotations: &str, variables: &[&str]) -> Stand {
    let mut pods = pair(&[annotations]);
    pods.extend(pair_in("1", &[annotations]));
    let pods = all(pods, |engine| engine.prefill_delay_ms = 1500.0);
    stand(name, pods, variables).await
}

/// Starts a long prompt, then three short ones while it is computed; the prefill pod of the long
/// one and those of the others.
async fn one_long_and_three_short(stand: &Stand) -> (String, Vec<String>) {
    let long = start(stand, chat(&text(1, LONG)));
    when(stand, "the long prompt is charged", |ledgers| {
        ledgers.total.prefill_requests == 1
    })
    .await;
    let mut short = Vec::new();
    for n in 0..3 {
        short.push(start(stand, chat(&text(2 + n, 200))));
        when(stand, "a short prompt is charged", |ledgers| {
            ledgers.total.prefill_requests == 2 + n as u64
        })
        .await;
    }
    let home = served_by_pair(stand, &finish(long).await).0;
    let mut others = Vec::new();
    for call in short {
        others.push(served_by_pair(stand, &finish(call).await).0);
    }
    (home, others)
}

#[tokio::test(flavor = "multi_thread")]
async fn token_load_spreads_prefill_work_by_tokens() {
    let stand = slow_pairs("token-load", TOKEN_LOAD, &[]).await;
    let (home, others) = one_long_and_three_short(&stand).await;
    assert!(!others.contains(&home), "{home}: {others:?}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn least_request_counts_a_long_prompt_like_a_short_one() {
    let variable = "env: [{name: AIBRIX_PREFILL_SCORE_POLICY, value: least_request}]";
    let stand = slow_pairs("least-request", DEFAULT_PD, &[variable]).await;
    let (home, others) = one_long_and_three_short(&stand).await;
    assert!(others.contains(&home), "{home}: {others:?}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_load_charges_the_prompt_and_a_fixed_cost_in_two_parts() {
    for annotations in [TOKEN_LOAD, HYBRID] {
        let pods = all(pair(&[annotations]), |engine| {
            engine.prefill_delay_ms = 600.0;
            engine.token_interval_ms = 300.0;
        });
        let stand = stand("charges", pods, &[]).await;
        let prompt = text(1, 40_000);
        // As `chat` writes it.
        let overhead =
            r#"{"model":"my-model","messages":[{"content":"","role":"user"}],"max_tokens":4}"#;
        let cost = REQUEST_COST + (overhead.len() + prompt.len()) as u64 / 4;
        let call = start(&stand, chat(&prompt));
        let ledgers = when(&stand, "the prefill is charged", |ledgers| {
            ledgers.total.prefill_requests == 1
        })
        .await;
        let prefill = charged(&ledgers, "prefill-0");
        assert_eq!((prefill.active_tokens, prefill.kv_tokens), (cost, cost));
        let ledgers = when(&stand, "the prefill is done", |ledgers| {
            ledgers.total.prefill_requests == 0
        })
        .await;
        let prefill = charged(&ledgers, "prefill-0");
        assert_eq!((prefill.active_tokens, prefill.kv_tokens), (0, cost));
        served_by_pair(&stand, &finish(call).await);
        stand.settled(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_load_for_decode_keeps_off_the_pod_that_holds_a_long_prompt() {
    let both = r#"
env:
  - name: AIBRIX_PREFILL_SCORE_POLICY
    value: least_request
  - name: AIBRIX_DECODE_SCORE_POLICY
    value: token_load
  - name: AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH
    value: "false"
"#;
    let mut pods = pair(&[DEFAULT_PD]);
    pods.extend(pair_in("1", &[DEFAULT_PD]));
    let pods = all(pods, |engine| engine.token_interval_ms = 800.0);
    let stand = stand("decode-token-load", pods, &[both]).await;
    let long = start(&stand, chat(&text(1, LONG)));
    let ledgers = when(&stand, "the long prompt is decoded", |ledgers| {
        ledgers.total.decode_running == 1 && ledgers.total.prefill_requests == 0
    })
    .await;
    // The whole prompt, without the cost that a prefill charge has.
    let expected = (LONG / 4) as u64;
    let tokens = ledgers.total.decode_tokens;
    assert!((expected..expected + 50).contains(&tokens), "{ledgers:?}");
    let mut short = Vec::new();
    for n in 0..3 {
        short.push(start(&stand, chat(&text(2 + n, 200))));
        when(&stand, "a short prompt is decoded", |ledgers| {
            ledgers.total.decode_running == 2 + n as u64 && ledgers.total.prefill_requests == 0
        })
        .await;
    }
    let home = served_by_pair(&stand, &finish(long).await).1;
    for call in short {
        assert_ne!(served_by_pair(&stand, &finish(call).await).1, home);
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hybrid_lets_the_cache_decide_when_idle_and_the_load_when_busy() {
    let stand = slow_pairs("hybrid", HYBRID, &[]).await;
    let shared = text(1, 16_000);
    let ask = |question: &str| chat(&format!("{shared} {question}"));
    let home = served_by_pair(&stand, &finish(start(&stand, ask("first"))).await).0;
    // Idle: scores are bare discounts, the best match wins outright.
    idle(&stand).await;
    let answer = finish(start(&stand, ask("second"))).await;
    assert_eq!(served_by_pair(&stand, &answer).0, home);
    let scores = scores(&answer, "prefill");
    println!("{scores:?}");
    let match_percent: f64 = decision(&answer, "match").parse().unwrap();
    assert!(match_percent >= 95.0, "{match_percent}");
    for (pod, score) in &scores {
        let r = if *pod == home {
            match_percent / 100.0
        } else {
            0.0
        };
        let discount = 1.0 - r * r * 0.5;
        assert!(
            (score - discount).abs() < 0.02,
            "{pod}: {score}, not {discount}"
        );
    }
    // Busy with a prompt four times as long, which began the same way and so went there too: half
    // of that load is more than an idle neighbour's.
    idle(&stand).await;
    let long = start(&stand, ask(&text(2, 64_000)));
    when(&stand, "the long prompt is charged", |ledgers| {
        ledgers.total.prefill_requests == 1
    })
    .await;
    let answer = finish(start(&stand, ask("third"))).await;
    assert_ne!(served_by_pair(&stand, &answer).0, home);
    assert_eq!(served_by_pair(&stand, &finish(long).await).0, home);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conductor_scores_are_milliseconds_of_waiting() {
    let mut pods = pair(&[CONDUCTOR]);
    pods.extend(pair_in("1", &[CONDUCTOR]));
    let stand = stand("conductor", pods, &[]).await;
    let shared = text(1, 12_800);
    // Nothing is cached: 0.001 · bytes^1.5 + 5 on either pod.
    let answer = stand.send(chat(&shared)).await.expect(200);
    let home = served_by_pair(&stand, &answer).0;
    let expected = 0.001 * 12_800_f64.powf(1.5) + 5.0;
    let cold = scores(&answer, "prefill");
    println!("cold {cold:?}, expected {expected}");
    assert_eq!(cold.len(), 2);
    for score in cold.values() {
        assert!(
            (score / expected - 1.0).abs() < 0.01,
            "{score}, not {expected}"
        );
    }
    // Idle decode pods of unknown throughput: 20 ms a token.
    let decode = scores(&answer, "decode");
    assert!(
        decode.len() == 2 && decode.values().all(|s| *s == 20.0),
        "{decode:?}"
    );
    // Where the prefix is known: 0.005 · matched + 1, and what is left to compute.
    for n in 0..4 {
        let answer = stand.send(chat(&format!("{shared} {n}"))).await.expect(200);
        assert_eq!(served_by_pair(&stand, &answer).0, home);
        let warm = scores(&answer, "prefill");
        println!("warm {warm:?}, match {}", decision(&answer, "match"));
        assert!(warm[&home] < 100.0, "{warm:?}");
        assert!(
            warm.iter()
                .all(|(pod, score)| *pod == home || *score > 1400.0),
            "{warm:?}"
        );
    }
    stand.settled(Duration::from_secs(5)).await;
}
