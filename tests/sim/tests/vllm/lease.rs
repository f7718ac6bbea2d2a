//! Prefilled KV that waits: leases, room, and the ways it is freed early.

use std::time::Duration;

use pd_engine_sim::{PaceChange, State};
use serde_json::{Value, json};

use crate::client::{
    CHAT, Wire, chat, decode, engine, merge, pair, post, prefill, prefill_of, until,
};

#[tokio::test]
async fn kv_nobody_takes_is_freed_when_its_lease_ends() {
    let p = engine("p", |c| c.lease_ms = 100).await;
    let begun = std::time::Instant::now();
    let kv = prefill(&p).await;
    let state = until(&p, |s| s.kv.kv_held == 0).await;
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!((state.kv.kv_expired, state.kv.kv_taken), (1, 0));
    assert_eq!(state.kv.kv_used_blocks, 0);
    let d = engine("d", |_| {}).await;
    assert_eq!(decode(&d, &kv).await.unwrap().status, 200);
    assert_eq!(p.state().kv.after_expiry, 1);
}

#[tokio::test]
async fn a_shorter_lease_applies_to_kv_held_from_then_on() {
    let p = engine("p", |_| {}).await;
    prefill(&p).await;
    let change = PaceChange {
        lease_ms: Some(50),
        ..PaceChange::default()
    };
    p.set_pace(change).unwrap();
    prefill(&p).await;
    let state = until(&p, |s| s.kv.kv_expired == 1).await;
    assert_eq!(state.kv.kv_held, 1);
}

#[tokio::test]
async fn orphans_keep_a_prefill_waiting_until_a_lease_ends() {
    // Room for one prompt of three blocks.
    let p = engine("p", |c| {
        c.num_blocks = 5;
        c.lease_ms = 150;
    })
    .await;
    prefill(&p).await;
    let address = p.address();
    let second =
        tokio::spawn(async move { post(address, CHAT, &prefill_of(chat(json!({})))).await });
    let state = until(&p, |s| s.waiting == 1).await;
    assert_eq!((state.running, state.kv.kv_held), (0, 1));
    assert_eq!(second.await.unwrap().status, 200);
    assert_eq!(p.state().kv.kv_expired, 1);
}

#[tokio::test]
async fn a_decode_in_the_queue_keeps_the_lease_alive() {
    let p = engine("p", |c| c.lease_ms = 1000).await;
    let d = engine("d", |c| {
        c.max_num_seqs = 1;
        c.lease_ms = 1000;
        c.token_interval_ms = 3_600_000.0;
    })
    .await;
    // Occupies the only slot.
    let mut busy = Wire::open(d.address()).await;
    busy.post(CHAT, &chat(json!({}))).await;
    until(&d, |s| s.running == 1).await;
    let kv = prefill(&p).await;
    let mut queued = Wire::open(d.address()).await;
    let body = chat(json!({"max_tokens": 1, "kv_transfer_params": kv}));
    queued.post(CHAT, &body).await;
    until(&d, |s| s.waiting == 1).await;
    // An orphan of the same age shows that a lease has passed.
    let orphan_p = engine("p2", |c| c.lease_ms = 1500).await;
    prefill(&orphan_p).await;
    until(&orphan_p, |s| s.kv.kv_expired == 1).await;
    assert_eq!(p.state().kv.kv_held, 1);
    drop(busy);
    let answer = queued.answer().await.unwrap();
    assert_eq!(answer.identity().kv, Some(answer.identity().prompt));
    assert_eq!(p.state().kv.kv_expired, 0);
}

#[tokio::test]
async fn a_decode_refused_by_the_serving_layer_frees_the_kv_it_names() {
    let (p, d) = pair().await;
    let cases = [
        (
            json!({"temperature": -1}),
            400,
            "BadRequestError",
            "temperature",
        ),
        (json!({"model": "unknown"}), 404, "NotFoundError", "model"),
    ];
    for (at, (more, status, kind, param)) in cases.into_iter().enumerate() {
        let mut body = chat(json!({"kv_transfer_params": prefill(&p).await}));
        merge(&mut body, more);
        let answer = post(d.address(), CHAT, &body).await;
        assert_eq!(answer.status, status);
        let error = &answer.json()["error"];
        assert_eq!(error["type"], kind);
        assert_eq!(error["param"], param);
        assert_eq!(error["code"], status);
        let freed = at as u64 + 1;
        let state = until(&p, |s| s.kv.kv_freed_by_refusal == freed).await;
        assert_eq!((state.kv.kv_held, state.kv.kv_taken), (0, 0));
    }
}

