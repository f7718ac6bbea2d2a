//! What narrows or limits the requests of a model: `external-filter` and `requestsPerSecond`.

use std::collections::BTreeMap;
use std::time::Duration;

use pd_e2e::{Answer, Pod, Stand, eventually};

use super::policies::start;
use super::{chat, pair_in, served_alone, served_by_pair, stand, text};

/// A model that takes five requests a second, and twice as many under another profile.
const FIVE_A_SECOND: &str = r#"
annotations:
  model.aibrix.ai/config: |
    {
      "profiles": {
        "default": { "routingStrategy": "pd", "requestsPerSecond": 5 },
        "free": { "routingStrategy": "pd" }
      }
    }
"#;

/// Three pairs with labels: 0 has `tier: gold, zone: a`, 1 has `tier: silver, zone: b`, 2 has
/// `zone: c` alone.
async fn labelled(name: &str) -> Stand {
    let labels: [&[(&str, &str)]; 3] = [
        &[("tier", "gold"), ("zone", "a")],
        &[("tier", "silver"), ("example.com/zone", "b"), ("zone", "b")],
        &[("zone", "c")],
    ];
    let pods = labels.iter().enumerate().flat_map(|(n, labels)| {
        let with_labels = |mut pod: Pod| {
            let labels = labels
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            pod.labels.extend(labels);
            pod
        };
        pair_in(&n.to_string(), &[]).into_iter().map(with_labels)
    });
    stand(name, pods.collect(), &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn external_filter_keeps_a_request_to_the_pods_it_selects() {
    let stand = labelled("external-filter").await;
    for (selector, allowed) in [
        ("tier=gold", "0"),
        ("tier==gold", "0"),
        (" tier = gold ", "0"),
        ("tier!=gold", "12"),
        ("tier in (gold, silver)", "01"),
        ("tier in (silver)", "1"),
        ("tier notin (gold)", "12"),
        ("tier notin (gold,silver)", "2"),
        ("tier", "01"),
        ("!tier", "2"),
        ("example.com/zone=b", "1"),
        ("zone=b,tier", "1"),
        ("zone notin (a), tier!=silver", "2"),
        ("role-name in (prefill,decode),zone=c", "2"),
        ("", "012"),
    ] {
        for n in 0..6 {
            let call = chat(&text(n, 200)).header("external-filter", selector);
            let answer = stand.send(call).await.expect(200);
            let (prefill, _) = served_by_pair(&stand, &answer);
            let number = prefill.trim_start_matches("prefill-");
            assert!(allowed.contains(number), "{selector:?}: {prefill}");
            let call = chat(&text(n, 200)).header("external-filter", selector);
            let call = call.header("routing-strategy", "random");
            let answer = stand.send(call).await.expect(200);
            let pod = served_alone(&stand, &answer);
            let number = pod.trim_start_matches("decode-");
            assert!(allowed.contains(number), "{selector:?}: {pod}");
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn external_filter_that_selects_no_pair_is_an_error_that_says_so() {
    let stand = labelled("external-filter-none").await;
    for selector in [
        "tier=bronze",
        "no-such-label",
        // Half of a pair is none.
        "role-name=prefill",
        "zone=a,zone=b",
    ] {
        let call = chat("x").header("external-filter", selector);
        let answer = stand.send(call).await.expect(503);
        assert_eq!(answer.header("x-error-routing"), "true");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("external-filter"), "{selector}: {message}");
    }
    for selector in [
        "tier in gold",
        "tier in (",
        "=",
        "tier=gold,,",
        "a b",
        "!",
        "tier notin ()x",
    ] {
        let call = chat("x").header("external-filter", selector);
        let answer = stand.send(call).await.expect(503);
        assert_eq!(answer.header("x-error-routing"), "true");
        let message = answer.json()["error"]["message"].to_string();
        println!("{message}");
        assert!(message.contains("external-filter"), "{selector}: {message}");
    }
    let long = format!("tier in ({})", vec!["gold"; 5000].join(","));
    let call = chat("x").header("external-filter", &long);
    stand.send(call).await.expect(503);
    served_by_pair(&stand, &stand.send(chat("goes on")).await.expect(200));
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_per_second_are_counted_across_workers() {
    let pods = pair_in("0", &[FIVE_A_SECOND]);
    let stand = stand("requests-per-second", pods, &[]).await;
    let calls: Vec<_> = (0..60)
        .map(|n| start(&stand, chat(&text(n, 100))))
        .collect();
    let mut answers = Vec::<Answer>::new();
    for call in calls {
        answers.push(call.await.unwrap().unwrap());
    }
    let mut statuses = BTreeMap::<u16, usize>::new();
    answers
        .iter()
        .for_each(|a| *statuses.entry(a.status).or_default() += 1);
    println!("{statuses:?}");
    // At most two windows were touched.
    let served = statuses[&200];
    assert!((5..=10).contains(&served), "{statuses:?}");
    assert_eq!(served + statuses[&429], 60, "{statuses:?}");
    let refused = answers
        .into_iter()
        .find(|a| a.status == 429)
        .unwrap()
        .expect(429);
    assert_eq!(refused.header("x-error-model-rps-exceeded"), "true");
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    let after: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=2).contains(&after), "{after}");
    // A refused request reached no engine.
    assert_eq!(stand.seen("prefill-0").len(), served);

    // A profile without a limit is not counted.
    for n in 0..20 {
        let call = chat(&text(n, 100)).header("config-profile", "free");
        stand.send(call).await.expect(200);
    }
    eventually("the next second is free again", || async {
        let answer = stand.send(chat("again")).await;
        if answer.status == 200 {
            Ok(())
        } else {
            Err(answer.shown())
        }
    })
    .await;
    stand.settled(Duration::from_secs(5)).await;
}
