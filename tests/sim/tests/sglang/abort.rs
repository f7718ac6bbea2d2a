//! `POST /abort_request`.

use pd_engine_sim::{Fault, FaultKind, On};
use serde_json::{Value, json};

use crate::pair::{Pair, answer, leg, send};
use crate::wire::{CHAT, Wire, post, until};

const ABORT: &str = "/abort_request";

#[tokio::test]
async fn a_waiting_decode_is_aborted_and_its_prefill_with_it() {
    let (pair, port) = Pair::start(|config| config.prefill_delay_ms = 100.0).await;
    let prefill = send(&pair.p, &leg(port, 1, json!({})));
    let decode = send(&pair.d, &leg(port, 1, json!({})));
    until(&pair.p, |s| s.rooms.rooms_met == 1).await;
    let aborted = post(pair.d.address(), ABORT, &json!({"rid": "rid-1"})).await;
    assert_eq!((aborted.status, aborted.body.as_str()), (200, ""));
    let failed = answer(decode).await;
    assert_eq!(failed.status, 500);
    assert!(failed.body.contains("Aborted by AbortReq"), "{failed:?}");
    assert_eq!(answer(prefill).await.status, 500);
    pair.idle().await;
    let state = pair.d.state();
    assert_eq!(
        (state.aborts.abort_calls, state.aborts.aborted_by_call),
        (1, 1)
    );
    assert_eq!(state.aborts.abort_rids["rid-1"], 1);
    assert_eq!(state.aborted, 0, "its client did not leave");
}

#[tokio::test]
async fn a_prefill_alone_in_its_room_is_aborted() {
    let (pair, port) = Pair::start(|_| {}).await;
    let prefill = send(&pair.p, &leg(port, 1, json!({})));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    post(pair.p.address(), ABORT, &json!({"rid": "rid-1"})).await;
    assert_eq!(answer(prefill).await.status, 500);
    pair.idle().await;
}

#[tokio::test]
async fn a_generating_request_ends_with_what_it_has() {
    let (pair, port) = Pair::start(|config| {
        config.tokens = 1000;
        config.token_interval_ms = 20.0;
    })
    .await;
    for (room, stream) in [(1, false), (2, true)] {
        let body = leg(port, room, json!({ "stream": stream }));
        let prefill = send(&pair.p, &leg(port, room, json!({})));
        let decode = send(&pair.d, &body);
        assert_eq!(answer(prefill).await.status, 200);
        until(&pair.d, |s| s.running == 1).await;
        let rid = format!("rid-{room}");
        post(pair.d.address(), ABORT, &json!({ "rid": rid })).await;
        let ended = answer(decode).await;
        assert_eq!(ended.status, 200);
        if stream {
            let events = ended.events();
            let last: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
            assert_eq!(last["choices"][0]["finish_reason"], "abort");
            assert_eq!(events.last(), Some(&"[DONE]"));
        } else {
            assert_eq!(ended.json()["choices"][0]["finish_reason"], "abort");
        }
    }
    pair.idle().await;
}

