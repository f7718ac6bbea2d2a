//! Prompt-length bucketing and the complete example.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pd_e2e::{Answer, Pod, Stand};

use super::steps::{COMBINED, DEFAULT_PD};
use super::{
    BUCKETING, DECODE, PREFILL, chat, decision, pair, pair_in, served_alone, served_by_pair, stand,
    text,
};

/// A range of prompt lengths.
const SHORT: &str = r#"
annotations:
  model.aibrix.ai/config: |
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
"#;

/// The range next to it; 0 stands for no upper end.
const LONG: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": {
          "routingStrategy": "pd",
          "routingConfig": {
            "promptLenBucketMinLength": 2049,
            "promptLenBucketMaxLength": 0
          }
        }
      }
    }
"#;

/// The complete example's prefill pod.
pub(super) const COMPLETE_PREFILL: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
    role-name: prefill
    roleset-name: group-0
  annotations:
    model.aibrix.ai/config: |
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
"#;

/// Its decode pod.
pub(super) const COMPLETE_DECODE: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
    role-name: decode
    roleset-name: group-0
  annotations:
    model.aibrix.ai/config: |
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
"#;

/// Its standard inference pod.
pub(super) const COMPLETE_STANDARD: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
  annotations:
    model.aibrix.ai/config: |
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
"#;

/// Its gateway, as Helm values.
const COMPLETE_GATEWAY: &str = r#"
gatewayPlugin:
  container:
    envs:
      AIBRIX_PROMPT_LENGTH_BUCKETING: "true"
"#;

/// Bytes of text that count as about this many tokens.
const fn tokens(count: usize) -> usize {
    count * 4
}

/// Sends prompts around 2048 tokens, byte by byte, until some counted as 2048 and some as 2049.
/// Gives for each length in tokens, as the gateway counted it, the pod that had to compute the
/// prompt. More than one pass: the gateway may learn a little of token sizes on the way.
async fn around_2048(stand: &Stand) -> BTreeMap<u64, BTreeSet<String>> {
    let mut seen = BTreeMap::<u64, BTreeSet<String>>::new();
    let sizes = tokens(2048) - 80..tokens(2048) + 16;
    for bytes in sizes.cycle().take(288) {
        let answer = send(stand, bytes).await.expect(200);
        let prefill = answer.header("prefill-target-pod");
        let pod = if prefill.is_empty() {
            served_alone(stand, &answer)
        } else {
            served_by_pair(stand, &answer).0
        };
        let length: u64 = decision(&answer, "prompt_tokens").parse().unwrap();
        assert!(length.abs_diff(bytes as u64 / 4) <= 12, "{bytes}: {length}");
        seen.entry(length).or_default().insert(pod);
        if bytes == tokens(2048) + 15 && seen.contains_key(&2048) && seen.contains_key(&2049) {
            break;
        }
    }
    println!("{seen:?}");
    assert!(seen.contains_key(&2048) && seen.contains_key(&2049));
    seen
}

/// Sends a prompt of this many bytes.
async fn send(stand: &Stand, bytes: usize) -> Answer {
    stand.send(chat(&text(bytes, bytes))).await
}

