//! Adaptive bucket serving: a range that several rolesets share is divided among them.

use std::time::Duration;

use anyhow::ensure;
use pd_e2e::{Answer, Stand, within};

use super::steps::DEFAULT_PD;
use super::{BUCKETING, chat, pair, pair_in, served_by_pair, stand, text};

/// Divides by request counts.
const SERVE: &str = r#"
env:
  - name: AIBRIX_BUCKET_SERVE
    value: "true"
  - name: AIBRIX_BUCKET_SERVE_MODE
    value: "rps"
"#;

/// Two pairs that take any length.
async fn two_pairs(name: &str, variables: &[&str]) -> Stand {
    let mut pods = pair(&[DEFAULT_PD]);
    pods.extend(pair_in("1", &[DEFAULT_PD]));
    stand(name, pods, variables).await
}

/// A short and a long prompt, as often as each other.
async fn both(stand: &Stand, n: usize) -> [Answer; 2] {
    let short = stand.send(chat(&text(n, 400))).await.expect(200);
    let long = stand.send(chat(&text(n, 40_000))).await.expect(200);
    [short, long]
}

#[tokio::test(flavor = "multi_thread")]
async fn short_and_long_prompts_part_when_they_are_half_of_the_traffic_each() {
    let stand = two_pairs("bands", &[BUCKETING, SERVE]).await;
    let mut sent = 0;
    within(
        Duration::from_secs(40),
        "each length has its roleset",
        || {
            sent += 12;
            let (stand, from) = (&stand, sent);
            async move {
                let [short, long] = both(stand, from).await;
                let homes = [&short, &long].map(|answer| served_by_pair(stand, answer).0);
                ensure!(homes[0] != homes[1], "both at {homes:?}");
                for n in 1..12 {
                    let answers = both(stand, from + n).await;
                    for (answer, home) in answers.iter().zip(&homes) {
                        let pod = served_by_pair(stand, answer).0;
                        ensure!(pod == *home, "{pod}, not {home}");
                    }
                }
                Ok(())
            }
        },
    )
    .await;
    println!("parted after {sent} prompts of each length");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_variable_nothing_is_recorded_or_divided() {
    let stand = two_pairs("no-bands", &[BUCKETING]).await;
    let mut seen = std::collections::BTreeSet::new();
    for n in 0..24 {
        for (answer, length) in both(&stand, n).await.iter().zip(["short", "long"]) {
            seen.insert((length, served_by_pair(&stand, answer).0));
        }
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
    let page = stand.envoy.metrics().await.unwrap();
    assert!(!page.contains("pd_bucket_band"), "a band is published");
    stand.settled(Duration::from_secs(5)).await;
}
