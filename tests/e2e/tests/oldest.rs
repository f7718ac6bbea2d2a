//! The same on the oldest supported Envoy.

use std::time::Duration;

use pd_e2e::{Call, Pod, Programs, Stand, StandBuilder, chat_body, prompt_of};
use pd_engine_sim::{Fault, FaultKind, On};

const CHAT: &str = "/v1/chat/completions";

fn oldest(name: &str) -> StandBuilder {
    Stand::builder(name).program(Programs::oldest_envoy())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_envoy_routes_streams_refuses_and_settles() {
    let stand = oldest("oldest")
        .pods(Pod::pairs(2))
        .body_limit(16 << 20)
        .start()
        .await;
    for (prompt, stream) in [("plain", false), ("streamed", true)] {
        let body = chat_body(prompt, stream);
        let answer = stand.send(Call::post(CHAT, body.clone())).await.expect(200);
        assert!(prompt_of(&answer).kv.is_some());
        let legs = stand.legs(&answer);
        let sent = legs[1].body.as_deref().unwrap();
        assert!(sent.starts_with(r#"{"kv_transfer_params":{"#), "{sent}");
        assert!(sent.ends_with(&body[1..]), "{sent}");
        assert_eq!(legs[1].headers["content-length"], sent.len().to_string());
        assert!(legs.iter().all(|leg| {
            leg.headers
                .keys()
                .all(|name| !name.starts_with("x-envoy-") && name != "target-pod")
        }));
    }
    let large = chat_body(&"0123456789abcde ".repeat(640 << 10), true);
    prompt_of(
        &stand
            .send(Call::post(CHAT, large).chunks_of(60_000))
            .await
            .expect(200),
    );
    let larger = chat_body(&"x".repeat(17 << 20), false);
    stand.send(Call::post(CHAT, larger)).await.expect(413);

    let forged = Call::get("/x").header("target-pod", "127.0.0.1:1");
    stand.send(forged).await.expect(404);
    stand.send(Call::post(CHAT, "{")).await.expect(400);
    let unknown = chat_body("x", false).replace("sim-model", "other");
    stand.send(Call::post(CHAT, unknown)).await.expect(404);

    stand.engine("prefill-r0").refuse(false);
    for n in 0..6 {
        let call = Call::post(CHAT, chat_body(&format!("retry {n}"), n % 2 == 0));
        let answer = stand.send(call).await.expect(200);
        assert_eq!(answer.header("prefill-target-pod"), "prefill-r1");
    }
    stand.engine("prefill-r0").resume();

    let stall = FaultKind::StallMidStream {
        after_chunks: 1,
        ms: None,
    };
    for pod in ["decode-r0", "decode-r1"] {
        assert!(
            stand
                .engine(pod)
                .inject(Fault::every(On::Decode, stall.clone()))
        );
    }
    let call = Call::post(CHAT, chat_body("leaves", true));
    let mut live = call.start(stand.envoy.data()).await.unwrap();
    live.next().await.unwrap().expect("a first chunk");
    drop(live);
    stand.settled(Duration::from_secs(5)).await;

    let page = stand.envoy.metrics().await.unwrap();
    let labelled = page.lines().any(|line| {
        line.starts_with("gateway_request_model_success_total{")
            && line.contains("model=\"sim-model\"")
    });
    assert!(labelled, "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_envoy_reloads_under_load() {
    let pods = Pod::pairs(2)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.prefill_delay_ms = 40.0));
    let mut stand = oldest("oldest-reload").pods(pods).alone().start().await;
    let load = crate::reload::load(&stand);
    load.more(40).await;
    let plugin = r#"{"prefillRequestTimeout": 21}"#.to_owned();
    stand
        .envoy
        .reload(|envoy| envoy.plugin = plugin)
        .await
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(2500);
    while std::time::Instant::now() < end {
        load.more(10).await;
    }
    println!("{} requests, all good", load.stop().await.expect_all_good());
    stand.settled(Duration::from_secs(10)).await;
}