/// The pods of the complete example.
fn complete() -> Vec<Pod> {
    vec![
        Pod::documented("prefill-0", &[COMPLETE_PREFILL]),
        Pod::documented("decode-0", &[COMPLETE_DECODE]),
        Pod::documented("standard", &[COMPLETE_STANDARD]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn both_ends_of_a_range_belong_to_it() {
    let mut pods = pair(&[SHORT]);
    pods.extend(pair_in("1", &[LONG]));
    let stand = stand("range-ends", pods, &[BUCKETING]).await;
    for (length, pods) in around_2048(&stand).await {
        let expected = if length <= 2048 {
            "prefill-0"
        } else {
            "prefill-1"
        };
        assert!(pods.iter().eq([expected]), "{length}: {pods:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_length_goes_to_the_roleset_whose_range_it_is_in() {
    let mut pods = pair(&[SHORT]);
    pods.extend(pair_in("1", &[LONG]));
    let stand = stand("ranges", pods, &[BUCKETING]).await;
    for round in 0..3 {
        for (bytes, expected) in [
            (tokens(1), "prefill-0"),
            (tokens(100), "prefill-0"),
            (tokens(1500), "prefill-0"),
            (tokens(3000), "prefill-1"),
            (tokens(100_000), "prefill-1"),
        ] {
            let answer = send(&stand, bytes + round).await.expect(200);
            assert_eq!(served_by_pair(&stand, &answer).0, expected, "{bytes}");
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outside_every_range_without_a_standard_pod_is_an_error() {
    let stand = stand("no-range", pair(&[SHORT]), &[BUCKETING]).await;
    send(&stand, tokens(1500)).await.expect(200);
    let answer = send(&stand, tokens(4000)).await.expect(503);
    assert_eq!(answer.header("x-error-routing"), "true");
    let message = answer.json()["error"]["message"].to_string();
    println!("{message}");
    assert!(
        message.contains("token"),
        "it says what did not fit: {message}"
    );
    // Service goes on.
    send(&stand, tokens(10)).await.expect(200);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_variable_ranges_and_standard_pods_count_for_nothing() {
    let mut pods = complete();
    pods.extend(pair_in("1", &[LONG]));
    let stand = stand("ranges-off", pods, &[]).await;
    let mut seen = BTreeSet::new();
    for n in 0..24 {
        let bytes = if n % 2 == 0 { tokens(10) } else { tokens(5000) };
        let answer = send(&stand, bytes + n).await.expect(200);
        let (prefill, _) = served_by_pair(&stand, &answer);
        seen.insert((prefill, n % 2));
    }
    // Either roleset serves either length; by chance alone one would be missing once in 2^10.
    println!("{seen:?}");
    assert_eq!(seen.len(), 4, "{seen:?}");
    assert!(stand.seen("standard").is_empty());
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_roleset_counts_only_when_both_its_pods_declare_the_length() {
    let pods = vec![
        Pod::documented("prefill-0", &[PREFILL, DEFAULT_PD]),
        Pod::documented("decode-0", &[DECODE, SHORT]),
        Pod::documented("prefill-1", &[PREFILL, LONG]).in_roleset("group-1"),
        Pod::documented("decode-1", &[DECODE, DEFAULT_PD]).in_roleset("group-1"),
        Pod::documented("prefill-2", &[PREFILL, SHORT]).in_roleset("group-2"),
        Pod::documented("decode-2", &[DECODE, LONG]).in_roleset("group-2"),
    ];
    let stand = stand("both-declare", pods, &[BUCKETING]).await;
    for n in 0..8 {
        let answer = send(&stand, tokens(1000) + n).await.expect(200);
        assert_eq!(served_by_pair(&stand, &answer).0, "prefill-0");
        let answer = send(&stand, tokens(4000) + n).await.expect(200);
        assert_eq!(served_by_pair(&stand, &answer).0, "prefill-1");
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_complete_example_serves_every_length() {
    let stand = stand("complete", complete(), &[COMPLETE_GATEWAY]).await;
    // Both ranges hold 2048: a pair that fits comes first.
    for (length, pods) in around_2048(&stand).await {
        let expected = if length <= 2048 {
            "prefill-0"
        } else {
            "standard"
        };
        assert!(pods.iter().eq([expected]), "{length}: {pods:?}");
    }
    for round in 0..4 {
        for length in [1, 20, 1800] {
            let answer = send(&stand, tokens(length) + round).await.expect(200);
            served_by_pair(&stand, &answer);
        }
        for length in [2300, 10_000, 100_000] {
            let answer = send(&stand, tokens(length) + round).await.expect(200);
            assert_eq!(served_alone(&stand, &answer), "standard", "{length}");
            assert_eq!(answer.header("routing-strategy"), "pd");
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_complete_example_without_its_decode_pod_the_standard_pod_keeps_its_range() {
    let mut stand = stand("complete-decode-down", complete(), &[COMPLETE_GATEWAY]).await;
    stand
        .change_pods(|pods| pods.retain(|pod| pod.name != "decode-0"))
        .await
        .unwrap();
    for n in 0..8 {
        send(&stand, tokens(100) + n).await.expect(503);
        let answer = send(&stand, tokens(3000) + n).await.expect(200);
        assert_eq!(served_alone(&stand, &answer), "standard");
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standard_pod_without_a_range_takes_every_length_the_pairs_do_not() {
    let mut pods = pair(&[SHORT]);
    pods.push(Pod::documented("standard", &[COMBINED]));
    let stand = stand("standard-any", pods, &[BUCKETING]).await;
    for n in 0..4 {
        let answer = send(&stand, tokens(500) + n).await.expect(200);
        served_by_pair(&stand, &answer);
        let answer = send(&stand, tokens(5000) + n).await.expect(200);
        assert_eq!(served_alone(&stand, &answer), "standard");
    }
    stand.settled(Duration::from_secs(5)).await;
}
