//! Labels, the strategy, and standard inference pods.

use std::time::Duration;

use pd_e2e::{Call, Pod};

use super::{
    BUCKETING, CHAT, DECODE, PREFILL, chat, pair, pair_in, served_alone, served_by_pair, stand,
    text,
};

/// Makes `pd` the default of a model.
pub(super) const DEFAULT_PD: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": { "routingStrategy": "pd" }
      }
    }
"#;

/// Pins `pd`.
const LOCKED_PD: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "lockedRoutingStrategy": "pd",
      "defaultProfile": "default",
      "profiles": {
        "default": { "routingStrategy": "pd" }
      }
    }
"#;

/// A standard inference pod.
pub(super) const COMBINED: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
    # No role-name: prefill/decode — this is a standard inference pod
  annotations:
    model.aibrix.ai/config: |
      {
        "profiles": {
          "default": {
            "routingStrategy": "pd",
            "routingConfig": { "combined": true }
          }
        }
      }
"#;

/// Body of the request that the documentation shows.
const HELLO: &str = r#"{"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}"#;

/// What would decide without a header or an annotation: something other than `pd`.
const OTHERWISE_RANDOM: &str = r#"
env:
  - name: ROUTING_ALGORITHM
    value: "random"
"#;

fn hello() -> Call {
    Call::post(CHAT, HELLO)
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_and_a_header_are_enough() {
    let stand = stand("labels", pair(&[]), &[OTHERWISE_RANDOM]).await;
    let answer = stand.send(hello()).await.expect(200);
    assert_eq!(answer.header("routing-strategy"), "random");
    assert_eq!(served_alone(&stand, &answer), "decode-0");
    let call = hello().header("routing-strategy", "pd");
    let answer = stand.send(call).await.expect(200);
    let served = served_by_pair(&stand, &answer);
    assert_eq!(served, ("prefill-0".to_owned(), "decode-0".to_owned()));
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_annotation_makes_pd_the_default_which_a_header_overrides() {
    let stand = stand("default-pd", pair(&[DEFAULT_PD]), &[OTHERWISE_RANDOM]).await;
    served_by_pair(&stand, &stand.send(hello()).await.expect(200));
    let call = hello().header("routing-strategy", "random");
    let answer = stand.send(call).await.expect(200);
    assert_eq!(answer.header("routing-strategy"), "random");
    assert_eq!(served_alone(&stand, &answer), "decode-0");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_strategy_wins_over_header_and_profile() {
    let stand = stand("locked", pair(&[LOCKED_PD]), &[OTHERWISE_RANDOM]).await;
    served_by_pair(&stand, &stand.send(hello()).await.expect(200));
    for strategy in [
        "random",
        "least-request",
        "prefix-cache",
        "session-affinity",
    ] {
        let call = hello().header("routing-strategy", strategy);
        served_by_pair(&stand, &stand.send(call).await.expect(200));
    }
    // A profile that does not exist falls back to the default one, under the same lock.
    let call = hello().header("config-profile", "no-such-profile");
    served_by_pair(&stand, &stand.send(call).await.expect(200));
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_incomplete_roleset_is_skipped_whole() {
    let mut pods = pair(&[DEFAULT_PD]);
    let alone = |name: &str, template: &str, roleset: &str| {
        Pod::documented(name, &[template, DEFAULT_PD]).in_roleset(roleset)
    };
    pods.push(alone("prefill-1", PREFILL, "group-1"));
    pods.push(alone("decode-2", DECODE, "group-2"));
    let stand = stand("incomplete", pods, &[]).await;
    for n in 0..12 {
        let answer = stand.send(chat(&text(n, 100))).await.expect(200);
        assert_eq!(served_by_pair(&stand, &answer).0, "prefill-0");
    }
    for pod in ["prefill-1", "decode-2"] {
        assert!(stand.seen(pod).is_empty(), "{pod}");
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standard_pod_takes_over_when_no_pair_is_complete() {
    for variables in [&[BUCKETING][..], &[]] {
        let mut pods = pair(&[DEFAULT_PD]);
        pods.push(Pod::documented("standard", &[COMBINED]));
        let mut stand = stand("standard", pods, variables).await;
        // While the pair is complete and idle, it serves: the pods accept any length.
        for bytes in [5, 8_000, 200_000] {
            let answer = stand.send(chat(&text(bytes, bytes))).await.expect(200);
            served_by_pair(&stand, &answer);
        }
        stand
            .change_pods(|pods| pods.retain(|pod| pod.name != "decode-0"))
            .await
            .unwrap();
        let answer = stand.send(chat("without its pair")).await.expect(200);
        assert_eq!(served_alone(&stand, &answer), "standard");
        assert_eq!(answer.header("routing-strategy"), "pd");
        stand
            .change_pods(|pods| pods.retain(|pod| pod.name != "standard"))
            .await
            .unwrap();
        let answer = stand.send(chat("without any")).await.expect(503);
        assert!(!answer.header("x-error-routing").is_empty());
        assert_eq!(answer.json()["error"]["code"], "service_unavailable");
        stand.settled(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_strategies_use_standard_pods_first_and_prefill_pods_never() {
    let mut pods = pair(&[DEFAULT_PD]);
    pods.extend(pair_in("1", &[DEFAULT_PD]));
    pods.push(Pod::documented("standard", &[COMBINED]));
    let stand = stand("standard-first", pods, &[BUCKETING]).await;
    for strategy in ["random", "least-request"] {
        for n in 0..6 {
            let call = chat(&text(n, 400)).header("routing-strategy", strategy);
            let answer = stand.send(call).await.expect(200);
            assert_eq!(served_alone(&stand, &answer), "standard");
            assert_eq!(answer.header("routing-strategy"), strategy);
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}
