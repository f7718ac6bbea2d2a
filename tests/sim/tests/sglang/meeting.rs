//! Both legs in their room, and legs that are alone in it.

use pd_engine_sim::{PaceChange, Role};
use serde_json::json;

use crate::pair::{Pair, answer, free_port, hash, leg, send, sglang};
use crate::wire::{CHAT, Wire, until};

#[tokio::test]
async fn a_pair_meets_whichever_leg_comes_first() {
    let (pair, port) = Pair::start(|config| config.tokens = 3).await;
    for (room, decode_first, stream) in [
        (1, false, false),
        (2, true, false),
        (3, false, true),
        // The largest one, which no double holds.
        (i64::MAX as u64, true, true),
    ] {
        let decode = leg(port, room, json!({"stream": stream}));
        let prefill = leg(port, room, json!({"max_tokens": 1}));
        let (first, second) = if decode_first {
            ((&pair.d, &decode), (&pair.p, &prefill))
        } else {
            ((&pair.p, &prefill), (&pair.d, &decode))
        };
        let sent = send(first.0, first.1);
        until(&pair.p, |s| s.rooms.rooms_open == 1).await;
        assert!(!sent.is_finished(), "a leg alone waits");
        let later = answer(send(second.0, second.1)).await;
        let earlier = answer(sent).await;
        let (p, d) = if decode_first {
            (later, earlier)
        } else {
            (earlier, later)
        };
        assert_eq!((p.status, d.status), (200, 200), "{p:?} {d:?}");
        assert_eq!(p.json()["usage"]["completion_tokens"], 1);
        assert_eq!(p.json()["choices"][0]["finish_reason"], "length");
        let identity = d.identity();
        let (prompt, rid) = (hash(&decode), format!("rid-{room}"));
        assert_eq!((identity.request, identity.engine), (rid, "d".to_owned()));
        assert_eq!((identity.prompt, identity.kv), (prompt, Some(prompt)));
        assert_eq!(identity.from, Some(room.to_string()));
    }
    pair.idle().await;
    let (p, d) = (pair.p.state(), pair.d.state());
    assert_eq!((p.rooms.rooms_met, p.rooms.rooms_done), (4, 4));
    assert_eq!((p.kv.computed_for_others, p.kv.kv_taken), (4, 4));
    assert_eq!((d.kv.pulled, d.kv.computed_locally), (4, 0));
    assert_eq!((p.aborted, d.aborted, p.rooms.rooms_failed), (0, 0, 0));
    let log = pair.p.log();
    assert_eq!(log.len(), 4);
    assert_eq!((log[0].held.running, log[0].held.rooms_open), (1, 0));
}

#[tokio::test]
async fn the_prefill_answers_only_when_its_kv_was_taken() {
    let (pair, port) = Pair::start(|config| config.transfer_delay_ms = 600_000.0).await;
    let prefill = send(&pair.p, &leg(port, 5, json!({})));
    let decode = send(&pair.d, &leg(port, 5, json!({})));
    let state = until(&pair.p, |s| s.kv.kv_held == 1).await;
    assert_eq!((state.rooms.rooms_open, state.running), (1, 0));
    assert!(state.kv.kv_used_blocks > 0);
    assert!(!prefill.is_finished() && !decode.is_finished());
}

#[tokio::test]
async fn a_leg_alone_keeps_its_room_until_its_timeout() {
    let (pair, port) = Pair::start(|config| config.lease_ms = 150).await;
    let prefill = send(&pair.p, &leg(port, 1, json!({})));
    let decode = send(&pair.d, &leg(port, 2, json!({})));
    until(&pair.p, |s| s.rooms.rooms_open == 2).await;
    for (sent, state) in [(prefill, "Bootstrapping"), (decode, "WaitingForInput")] {
        let failed = answer(sent).await;
        assert_eq!(failed.status, 500);
        let error = failed.json();
        assert_eq!(
            (&error["object"], &error["type"]),
            (&json!("error"), &json!("500"))
        );
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!(500), &json!(null))
        );
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("timed out after 0.1s in KVPoll.{state}")),
            "{message}"
        );
    }
    pair.idle().await;
    let (p, d) = (pair.p.state(), pair.d.state());
    assert_eq!((p.rooms.rooms_timed_out, d.rooms.rooms_timed_out), (1, 1));
    assert_eq!((p.rooms.rooms_met, p.kv.computed_for_others), (0, 0));
}

#[tokio::test]
async fn a_room_is_for_one_pair_and_can_be_used_again() {
    let (pair, port) = Pair::start(|config| config.lease_ms = 60_000).await;
    let body = |rid: &str| leg(port, 9, json!({ "rid": rid }));
    let first = send(&pair.p, &body("a"));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    let second = send(&pair.p, &body("b"));
    until(&pair.p, |s| s.rooms.rooms_duplicate == 1).await;
    assert_eq!(answer(send(&pair.d, &body("c"))).await.status, 200);
    assert_eq!(answer(first).await.status, 200);
    assert!(!second.is_finished(), "nobody comes for the second");
    second.abort();
    pair.idle().await;
    let prefill = send(&pair.p, &body("a"));
    assert_eq!(answer(send(&pair.d, &body("c"))).await.status, 200);
    assert_eq!(answer(prefill).await.status, 200);
}