#[tokio::test]
async fn a_hanging_decode_is_aborted_before_its_first_chunk() {
    let (pair, port) = Pair::start(|_| {}).await;
    let silent = FaultKind::StallMidStream {
        after_chunks: 0,
        ms: None,
    };
    let mute = FaultKind::StallBeforeHeaders {
        ms: None,
        after_work: true,
    };
    for (room, stream, kind) in [(1, true, silent), (2, false, mute)] {
        assert!(pair.d.inject(Fault::next(1, On::Decode, kind)));
        let prefill = send(&pair.p, &leg(port, room, json!({})));
        let mut wire = Wire::open(pair.d.address()).await;
        wire.post(CHAT, &leg(port, room, json!({ "stream": stream })))
            .await;
        // The prefill is done, and the decode owes an answer.
        assert_eq!(answer(prefill).await.status, 200);
        assert_eq!(pair.d.state().running, 1);
        if stream {
            let opening = wire.read_until("\n\n").await;
            assert_eq!(opening.matches("data: ").count(), 1, "the role: {opening}");
            assert!(opening.contains(r#""role":"assistant","content":"""#));
        }
        let rid = format!("rid-{room}");
        post(pair.d.address(), ABORT, &json!({ "rid": rid })).await;
        let ended = wire.answer().await.unwrap();
        assert_eq!(ended.status, 200);
        assert!(
            ended.body.contains("\"finish_reason\":\"abort\""),
            "{ended:?}"
        );
        pair.idle().await;
    }
    assert_eq!(pair.d.state().aborts.aborted_by_call, 2);
}

#[tokio::test]
async fn only_a_live_rid_aborts_and_then_by_prefix() {
    let (pair, port) = Pair::start(|_| {}).await;
    let rids = ["a", "a1", "a12", "b"];
    let sent: Vec<_> = rids
        .iter()
        .zip(1..)
        .map(|(rid, room)| send(&pair.p, &leg(port, room, json!({ "rid": rid }))))
        .collect();
    until(&pair.p, |s| s.rooms.rooms_open == 4).await;
    // Not in work, though two begin with it.
    post(pair.p.address(), ABORT, &json!({"rid": ""})).await;
    post(pair.p.address(), ABORT, &json!({"rid": "a11"})).await;
    assert_eq!(pair.p.state().aborts.aborted_by_call, 0);
    post(pair.p.address(), ABORT, &json!({"rid": "a1"})).await;
    until(&pair.p, |s| s.rooms.rooms_open == 2).await;
    post(pair.p.address(), ABORT, &json!({"abort_all": true})).await;
    for sent in sent {
        assert_eq!(answer(sent).await.status, 500);
    }
    pair.idle().await;
    let state = pair.p.state();
    assert_eq!(
        (state.aborts.abort_calls, state.aborts.aborted_by_call),
        (4, 4)
    );
}

#[tokio::test]
async fn two_of_one_rid_at_a_time_are_refused() {
    let (pair, port) = Pair::start(|_| {}).await;
    let first = send(&pair.p, &leg(port, 1, json!({"rid": "same"})));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    let second = answer(send(&pair.p, &leg(port, 2, json!({"rid": "same"})))).await;
    assert_eq!(second.status, 400);
    assert!(
        second.body.contains("Duplicate request ID detected: same"),
        "{second:?}"
    );
    assert!(!first.is_finished());
}

#[tokio::test]
async fn an_abort_can_be_acknowledged_and_not_done_or_fail() {
    let (pair, port) = Pair::start(|_| {}).await;
    let prefill = send(&pair.p, &leg(port, 1, json!({})));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    for code in [200, 500] {
        let kind = FaultKind::Status {
            code,
            body: Some(String::new()),
            headers: Default::default(),
        };
        assert!(pair.p.inject(Fault::next(1, On::Abort, kind)));
        let called = post(pair.p.address(), ABORT, &json!({"rid": "rid-1"})).await;
        assert_eq!(called.status, code);
    }
    let state = pair.p.state();
    assert_eq!(
        (state.aborts.abort_calls, state.aborts.aborted_by_call),
        (2, 0)
    );
    assert!(!prefill.is_finished());
    post(pair.p.address(), ABORT, &json!({"rid": "rid-1"})).await;
    assert_eq!(answer(prefill).await.status, 500);

    let mut wire = Wire::open(pair.p.address()).await;
    wire.post_text(ABORT, "nonsense").await;
    assert_eq!(wire.answer().await.unwrap().status, 400);
    wire.send("GET", ABORT, &[], "").await;
    assert_eq!(wire.answer().await.unwrap().status, 405);
    wire.send("GET", CHAT, &[], "").await;
    assert_eq!(wire.answer().await.unwrap().status, 405);
}
