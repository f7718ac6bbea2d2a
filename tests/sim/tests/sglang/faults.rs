//! Injected faults, each on either leg.

use std::collections::BTreeMap;
use std::io;

use pd_engine_sim::{Cut, Fault, FaultKind, On};
use serde_json::{Value, json};

use crate::pair::{Pair, answer, leg, send};
use crate::wire::{Answer, CHAT, get, try_post, until, until_refuses};

/// Both legs of a request; their answers or how their connections ended.
async fn both(pair: &Pair, port: u16, room: u64, stream: bool) -> [io::Result<Answer>; 2] {
    let (prefill, decode) = (
        leg(port, room, json!({})),
        leg(port, room, json!({ "stream": stream })),
    );
    let (prefill, decode) = tokio::join!(
        try_post(pair.p.address(), CHAT, &prefill),
        try_post(pair.d.address(), CHAT, &decode)
    );
    [prefill, decode]
}

#[tokio::test]
async fn a_prefill_that_is_refused_leaves_its_decode_waiting_until_the_timeout() {
    let (pair, port) = Pair::start(|config| config.lease_ms = 150).await;
    let status = |code| FaultKind::Status {
        code,
        body: None,
        headers: BTreeMap::from([("retry-after".to_owned(), "1".to_owned())]),
    };
    let reset = FaultKind::ResetBeforeHeaders {
        how: Cut::Rst,
        after_ms: 0,
        after_work: false,
    };
    for (room, kind, code) in [(1, status(503), Some(503)), (2, reset, None)] {
        assert!(pair.p.inject(Fault::next(1, On::Prefill, kind)));
        let [prefill, decode] = both(&pair, port, room, false).await;
        match code {
            Some(code) => {
                let prefill = prefill.unwrap();
                assert_eq!(
                    (prefill.status, &prefill.headers["retry-after"]),
                    (code, &"1".to_owned())
                );
            }
            None => assert!(prefill.is_err()),
        }
        assert_eq!(decode.unwrap().status, 500);
        pair.idle().await;
    }
    assert_eq!(pair.d.state().rooms.rooms_timed_out, 2);
}

#[tokio::test]
async fn a_prefill_can_fail_after_its_kv_was_taken() {
    let (pair, port) = Pair::start(|_| {}).await;
    let reset = FaultKind::ResetBeforeHeaders {
        how: Cut::Fin,
        after_ms: 0,
        after_work: true,
    };
    assert!(pair.p.inject(Fault::next(1, On::Prefill, reset)));
    let [prefill, decode] = both(&pair, port, 1, false).await;
    assert!(prefill.is_err());
    assert_eq!(decode.unwrap().status, 200);
    assert!(
        pair.p
            .inject(Fault::next(1, On::Prefill, FaultKind::BadJson))
    );
    let [prefill, decode] = both(&pair, port, 2, false).await;
    let prefill = prefill.unwrap();
    assert_eq!(prefill.status, 200);
    assert!(serde_json::from_str::<Value>(&prefill.body).is_err());
    assert_eq!(decode.unwrap().status, 200);
    pair.idle().await;
}

#[tokio::test]
async fn a_decode_stream_stalls_breaks_or_errs_where_it_is_told() {
    let (pair, port) = Pair::start(|config| config.tokens = 4).await;
    let reset = |after_chunks| FaultKind::ResetMidStream {
        after_chunks,
        how: Cut::Rst,
    };
    for (room, kind, tokens, error) in [
        (1, reset(0), 0, false),
        (2, reset(2), 2, false),
        (3, FaultKind::ErrorMidStream { after_chunks: 0 }, 0, true),
        (4, FaultKind::ErrorMidStream { after_chunks: 3 }, 3, true),
    ] {
        assert!(pair.d.inject(Fault::next(1, On::Decode, kind)));
        let [prefill, decode] = both(&pair, port, room, true).await;
        assert_eq!(prefill.unwrap().status, 200);
        let decode = decode.unwrap();
        assert_eq!(decode.status, 200);
        let events = decode.events();
        let sent = events
            .iter()
            .filter(|e| e.contains("[request=") || e.contains(" t"))
            .count();
        assert_eq!(sent, tokens, "{decode:?}");
        assert_eq!(decode.broken.is_some(), !error);
        assert_eq!(events.iter().any(|e| e.contains("\"error\"")), error);
        pair.idle().await;
    }
    let stall = FaultKind::StallMidStream {
        after_chunks: 1,
        ms: None,
    };
    assert!(pair.d.inject(Fault::next(1, On::Decode, stall)));
    let prefill = send(&pair.p, &leg(port, 9, json!({})));
    let mut wire = crate::wire::Wire::open(pair.d.address()).await;
    wire.post(CHAT, &leg(port, 9, json!({"stream": true})))
        .await;
    wire.read_until("[request=").await;
    assert_eq!(answer(prefill).await.status, 200);
    assert_eq!(pair.d.state().running, 1);
    drop(wire);
    pair.idle().await;
    assert_eq!(pair.d.state().aborted, 1);
}

