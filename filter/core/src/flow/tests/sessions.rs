//! What a turn of a session is charged.

use super::*;
use crate::meters::Meter;

const COST: u64 = 3500;
const TOKEN_LOAD: &str = r#"{"prefillScorePolicy":"token_load"}"#;

/// A chat request of this many prompt tokens as charged (body bytes / 4).
fn body(tokens: usize) -> Vec<u8> {
    let head = r#"{"model":"m","messages":[{"role":"user","content":""#;
    let tail = r#""}]}"#;
    let fill = "x".repeat(tokens * 4 - head.len() - tail.len());
    format!("{head}{fill}{tail}").into_bytes()
}

impl Stage {
    /// Serves a request of a session to its end and gives the prefill charge without the fixed
    /// cost; the decode charge is always the whole prompt.
    fn turn(&mut self, key: &[u8], tokens: usize) -> u64 {
        let mut flow = self.flow_with(&[("x-aibrix-session-key", key)]);
        self.on(&mut flow, Event::Body(&body(tokens)));
        let charged = self.finish(&mut flow);
        assert_eq!(charged.decode_tokens, tokens as u64);
        assert_eq!(charged.active_tokens, charged.kv_tokens);
        charged.kv_tokens - COST
    }

    /// What was charged to a request whose prefill leg is out; ends it.
    fn finish(&mut self, flow: &mut Flow) -> Charged {
        let charged = self.charged();
        let reply = Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        };
        self.on(flow, reply);
        self.on(flow, GONE);
        self.assert_at_rest();
        charged
    }
}

