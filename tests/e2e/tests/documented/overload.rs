//! Pairs that are busy, and standard pods that take over.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::ensure;
use pd_e2e::{Load, Pod, Stand, within};
use pd_engine_sim::PaceChange;
use serde_json::json;

use super::lengths::{COMPLETE_DECODE, COMPLETE_PREFILL};
use super::policies::{finish, start, when};
use super::steps::COMBINED;
use super::{BUCKETING, all, chat, pair, pair_in, served_alone, served_by_pair, text, with};

/// A pair for short prompts and a standard pod for any. Each engine computes one prompt at a time.
fn busy_pods() -> Vec<Pod> {
    let pods = vec![
        Pod::documented("prefill-0", &[COMPLETE_PREFILL]),
        Pod::documented("decode-0", &[COMPLETE_DECODE]),
        Pod::documented("standard", &[COMBINED]),
    ];
    all(pods, |engine| {
        engine.max_num_seqs = 1;
        engine.prefill_delay_ms = 150.0;
    })
}

/// Twelve clients with short prompts.
fn load(stand: &Stand) -> Load {
    Load::start(stand.envoy.data(), 12, |n| {
        chat(&text(usize::try_from(n).unwrap_or_default(), 400))
    })
}

/// Lets the standard pod finish requests for a while, so that its drain rate is known.
async fn warm_standard(stand: &Stand) {
    for n in 0..8 {
        let answer = stand.send(chat(&text(n, 40_000))).await.expect(200);
        assert_eq!(served_alone(stand, &answer), "standard");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_standard_pod_takes_over_from_a_loaded_pair() {
    let builder = Stand::builder("overflow").pods(busy_pods());
    let stand = builder.envoy(with(&[BUCKETING])).alone().start().await;
    warm_standard(&stand).await;
    let before = stand.seen("standard").len();
    // Short prompts belong to the pair, until a dozen of them wait there.
    for n in 0..4 {
        served_by_pair(&stand, &stand.send(chat(&text(n, 400))).await.expect(200));
    }
    assert_eq!(stand.seen("standard").len(), before);
    let load = load(&stand);
    within(
        Duration::from_secs(30),
        "the standard pod helps",
        || async {
            ensure!(stand.seen("standard").len() >= before + 3);
            Ok(())
        },
    )
    .await;
    let good = load.stop().await.expect_all_good();
    let helped = stand.seen("standard").len() - before;
    println!("the standard pod took {helped} of {good}");
    assert!((helped as u64) < good, "the pair went on");
    stand.settled(Duration::from_secs(10)).await;
    // Nobody waits any more, as the next samples say: the pair serves alone again.
    within(
        Duration::from_secs(10),
        "the pair serves alone again",
        || async {
            let before = stand.seen("standard").len();
            for n in 0..4 {
                stand.send(chat(&text(n, 400))).await.expect(200);
            }
            let now = stand.seen("standard").len();
            ensure!(now == before, "{} more", now - before);
            Ok(())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_known_of_a_standard_pod_never_makes_it_take_over() {
    // It has finished nothing: there is no drain rate to judge it by.
    let builder = Stand::builder("overflow-unknown").pods(busy_pods());
    let stand = builder.envoy(with(&[BUCKETING])).start().await;
    let load = load(&stand);
    load.more(40).await;
    load.stop().await.expect_all_good();
    assert!(stand.seen("standard").is_empty());
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_bucketing_off_a_standard_pod_does_not_take_over() {
    let builder = Stand::builder("overflow-off").pods(busy_pods());
    let stand = builder.start().await;
    for n in 0..8 {
        let call = chat(&text(n, 400)).header("routing-strategy", "least-request");
        let answer = stand.send(call).await.expect(200);
        assert_eq!(served_alone(&stand, &answer), "standard");
    }
    let before = stand.seen("standard").len();
    let load = load(&stand);
    load.more(40).await;
    load.stop().await.expect_all_good();
    assert_eq!(stand.seen("standard").len(), before);
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_capacity_a_standard_pod_serves_and_without_one_429_says_when_to_come_back() {
    for bucketing in [true, false] {
        let mut pods = pair(&[]);
        pods.push(Pod::documented("standard", &[COMBINED]));
        let pods = all(pods, |engine| engine.prefill_delay_ms = 1000.0);
        let plugin = json!({ "maxPrefillPerPod": 1, "promptLengthBucketing": bucketing });
        let mut stand = Stand::builder("capacity")
            .pods(pods)
            .plugin(&plugin)
            .start()
            .await;
        let fast = PaceChange {
            prefill_delay_ms: Some(0.0),
            ..PaceChange::default()
        };
        stand.engine("standard").set_pace(fast).unwrap();
        let first = start(&stand, chat("the pair's only one"));
        when(&stand, "the pair is full", |ledgers| {
            ledgers.total.prefill_requests == 1
        })
        .await;
        let answer = stand.send(chat("one too many")).await.expect(200);
        assert_eq!(served_alone(&stand, &answer), "standard");
        served_by_pair(&stand, &finish(first).await);

        stand
            .change_pods(|pods| pods.retain(|pod| pod.name != "standard"))
            .await
            .unwrap();
        stand.ready().await;
        let first = start(&stand, chat("the pair's only one"));
        when(&stand, "the pair is full", |ledgers| {
            ledgers.total.prefill_requests == 1
        })
        .await;
        for n in 0..4 {
            let answer = stand.send(chat(&text(n, 100))).await.expect(429);
            assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
            let after: u64 = answer.header("retry-after").parse().unwrap();
            assert!(after >= 1);
        }
        served_by_pair(&stand, &finish(first).await);
        stand.settled(Duration::from_secs(5)).await;
    }
}

/// Profiles with every policy, so that one gateway can be asked for each.
const POLICIES: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": { "routingStrategy": "pd" },
        "requests": {
          "routingConfig": {
            "prefillScorePolicy": "least_request",
            "decodeScorePolicy": "least_request"
          }
        },
        "conductor": {
          "routingConfig": {
            "prefillScorePolicy": "conductor",
            "decodeScorePolicy": "conductor"
          }
        },
        "tokens": {
          "routingConfig": {
            "prefillScorePolicy": "token_load",
            "decodeScorePolicy": "token_load"
          }
        },
        "hybrid": {
          "routingConfig": {
            "prefillScorePolicy": "hybrid_cache_load",
            "decodeScorePolicy": "load_balancing"
          }
        }
      }
    }
"#;

/// Requests at the same time.
const BURST: usize = 1000;
/// Equal rolesets.
const ROLESETS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_spreads_evenly_over_equal_rolesets_under_every_policy() {
    let pods: Vec<Pod> = (0..ROLESETS)
        .flat_map(|n| pair_in(&n.to_string(), &[POLICIES]))
        .collect();
    // Long enough that all are there before the first prefill ends: engines' numbers are those of
    // before the burst for every choice.
    let pods = all(pods, |engine| engine.prefill_delay_ms = 3000.0);
    let builder = Stand::builder("burst").pods(pods);
    let stand = builder.alone().start().await;
    let profiles = ["default", "requests", "conductor", "tokens", "hybrid"];
    for (round, profile) in profiles.into_iter().enumerate() {
        let calls: Vec<_> = (0..BURST)
            .map(|n| {
                let call = chat(&text(round * BURST + n, 300)).header("config-profile", profile);
                start(&stand, call)
            })
            .collect();
        when(&stand, "all are charged at the same time", |ledgers| {
            ledgers.total.prefill_requests == BURST as u64
        })
        .await;
        let mut counts = BTreeMap::<String, usize>::new();
        let mut soonest = Duration::MAX;
        for call in calls {
            let answer = finish(call).await;
            soonest = soonest.min(answer.total);
            let pod = answer.header("prefill-target-pod").to_owned();
            *counts.entry(pod).or_default() += 1;
        }
        println!(
            "{profile}: {:?}, first answer after {soonest:?}",
            counts.values()
        );
        let even = BURST / ROLESETS;
        assert_eq!(counts.len(), ROLESETS, "{profile}: {counts:?}");
        for (pod, count) in &counts {
            let off = count.abs_diff(even);
            assert!(off * 5 <= even, "{profile}: {pod} got {count}: {counts:?}");
        }
    }
    stand.settled(Duration::from_secs(10)).await;
}