#[tokio::test]
async fn a_hanging_decode_can_be_aborted_by_nobody_but_its_client() {
    let (pair, port) = Pair::start(|_| {}).await;
    let hang = FaultKind::StallBeforeHeaders {
        ms: None,
        after_work: false,
    };
    assert!(pair.d.inject(Fault::next(1, On::Decode, hang)));
    let decode = send(&pair.d, &leg(port, 1, json!({})));
    until(&pair.d, |s| s.running == 1).await;
    let call = json!({"rid": "rid-1"});
    assert_eq!(
        crate::wire::post(pair.d.address(), "/abort_request", &call)
            .await
            .status,
        200
    );
    assert_eq!(pair.d.state().aborts.aborted_by_call, 0);
    decode.abort();
    pair.idle().await;
}

#[tokio::test]
async fn an_engine_refuses_comes_back_and_dies() {
    let (pair, port) = Pair::start(|_| {}).await;
    pair.d.refuse(false);
    until_refuses(&pair.d, true).await;
    pair.d.resume();
    until_refuses(&pair.d, false).await;
    assert!(pair.p.inject(Fault::next(1, On::Prefill, FaultKind::Die)));
    let decode = send(&pair.d, &leg(port, 1, json!({})));
    until(&pair.p, |s| s.rooms.rooms_open == 1).await;
    assert!(
        try_post(pair.p.address(), CHAT, &leg(port, 1, json!({})))
            .await
            .is_err()
    );
    assert_eq!(answer(decode).await.status, 500);
    assert_eq!(pair.p.state().deaths, 1);
    pair.p.restart();
    until_refuses(&pair.p, false).await;
    let [prefill, decode] = both(&pair, port, 2, false).await;
    assert_eq!(
        (prefill.unwrap().status, decode.unwrap().status),
        (200, 200)
    );
    pair.idle().await;
}

#[tokio::test]
async fn scrapes_have_faults_of_their_own() {
    let (pair, _) = Pair::start(|_| {}).await;
    let status = FaultKind::Status {
        code: 500,
        body: None,
        headers: BTreeMap::new(),
    };
    assert!(pair.p.inject(Fault::next(2, On::Scrape, status)));
    assert_eq!(get(pair.p.address(), "/metrics").await.status, 500);
    assert_eq!(get(pair.p.address(), "/health").await.status, 500);
    assert_eq!(get(pair.p.address(), "/metrics").await.status, 200);
}

#[tokio::test]
async fn a_prefill_may_fail_late_while_its_decode_has_the_kv() {
    let (pair, port) = Pair::start(|_| {}).await;
    for (room, after_work, taken) in [(1, true, 1), (2, false, 1)] {
        let kind = FaultKind::LateStatus {
            code: 500,
            body: "late".to_owned(),
            after_ms: 100,
            after_work,
        };
        assert!(pair.p.inject(Fault::next(1, On::Prefill, kind)));
        let decode = send(&pair.d, &leg(port, room, json!({})));
        let prefill = answer(send(&pair.p, &leg(port, room, json!({})))).await;
        assert_eq!((prefill.status, prefill.body.as_str()), (500, "late"));
        assert_eq!(pair.d.state().kv.pulled, taken);
        if after_work {
            assert_eq!(answer(decode).await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_stream_that_stalls_before_its_headers_after_work_has_taken_the_kv() {
    let (pair, port) = Pair::start(|_| {}).await;
    let kind = FaultKind::StallBeforeHeaders {
        ms: Some(300),
        after_work: true,
    };
    assert!(pair.d.inject(Fault::next(1, On::Decode, kind)));
    let start = std::time::Instant::now();
    let decode = send(&pair.d, &leg(port, 1, json!({ "stream": true })));
    let prefill = answer(send(&pair.p, &leg(port, 1, json!({})))).await;
    assert_eq!((prefill.status, pair.d.state().kv.pulled), (200, 1));
    assert!(start.elapsed().as_millis() < 300);
    let answered = answer(decode).await;
    assert!(answered.status == 200 && start.elapsed().as_millis() >= 300);
}