#[test]
fn a_turn_is_charged_what_it_adds_to_the_one_before() {
    for policy in ["token_load", "hybrid_cache_load"] {
        let mut stage = Stage::new(1, &format!(r#"{{"prefillScorePolicy":"{policy}"}}"#));
        assert_eq!(stage.turn(b"a", 100), 100);
        assert_eq!(stage.turn(b"a", 130), 30);
        assert_eq!(stage.turn(b"b", 140), 140, "another session");
        assert_eq!(stage.turn(b"a", 131), 1);
        assert_eq!(stage.turn(b"a", 131), 131, "no growth");
        assert_eq!(stage.turn(b"a", 50), 50, "a shorter prompt");
        assert_eq!(stage.turn(b"a", 80), 30);
        assert_eq!(stage.turn(b"", 90), 90, "no key");
        stage.now_ms += 1_801_000;
        assert_eq!(stage.turn(b"a", 200), 200, "forgotten");
        assert_eq!(stage.turn(b"a", 210), 10);
    }
}

#[test]
fn growth_of_a_session_comes_before_what_the_prefix_index_knows() {
    // Two pairs: with one there is no choice to make, and the index is not asked.
    let mut stage = Stage::new(
        2,
        r#"{"prefillScorePolicy":"hybrid_cache_load","tieSeed":1}"#,
    );
    let whole = stage.turn(b"a", 4_000);
    assert_eq!(whole, 4_000);
    // Nearly all of the prompt is in the index; the session did not grow.
    let again = stage.turn(b"a", 4_000);
    assert!(again < 400, "{again}");
    // The session grew, by more than the index misses.
    assert_eq!(stage.turn(b"a", 4_900), 900);
}

#[test]
fn without_key_policy_or_time_to_live_the_store_is_not_asked() {
    let calls = |config: &str, headers: &[(&str, &[u8])]| {
        let mut stage = Stage::new(1, config);
        // The first request also takes the VM's slot.
        let mut calls = (0, 0);
        for tokens in [100, 200] {
            let before = stage.store.calls();
            let mut flow = stage.flow_with(headers);
            stage.on(&mut flow, Event::Body(&body(tokens)));
            let after = stage.store.calls();
            assert_eq!(stage.finish(&mut flow).kv_tokens, COST + tokens as u64);
            calls = (after.0 - before.0, after.1 - before.1);
        }
        let keys = stage.store.keys();
        assert!(!keys.iter().any(|key| key.contains("session")));
        calls
    };
    let keyed: &[(&str, &[u8])] = &[("x-aibrix-session-key", b"a")];
    let bare = calls(TOKEN_LOAD, &[]);
    assert_eq!(
        calls(r#"{"prefillScorePolicy":"least_request"}"#, keyed),
        bare
    );
    let off = r#"{"prefillScorePolicy":"token_load","tokenLoadSessionTTLSeconds":0}"#;
    assert_eq!(calls(off, keyed), bare);

    let mut stage = Stage::new(1, TOKEN_LOAD);
    stage.turn(b"a", 100);
    let before = stage.store.calls();
    let mut flow = stage.flow_with(keyed);
    stage.on(&mut flow, Event::Body(&body(200)));
    let after = stage.store.calls();
    assert_eq!(
        (after.0 - before.0, after.1 - before.1),
        (bare.0 + 1, bare.1 + 1)
    );
}

#[test]
fn a_key_of_257_bytes_is_ignored_and_counted() {
    let mut stage = Stage::new(1, TOKEN_LOAD);
    for tokens in [100, 200] {
        let mut flow = stage.flow_with(&[("x-aibrix-session-key", &[b'k'; 257])]);
        let effects = stage.on(&mut flow, Event::Body(&body(tokens)));
        let counted = |effect: &Effect| matches!(effect, Effect::Count(count) if count.meter == Meter::SessionKeyTooLong);
        assert_eq!(effects.iter().filter(|effect| counted(effect)).count(), 1);
        assert_eq!(stage.finish(&mut flow).kv_tokens, COST + tokens as u64);
    }
    assert_eq!(stage.turn(&[b'k'; 256], 100), 100);
    assert_eq!(stage.turn(&[b'k'; 256], 200), 100);
}

#[test]
fn a_retry_is_charged_like_the_first_try() {
    let mut stage = Stage::new(2, TOKEN_LOAD);
    stage.turn(b"a", 100);
    for failure in [
        Event::CallFailed,
        Event::CallReply {
            status: 503,
            body: b"",
        },
    ] {
        let mut flow = stage.flow_with(&[("x-aibrix-session-key", b"a")]);
        let body = body(150);
        stage.on(&mut flow, Event::Body(&body));
        assert_eq!(stage.charged().kv_tokens, COST + 50);
        stage.on(&mut flow, failure);
        stage.on(&mut flow, Event::Body(&body));
        assert_eq!(stage.finish(&mut flow).kv_tokens, COST + 50);
        // For the next round of this test.
        stage.turn(b"a", 100);
    }
}

#[test]
fn a_request_that_found_no_pod_is_not_remembered() {
    let mut stage = Stage::new(1, TOKEN_LOAD);
    stage.turn(b"a", 100);
    let mut flow = stage.flow_with(&[("x-aibrix-session-key", b"a")]);
    let with = |sequence, ready: bool| {
        let prefill = pod("ns/p0")
            .prefill()
            .roleset("r0")
            .address("10.0.0.1:8000");
        let decode = pod("ns/d0").decode().roleset("r0").address("10.0.0.2:8000");
        let (prefill, decode) = if ready {
            (prefill, decode)
        } else {
            (prefill.unready(), decode.unready())
        };
        let served = model("m").pod(prefill).pod(decode);
        topology(1, sequence).model(served).json()
    };
    accept_topology(&stage.store, &with(2, false), 0).unwrap();
    stage.worker.fleet.refresh(&stage.store);
    let effects = stage.on(&mut flow, Event::Body(&body(150)));
    assert_eq!(reply(&effects).status, 503);
    accept_topology(&stage.store, &with(3, true), 0).unwrap();
    stage.worker.fleet.refresh(&stage.store);
    assert_eq!(stage.turn(b"a", 150), 50);
}
