//! Both legs at once, by what `/server_info` tells.

use pd_engine_sim::{Fault, FaultKind, On, Transceiver};
use serde_json::{Value, json};

use crate::wire::{CHAT, COMPLETIONS, get, post, until};
use crate::worker::{
    ID, chat, completion, context, endpoint, first, hash, idle, refused, send, worker, workers,
};

#[tokio::test]
async fn server_info_tells_the_endpoint_or_nothing() {
    let ctx = worker("ctx", |_| {}).await;
    let info = get(ctx.address(), "/server_info").await.json();
    let params = &info["disaggregated_params"];
    assert_eq!(params["ctx_dp_rank"], 0);
    assert_eq!(params["ctx_info_endpoint"].as_array().unwrap().len(), 1);
    let before = endpoint(&ctx).await;
    ctx.restart();
    crate::wire::until_refuses(&ctx, false).await;
    assert_ne!(endpoint(&ctx).await, before);
    let cpp = worker("cpp", |config| config.transceiver = Transceiver::Cpp).await;
    let info = get(cpp.address(), "/server_info").await;
    assert_eq!(info.body, r#"{"disaggregated_params":{}}"#);
    let error = refused(&cpp, CHAT, &context(chat(json!({})), ID, 1)).await;
    assert!(error.contains("transceiver_runtime: PYTHON"), "{error}");
    assert_eq!(ctx.log().len(), 3, "look-ups are in the log");
}

#[tokio::test]
async fn a_look_up_can_be_slow_or_fail() {
    let ctx = worker("ctx", |_| {}).await;
    let kind = FaultKind::Status {
        code: 500,
        body: None,
        headers: Default::default(),
    };
    assert!(ctx.inject(Fault::next(1, On::Info, kind)));
    assert_eq!(get(ctx.address(), "/server_info").await.status, 500);
    let stall = FaultKind::StallBeforeHeaders {
        ms: Some(50),
        after_work: false,
    };
    assert!(ctx.inject(Fault::next(1, On::Info, stall)));
    let begun = std::time::Instant::now();
    assert_eq!(get(ctx.address(), "/server_info").await.status, 200);
    assert!(begun.elapsed().as_millis() >= 50);
}

#[tokio::test]
async fn the_legs_meet_whichever_comes_first() {
    let (ctx, dec) = workers(|config| config.tokens = 3).await;
    let endpoint = endpoint(&ctx).await;
    for (at, (path, body, stream)) in [
        (CHAT, chat(json!({})), false),
        (CHAT, chat(json!({})), true),
        (COMPLETIONS, completion(json!({})), true),
    ]
    .into_iter()
    .enumerate()
    {
        let id = ID + at as u64;
        let prefill = context(body.clone(), id, 1);
        let mut decode = first(body.clone(), id, &endpoint);
        decode["stream"] = json!(stream);
        let (earlier, later) = if at == 1 {
            ((&dec, &decode), (&ctx, &prefill))
        } else {
            ((&ctx, &prefill), (&dec, &decode))
        };
        let sent = send(earlier.0, path, earlier.1);
        until(&ctx, |s| s.rooms.rooms_open == 1).await;
        assert!(!sent.is_finished());
        let later = post(later.0.address(), path, later.1).await;
        let earlier = sent.await.unwrap();
        let (c, g) = if at == 1 {
            (later, earlier)
        } else {
            (earlier, later)
        };
        assert_eq!((c.status, g.status), (200, 200), "{c:?} {g:?}");
        let identity = g.identity();
        assert_eq!(
            (identity.kv, identity.from),
            (Some(hash(&body)), Some(id.to_string()))
        );
        idle([&ctx, &dec]).await;
    }
    let (c, g) = (ctx.state(), dec.state());
    assert_eq!(
        (c.rooms.rooms_done, c.kv.kv_taken, c.kv.computed_for_others),
        (3, 3, 3)
    );
    assert_eq!((g.kv.pulled, g.aborted, c.aborted), (3, 0, 0));
}

#[tokio::test]
async fn a_leg_alone_fails_after_its_time() {
    let (ctx, dec) = workers(|config| config.lease_ms = 100).await;
    let endpoint = endpoint(&ctx).await;
    let error = refused(&ctx, CHAT, &context(chat(json!({})), ID, 1)).await;
    assert_eq!(error, "Error in kv cache transfer for context requests");
    let error = refused(&dec, CHAT, &first(chat(json!({})), ID, &endpoint)).await;
    assert_eq!(error, "Error in kv cache transfer for generation requests");
    idle([&ctx, &dec]).await;
    assert_eq!(
        (
            ctx.state().rooms.rooms_timed_out,
            dec.state().rooms.rooms_timed_out
        ),
        (1, 1)
    );
}

#[tokio::test]
async fn a_context_that_fails_takes_its_generation_with_it() {
    let (ctx, dec) = workers(|config| config.prefill_delay_ms = 600_000.0).await;
    let endpoint = endpoint(&ctx).await;
    let prefill = send(&ctx, CHAT, &context(chat(json!({})), ID, 1));
    let decode = send(&dec, CHAT, &first(chat(json!({})), ID, &endpoint));
    until(&ctx, |s| s.rooms.rooms_met == 1).await;
    prefill.abort();
    let failed = decode.await.unwrap();
    assert_eq!(failed.status, 400);
    assert_eq!(failed.json()["type"], "BadRequestError");
    idle([&ctx, &dec]).await;
    assert_eq!(
        (ctx.state().aborted, ctx.state().rooms.rooms_failed),
        (1, 1)
    );
}

#[tokio::test]
async fn a_stale_endpoint_is_like_a_context_that_is_not_there() {
    let (ctx, dec) = workers(|config| config.lease_ms = 150).await;
    let stale = endpoint(&ctx).await;
    ctx.restart();
    crate::wire::until_refuses(&ctx, false).await;
    let prefill = send(&ctx, CHAT, &context(chat(json!({})), ID, 1));
    let error = refused(&dec, CHAT, &first(chat(json!({})), ID, &stale)).await;
    assert!(error.starts_with("Error in kv cache transfer"), "{error}");
    assert_eq!(prefill.await.unwrap().status, 400);
    assert_eq!(ctx.state().rooms.rooms_met, 0);
}

#[tokio::test]
async fn the_list_of_endpoints_is_no_endpoint() {
    let (ctx, dec) = workers(|_| {}).await;
    let list: Value = json!([endpoint(&ctx).await]);
    let error = refused(&dec, CHAT, &first(chat(json!({})), ID, &list)).await;
    assert!(
        error.contains("ctx_info_endpoint: Input should be a valid string"),
        "{error}"
    );
}
