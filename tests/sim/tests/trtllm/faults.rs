//! Injected faults on either leg.

use pd_engine_sim::{Cut, Fault, FaultKind, On};
use serde_json::{Map, Value, json};

use crate::wire::{CHAT, Wire, post, try_post, until};
use crate::worker::{ID, chat, context, generation, idle, send, workers};

#[tokio::test]
async fn a_context_fails_before_and_after_its_work() {
    let (ctx, dec) = workers(|config| config.lease_ms = 100).await;
    let body = context(chat(json!({})), ID, 0);
    for (after_work, computed) in [(false, 0), (true, 1)] {
        let reset = FaultKind::ResetBeforeHeaders {
            how: Cut::Rst,
            after_ms: 0,
            after_work,
        };
        assert!(ctx.inject(Fault::next(1, On::Prefill, reset)));
        assert!(try_post(ctx.address(), CHAT, &body).await.is_err());
        assert_eq!(ctx.state().kv.computed_for_others, computed);
        idle([&ctx, &dec]).await;
    }
    assert_eq!(
        ctx.state().kv.kv_expired,
        1,
        "the KV of the second was held"
    );
    let status = FaultKind::Status {
        code: 500,
        body: None,
        headers: Default::default(),
    };
    assert!(ctx.inject(Fault::next(1, On::Prefill, status)));
    let failed = post(ctx.address(), CHAT, &body).await;
    assert_eq!(
        (failed.status, &failed.json()["type"]),
        (500, &json!("InternalServerError"))
    );
}

#[tokio::test]
async fn hand_over_parameters_can_be_missing_or_changed() {
    let (ctx, dec) = workers(|config| config.lease_ms = 100).await;
    let body = |id| context(chat(json!({})), id, 0);
    assert!(ctx.inject(Fault::next(1, On::Prefill, FaultKind::NoKvParams)));
    let answer = post(ctx.address(), CHAT, &body(ID)).await.json();
    assert_eq!(answer["choices"][0]["disaggregated_params"], json!(null));
    let merge = Map::from_iter([("first_gen_tokens".to_owned(), Value::from("x"))]);
    let kind = FaultKind::KvParams {
        merge,
        remove: vec!["ctx_dp_rank".to_owned()],
    };
    assert!(ctx.inject(Fault::next(1, On::Prefill, kind)));
    let answer = post(ctx.address(), CHAT, &body(ID + 1)).await;
    let params = answer.json()["choices"][0]["disaggregated_params"].clone();
    assert_eq!(params.get("ctx_dp_rank"), None);
    assert_eq!(params["ctx_request_id"].as_u64(), Some(ID + 1));
    let second = generation(chat(json!({})), &answer);
    assert_eq!(post(dec.address(), CHAT, &second).await.status, 400);
    until(&ctx, |s| s.kv.kv_expired == 2).await;
    idle([&ctx, &dec]).await;
}

#[tokio::test]
async fn a_generation_stream_stalls_breaks_or_ends_without_an_event() {
    let (ctx, dec) = workers(|config| config.tokens = 4).await;
    let reset = FaultKind::ResetMidStream {
        after_chunks: 2,
        how: Cut::Rst,
    };
    let error = FaultKind::ErrorMidStream { after_chunks: 1 };
    let stall = FaultKind::StallMidStream {
        after_chunks: 1,
        ms: None,
    };
    for (at, (kind, tokens)) in [(reset, 2), (error, 1), (stall, 1)].into_iter().enumerate() {
        let id = ID + at as u64;
        let answer = post(ctx.address(), CHAT, &context(chat(json!({})), id, 0)).await;
        let mut second = generation(chat(json!({})), &answer);
        second["stream"] = json!(true);
        assert!(dec.inject(Fault::next(1, On::Decode, kind)));
        if at == 2 {
            let mut wire = Wire::open(dec.address()).await;
            wire.post(CHAT, &second).await;
            wire.read_until("[request=").await;
            assert_eq!(dec.state().running, 1);
        } else {
            let broken = post(dec.address(), CHAT, &second).await;
            assert!(broken.broken.is_some());
            let sent = broken.body.matches("\"role\":null").count();
            assert_eq!(sent, tokens, "{broken:?}");
            assert!(!broken.body.contains("error"), "{broken:?}");
        }
        idle([&ctx, &dec]).await;
    }
    assert_eq!(dec.state().aborted, 1);
}

#[tokio::test]
async fn a_generation_whose_client_leaves_frees_everything() {
    let (ctx, dec) = workers(|config| {
        config.tokens = 1000;
        config.token_interval_ms = 20.0;
    })
    .await;
    let answer = post(ctx.address(), CHAT, &context(chat(json!({})), ID, 0)).await;
    let decode = send(&dec, CHAT, &generation(chat(json!({})), &answer));
    until(&dec, |s| s.running == 1 && s.kv.pulled == 1).await;
    decode.abort();
    idle([&ctx, &dec]).await;
    assert_eq!(dec.state().aborted, 1);
}