#[tokio::test]
async fn a_leg_whose_client_leaves_fails_the_other() {
    let (pair, port) = Pair::start(|config| config.prefill_delay_ms = 600_000.0).await;
    for (room, prefill_leaves) in [(1, true), (2, false)] {
        let prefill = send(&pair.p, &leg(port, room, json!({})));
        let decode = send(&pair.d, &leg(port, room, json!({})));
        until(&pair.p, |s| s.running == 1).await;
        let (leaves, stays) = if prefill_leaves {
            (prefill, decode)
        } else {
            (decode, prefill)
        };
        if prefill_leaves {
            leaves.abort();
            let failed = answer(stays).await;
            assert_eq!(failed.status, 500);
            assert!(
                failed.body.contains("the prefill request was aborted"),
                "{failed:?}"
            );
        } else {
            // Noticed when the KV is to be taken.
            leaves.abort();
            until(&pair.d, |s| s.running + s.waiting == 0).await;
            until(&pair.p, |s| s.rooms.rooms_failed == 2).await;
            stays.abort();
        }
        pair.idle().await;
    }
    assert_eq!((pair.p.state().aborted, pair.d.state().aborted), (2, 1));
}

#[tokio::test]
async fn a_decode_leg_that_left_fails_the_prefill_once_it_is_computed() {
    let (pair, port) = Pair::start(|config| config.prefill_delay_ms = 200.0).await;
    let prefill = send(&pair.p, &leg(port, 3, json!({})));
    let decode = send(&pair.d, &leg(port, 3, json!({})));
    until(&pair.p, |s| s.running == 1).await;
    decode.abort();
    let failed = answer(prefill).await;
    assert_eq!(failed.status, 500);
    assert!(
        failed.body.contains("the decode request was aborted"),
        "{failed:?}"
    );
    pair.idle().await;
}

#[tokio::test]
async fn a_wrong_bootstrap_address_fails_the_decode_and_leaves_the_prefill_waiting() {
    let (pair, port) = Pair::start(|config| config.closed_port_delay_ms = 50).await;
    let nowhere = free_port();
    let prefill = send(&pair.p, &leg(port, 4, json!({})));
    let cases = [
        json!({ "bootstrap_port": nowhere }),
        json!({ "bootstrap_host": null }),
        // The engine's own port is no bootstrap server.
        json!({ "bootstrap_port": pair.p.address().port() }),
    ];
    for more in cases {
        let failed = answer(send(&pair.d, &leg(port, 4, more))).await;
        assert_eq!(failed.status, 500, "{failed:?}");
        assert!(
            failed
                .body
                .contains("Could not fetch prefill parallel info"),
            "{failed:?}"
        );
    }
    assert!(!prefill.is_finished());
    assert_eq!(pair.d.state().kv.pulls_failed, 3);
    prefill.abort();
    pair.idle().await;
}

#[tokio::test]
async fn a_killed_prefill_engine_fails_the_decode() {
    let (pair, port) = Pair::start(|_| {}).await;
    let decode = send(&pair.d, &leg(port, 1, json!({"stream": true})));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    pair.p.kill("test");
    let failed = answer(decode).await;
    assert_eq!((failed.status, failed.broken), (200, None));
    let events = failed.events();
    let error: serde_json::Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!(error["error"]["code"], 500);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("Lost connection with prefill instance"),
        "{message}"
    );
    assert_eq!(events[1], "[DONE]");
    pair.idle().await;
}

#[tokio::test]
async fn an_engine_that_reads_doubles_rounds_the_room() {
    let port = free_port();
    let p = sglang(Role::Prefill, |config| {
        config.side_channel_port = port;
        config.rooms_as_doubles = true;
    });
    let (p, d) = (p.await, sglang(Role::Decode, |_| {}).await);
    for (room, met) in [((1u64 << 53) - 1, true), ((1 << 53) + 1, false)] {
        let prefill = send(&p, &leg(port, room, json!({})));
        let decode = send(&d, &leg(port, room, json!({})));
        if met {
            assert_eq!(answer(prefill).await.status, 200);
            assert_eq!(answer(decode).await.status, 200);
        } else {
            // Each in a room of its own.
            until(&p, |s| s.rooms.rooms_open == 2).await;
        }
    }
}

#[tokio::test]
async fn an_early_header_is_an_option() {
    let (pair, port) = Pair::start(|config| config.tokens = 2).await;
    let late = sglang(Role::Decode, |config| config.early_headers = false).await;
    for (engine, room, early) in [(&pair.d, 1, true), (&late, 2, false)] {
        let mut wire = Wire::open(engine.address()).await;
        wire.post(CHAT, &leg(port, room, json!({"stream": true})))
            .await;
        until(&pair.p, |s| s.rooms.rooms_open == 1).await;
        if early {
            wire.read_until("\r\n\r\n").await;
        } else {
            engine
                .set_pace(PaceChange {
                    lease_ms: Some(100),
                    ..PaceChange::default()
                })
                .unwrap();
        }
        let prefill = answer(send(&pair.p, &leg(port, room, json!({})))).await;
        assert_eq!(prefill.status, 200);
        let answer = wire.answer().await.unwrap();
        assert_eq!(answer.events().last(), Some(&"[DONE]"));
    }
    // A failure before the first token is a plain error then.
    let alone = answer(send(&late, &leg(port, 3, json!({"stream": true})))).await;
    assert_eq!((alone.status, &alone.json()["code"]), (500, &json!(500)));
}