#[tokio::test]
async fn freeing_kv_twice_counts_and_reads_nothing() {
    let (p, d) = pair().await;
    let body = chat(json!({"temperature": -1, "kv_transfer_params": prefill(&p).await}));
    for claims in [(1, 0), (1, 1)] {
        assert_eq!(post(d.address(), CHAT, &body).await.status, 400);
        let of = |state: &State| (state.kv.kv_freed_by_refusal, state.kv.after_expiry);
        until(&p, |state| of(state) == claims).await;
    }
    assert_eq!(p.state().kv.stale_pulls, 0);
}

#[tokio::test]
async fn a_decode_refused_by_the_schema_frees_nothing() {
    let (p, d) = pair().await;
    let mut body = chat(json!({"kv_transfer_params": prefill(&p).await}));
    merge(&mut body, json!({"temperature": "warm"}));
    let answer = post(d.address(), CHAT, &body).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["type"], "Bad Request");
    assert_eq!(answer.json()["error"]["param"], "body.temperature");
    // The next claim arrives after whatever the refusal would have sent.
    assert_eq!(decode(&d, &prefill(&p).await).await.unwrap().status, 200);
    let state = p.state().kv;
    assert_eq!((state.kv_held, state.kv_freed_by_refusal), (1, 0));
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_frees_the_blocks() {
    let p = engine("p", |c| c.prefill_delay_ms = 3_600_000.0).await;
    for stream in [false, true] {
        let mut body = prefill_of(chat(json!({})));
        merge(&mut body, json!({"stream": stream}));
        let mut wire = Wire::open(p.address()).await;
        wire.post(CHAT, &body).await;
        until(&p, |s| s.running == 1 && s.kv.kv_used_blocks == 3).await;
        drop(wire);
        let state = until(&p, |s| s.running == 0).await;
        assert_eq!((state.kv.kv_used_blocks, state.kv.kv_held), (0, 0));
    }
    assert_eq!(p.state().aborted, 2);
}

#[tokio::test]
async fn a_client_that_leaves_before_the_pull_frees_the_kv() {
    let p = engine("p", |_| {}).await;
    let d = engine("d", |c| c.transfer_delay_ms = 3_600_000.0).await;
    let kv = prefill(&p).await;
    let mut wire = Wire::open(d.address()).await;
    wire.post(CHAT, &chat(json!({"kv_transfer_params": kv})))
        .await;
    until(&d, |s| s.running == 1).await;
    drop(wire);
    let state = until(&p, |s| s.kv.kv_freed_by_abort == 1).await;
    assert_eq!((state.kv.kv_held, state.kv.kv_expired), (0, 0));
    let state = until(&d, |s| s.running == 0).await;
    assert_eq!((state.aborted, state.kv.kv_used_blocks), (1, 0));
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_counts_as_aborted() {
    let (p, d) = pair().await;
    let slow = PaceChange {
        token_interval_ms: Some(3_600_000.0),
        ..PaceChange::default()
    };
    d.set_pace(slow).unwrap();
    let kv = prefill(&p).await;
    let mut wire = Wire::open(d.address()).await;
    let body = chat(json!({"stream": true, "kv_transfer_params": kv}));
    wire.post(CHAT, &body).await;
    wire.read_until("[request=").await;
    assert_eq!(p.state().kv.kv_held, 0);
    drop(wire);
    let state = until(&d, |s| s.aborted == 1).await;
    assert_eq!((state.running, state.kv.kv_used_blocks), (0, 0));
}

#[tokio::test]
async fn stream_left_on_a_prefill_leaks_and_tells_no_parameters() {
    let p = engine("p", |_| {}).await;
    let mut body = prefill_of(chat(json!({})));
    merge(&mut body, json!({"stream": true}));
    let answer = post(p.address(), CHAT, &body).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.body.contains("kv_transfer_params"));
    // Role, the one token, end.
    let events = answer.events();
    assert_eq!(events.len(), 3);
    let only: Value = serde_json::from_str(events[1]).unwrap();
    assert_eq!(only["choices"][0]["finish_reason"], "length");
    assert_eq!(p.state().kv.kv_held, 1);
}
