//! Sessions: what a turn of a conversation is charged, and strategies that keep a session on its
//! pod.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pd_e2e::{Answer, Call, Stand};

use super::policies::{TOKEN_LOAD, charged, finish, start, when};
use super::{all, chat, pair, pair_in, served_alone, stand, text};

/// Caller-owned session.
const KEY: &str = "x-aibrix-session-key";
/// Tokens of every prefill charge beside the prompt's.
const REQUEST_COST: u64 = 3500;

/// A pair that computes prompts slowly enough to look at its ledger.
async fn token_load(name: &str, variables: &[&str]) -> Stand {
    let pods = all(pair(&[TOKEN_LOAD]), |engine| {
        engine.prefill_delay_ms = 300.0
    });
    stand(name, pods, variables).await
}

/// What a prompt of this many bytes is charged beside the fixed cost, under a key if there is one.
async fn tokens_charged(stand: &Stand, key: Option<&str>, bytes: usize) -> u64 {
    let mut call = chat(&text(1, bytes));
    if let Some(key) = key {
        call = call.header(KEY, key);
    }
    let call = start(stand, call);
    let ledgers = when(stand, "the prefill is charged", |ledgers| {
        ledgers.total.prefill_requests == 1
    })
    .await;
    finish(call).await;
    when(stand, "it is given back", |ledgers| {
        ledgers.total == Default::default()
    })
    .await;
    charged(&ledgers, "prefill-0").active_tokens - REQUEST_COST
}

/// Tokens of a whole prompt: a quarter of the body that `chat` makes.
fn whole(bytes: usize) -> u64 {
    let overhead =
        r#"{"model":"my-model","messages":[{"content":"","role":"user"}],"max_tokens":4}"#;
    (overhead.len() + bytes) as u64 / 4
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_a_session_is_charged_what_it_adds() {
    let stand = token_load("session-delta", &[]).await;
    // First turn, growing turns, one of the same size and a shorter one: only growth is a delta.
    for (bytes, expected) in [
        (4_000, whole(4_000)),
        (6_000, whole(6_000) - whole(4_000)),
        (6_400, whole(6_400) - whole(6_000)),
        (6_400, whole(6_400)),
        (2_000, whole(2_000)),
        (2_400, whole(2_400) - whole(2_000)),
    ] {
        assert_eq!(
            tokens_charged(&stand, Some("chat-1"), bytes).await,
            expected,
            "{bytes}"
        );
    }
    // Another session, and requests of none, are charged whole.
    assert_eq!(
        tokens_charged(&stand, Some("chat-2"), 8_000).await,
        whole(8_000)
    );
    assert_eq!(tokens_charged(&stand, None, 8_400).await, whole(8_400));
    assert_eq!(tokens_charged(&stand, None, 8_800).await, whole(8_800));
    // The longest key counts, a longer one does not.
    for (length, second) in [(256, whole(6_000) - whole(4_000)), (257, whole(6_000))] {
        let key = "k".repeat(length);
        assert_eq!(
            tokens_charged(&stand, Some(&key), 4_000).await,
            whole(4_000)
        );
        assert_eq!(
            tokens_charged(&stand, Some(&key), 6_000).await,
            second,
            "{length}"
        );
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_time_to_live_of_zero_turns_the_rule_off() {
    let off = r#"
env:
  - name: AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS
    value: "0"
"#;
    let stand = token_load("session-delta-off", &[off]).await;
    for bytes in [4_000, 6_000, 8_000] {
        assert_eq!(
            tokens_charged(&stand, Some("chat-1"), bytes).await,
            whole(bytes)
        );
    }
}

/// Four pairs; under strategies without phases their decode pods serve.
async fn four_pairs(name: &str) -> Stand {
    let pods = (0..4).flat_map(|n| pair_in(&n.to_string(), &[]));
    stand(name, pods.collect(), &[]).await
}

/// Sends under session affinity with a header.
async fn sticky(stand: &Stand, header: &str, value: &str) -> Answer {
    let call: Call = chat("whose turn is it?").header("routing-strategy", "session-affinity");
    let call = if header.is_empty() {
        call
    } else {
        call.header(header, value)
    };
    let answer = stand.send(call).await.expect(200);
    assert_eq!(answer.header("routing-strategy"), "session-affinity");
    served_alone(stand, &answer);
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issued_session_id_leads_back_to_its_pod() {
    let stand = four_pairs("session-id").await;
    let mut pods = BTreeSet::new();
    for _ in 0..12 {
        let first = sticky(&stand, "", "").await;
        let id = first.header("x-session-id").to_owned();
        assert!(!id.is_empty(), "{}", first.shown());
        pods.insert(first.header("target-pod").to_owned());
        for _ in 0..6 {
            let again = sticky(&stand, "x-session-id", &id).await;
            assert_eq!(again.header("target-pod"), first.header("target-pod"));
        }
    }
    assert!(pods.len() > 1, "sessions are spread: {pods:?}");
    // Only pods of the model can be named: anything else is a new session.
    for forged in [
        "127.0.0.1:1",
        "MTI3LjAuMC4xOjE=",
        "prefill-0",
        "garbage",
        "🎲",
    ] {
        let answer = sticky(&stand, "x-session-id", forged).await;
        assert!(answer.header("target-pod").starts_with("decode-"));
        assert!(!answer.header("x-session-id").is_empty());
    }
    // Other strategies issue none.
    let call = chat("no session").header("routing-strategy", "random");
    assert_eq!(
        stand.send(call).await.expect(200).header("x-session-id"),
        ""
    );
    stand.settled(Duration::from_secs(5)).await;
}

/// The pod of each of 40 session keys, each asked for several times.
async fn homes(stand: &Stand) -> BTreeMap<String, String> {
    let mut homes = BTreeMap::new();
    for n in 0..40 {
        let key = format!("user-{n}");
        for _ in 0..3 {
            let answer = sticky(stand, KEY, &key).await;
            let pod = answer.header("target-pod").to_owned();
            let home = homes.entry(key.clone()).or_insert_with(|| pod.clone());
            assert_eq!(*home, pod, "{key}");
        }
    }
    homes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_key_stays_on_its_pod_and_only_those_of_a_lost_pod_move() {
    let mut stand = four_pairs("session-key").await;
    let before = homes(&stand).await;
    let used: BTreeSet<&String> = before.values().collect();
    assert_eq!(used.len(), 4, "keys are spread: {before:?}");
    let lost = "decode-2";
    stand
        .change_pods(|pods| pods.retain(|pod| pod.roleset.as_deref() != Some("group-2")))
        .await
        .unwrap();
    stand.ready().await;
    let after = homes(&stand).await;
    for (key, pod) in &before {
        if pod == lost {
            assert_ne!(after[key], lost);
        } else {
            assert_eq!(after[key], *pod, "{key} had no reason to move");
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}
