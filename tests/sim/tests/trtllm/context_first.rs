//! The context worker answers, then the generation worker takes its KV.

use pd_engine_sim::{PaceChange, Transceiver};
use serde_json::json;

use crate::wire::{CHAT, COMPLETIONS, Wire, post, until};
use crate::worker::{
    ID, chat, completion, context, generation, hash, idle, refused, send, worker, workers,
};

#[tokio::test]
async fn the_context_hands_its_kv_over() {
    let (ctx, dec) = workers(|config| config.tokens = 3).await;
    let requests = [
        (CHAT, chat(json!({}))),
        (COMPLETIONS, completion(json!({}))),
    ];
    for (at, (path, body)) in requests.into_iter().enumerate() {
        let id = ID + 2 * at as u64;
        let answer = post(ctx.address(), path, &context(body.clone(), id, 0)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let json = answer.json();
        assert_eq!(json.get("disaggregated_params"), None, "it is the choice's");
        let params = &json["choices"][0]["disaggregated_params"];
        assert_eq!(params["request_type"], "context_only");
        assert_eq!(params["ctx_request_id"].as_u64(), Some(id));
        assert_eq!(params["disagg_request_id"].as_u64(), Some(id));
        assert_eq!(params["first_gen_tokens"].as_array().unwrap().len(), 1);
        assert!(
            params["ctx_info_endpoint"]
                .as_str()
                .unwrap()
                .starts_with("tcp://127.0.0.1:")
        );
        assert_eq!(json["choices"][0]["finish_reason"], "length");
        let ids = json["prompt_token_ids"].as_array().unwrap();
        assert_eq!(json["usage"]["prompt_tokens"], ids.len());
        let state = ctx.state();
        assert_eq!((state.kv.kv_held, state.running), (1, 0));

        let stream = at == 1;
        let mut second = generation(body.clone(), &answer);
        second["stream"] = json!(stream);
        let answer = post(dec.address(), path, &second).await;
        assert_eq!((answer.status, answer.broken), (200, None));
        let identity = answer.identity();
        assert_eq!(identity.engine, "gen");
        assert_eq!(
            (identity.prompt, identity.kv),
            (hash(&body), Some(hash(&body)))
        );
        assert_eq!(identity.from, Some(id.to_string()));
        idle([&ctx, &dec]).await;
    }
    let (c, g) = (ctx.state(), dec.state());
    assert_eq!(
        (c.kv.computed_for_others, c.kv.kv_taken, c.kv.kv_expired),
        (2, 2, 0)
    );
    assert_eq!((g.kv.pulled, g.kv.computed_locally), (2, 0));
}

#[tokio::test]
async fn an_id_that_lost_its_last_bits_is_refused() {
    let (ctx, dec) = workers(|_| {}).await;
    let answer = post(ctx.address(), CHAT, &context(chat(json!({})), ID, 0)).await;
    let exact = generation(chat(json!({})), &answer).to_string();
    let id = ID.to_string();
    let rounded = "4611686018427387904";
    let ctx_id = format!("\"ctx_request_id\":{id}");
    let both = format!("\"disagg_request_id\":{id}");
    let mut wire = Wire::open(dec.address()).await;
    for body in [
        exact.replace(&ctx_id, &format!("\"ctx_request_id\":{rounded}")),
        exact.replace(&both, &format!("\"disagg_request_id\":{rounded}")),
        exact
            .replace(&ctx_id, &format!("\"ctx_request_id\":{rounded}"))
            .replace(&both, &format!("\"disagg_request_id\":{rounded}")),
        exact.replace(&ctx_id, "\"ctx_request_id\":4.611686018427388e18"),
        exact.replace(&ctx_id, "\"ctx_request_id\":9223372036854775808"),
        exact.replace(&ctx_id, &format!("\"ctx_request_id\":\"{id}\"")),
    ] {
        assert_ne!(body, exact);
        wire.post_text(CHAT, &body).await;
        let refused = wire.answer().await.unwrap();
        assert_eq!(refused.status, 400, "{body}");
        let error = refused.json()["error"].as_str().unwrap().to_owned();
        assert!(
            error.contains("lost bits") || error.contains("9223372036854775807"),
            "{error}"
        );
    }
    assert_eq!(ctx.state().kv.kv_held, 1);
    wire.post_text(CHAT, &exact).await;
    assert_eq!(wire.answer().await.unwrap().status, 200);
    idle([&ctx, &dec]).await;
}

#[tokio::test]
async fn an_id_of_the_workers_own_works_too() {
    let (ctx, dec) = workers(|config| config.transceiver = Transceiver::Cpp).await;
    let mut body = context(chat(json!({})), ID, 0);
    body["disaggregated_params"]["disagg_request_id"] = json!(null);
    let answer = post(ctx.address(), CHAT, &body).await;
    let params = answer.json()["choices"][0]["disaggregated_params"].clone();
    assert_eq!(
        (&params["ctx_request_id"], &params["disagg_request_id"]),
        (&json!(1), &json!(null))
    );
    // The opaque state says where the context is.
    assert_eq!(params["ctx_info_endpoint"], json!(null));
    let second = generation(chat(json!({})), &answer);
    assert_eq!(post(dec.address(), CHAT, &second).await.status, 200);
    idle([&ctx, &dec]).await;
}

#[tokio::test]
async fn held_kv_is_freed_after_its_time_and_a_late_generation_fails() {
    let (ctx, dec) = workers(|config| config.lease_ms = 100).await;
    let answer = post(ctx.address(), CHAT, &context(chat(json!({})), ID, 0)).await;
    let state = until(&ctx, |s| s.kv.kv_expired == 1).await;
    assert_eq!((state.kv.kv_held, state.kv.kv_used_blocks), (0, 0));
    let late = generation(chat(json!({})), &answer);
    let error = refused(&dec, CHAT, &late).await;
    assert_eq!(error, "Error in kv cache transfer for generation requests");
    assert_eq!(ctx.state().kv.after_expiry, 1);
    assert_eq!(dec.state().kv.pulls_failed, 1);
    // A stream has its headers by then.
    let mut late = late;
    late["stream"] = json!(true);
    let broken = post(dec.address(), CHAT, &late).await;
    assert_eq!((broken.status, broken.body.as_str()), (200, ""));
    assert!(broken.broken.is_some());
    idle([&ctx, &dec]).await;
}

#[tokio::test]
async fn kv_is_taken_once() {
    let (ctx, dec) = workers(|_| {}).await;
    let answer = post(ctx.address(), CHAT, &context(chat(json!({})), ID, 0)).await;
    let second = generation(chat(json!({})), &answer);
    assert_eq!(post(dec.address(), CHAT, &second).await.status, 200);
    let again = send(&dec, CHAT, &second);
    until(&ctx, |s| s.kv.after_expiry == 1).await;
    assert!(!again.is_finished());
    again.abort();
    idle([&ctx, &dec]).await;
}

#[tokio::test]
async fn an_id_in_use_is_refused() {
    let ctx = worker("ctx", |_| {}).await;
    let body = context(chat(json!({})), ID, 0);
    assert_eq!(post(ctx.address(), CHAT, &body).await.status, 200);
    let error = refused(&ctx, CHAT, &body).await;
    assert!(error.contains("in use by another request"), "{error}");
}

#[tokio::test]
async fn a_restarted_or_dead_context_worker_fails_the_generation() {
    let (ctx, dec) = workers(|_| {}).await;
    let answer = post(ctx.address(), CHAT, &context(chat(json!({})), ID, 0)).await;
    let second = generation(chat(json!({})), &answer);
    ctx.restart();
    crate::wire::until_refuses(&ctx, false).await;
    let pace = PaceChange {
        lease_ms: Some(100),
        ..PaceChange::default()
    };
    dec.set_pace(pace).unwrap();
    for _ in 0..2 {
        let error = refused(&dec, CHAT, &second).await;
        assert!(error.starts_with("Error in kv cache transfer"), "{error}");
        ctx.kill("test");
        crate::wire::until_refuses(&ctx, true).await;
    }
    assert_eq!(dec.state().kv.pulls_failed, 2);
}
