//! Configuration changes under load lose no request.
//!
//! These run alone: Envoy's main thread compiles the filter inside a listener update, and a drain
//! time shorter than that ends at once.

use std::time::Duration;

use pd_e2e::{Call, Load, Pod, Stand, chat_body};
use serde_json::json;

fn busy_pods() -> impl Iterator<Item = Pod> {
    Pod::pairs(2).into_iter().map(|pod| {
        pod.engine(|engine| {
            engine.prefill_delay_ms = 60.0;
            engine.token_interval_ms = 20.0;
        })
    })
}

pub(crate) fn load(stand: &Stand) -> Load {
    Load::start(stand.envoy.data(), 16, |n| {
        let body = chat_body(&format!("request {n}"), n % 2 == 0);
        Call::post("/v1/chat/completions", body)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plugin_configuration_changes_twice_under_load_and_no_request_is_lost() {
    let mut stand = Stand::builder("reload")
        .pods(busy_pods())
        .alone()
        .start()
        .await;
    let load = load(&stand);
    load.more(60).await;
    for seconds in [21, 22] {
        let plugin = json!({ "prefillRequestTimeout": seconds }).to_string();
        stand
            .envoy
            .reload(|envoy| envoy.plugin = plugin)
            .await
            .unwrap();
        // The drain time is 2 s: old and new run side by side, then the old is gone.
        let end = std::time::Instant::now() + Duration::from_millis(2500);
        while std::time::Instant::now() < end {
            load.more(10).await;
        }
        let in_force = stand.envoy.status().await.unwrap().knobs;
        let value = in_force
            .get("prefillRequestTimeout")
            .and_then(|v| v.as_f64());
        assert_eq!(value, Some(f64::from(seconds)), "{in_force:?}");
    }
    let outcomes = load.stop().await;
    println!("{} requests, all good", outcomes.expect_all_good());
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_runs_through_a_reload_is_complete() {
    let pods = Pod::pairs(1)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.token_interval_ms = 150.0));
    let mut stand = Stand::builder("through").pods(pods).start().await;
    let call = Call::post("/v1/chat/completions", chat_body("through a reload", true));
    let mut live = call.start(stand.envoy.data()).await.unwrap();
    live.next().await.unwrap().expect("a first chunk");
    stand
        .envoy
        .reload(|envoy| envoy.plugin = json!({ "tieSeed": 1 }).to_string())
        .await
        .unwrap();
    let answer = live.finish().await.unwrap();
    assert!(answer.complete, "{}", answer.shown());
    stand.settled(Duration::from_secs(10)).await;
}
