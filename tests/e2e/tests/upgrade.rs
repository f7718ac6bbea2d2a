//! Another filter.wasm takes over under load: records of two formats side by side.

use std::time::Duration;

use pd_e2e::{Pod, Programs, Stand};

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_of_the_next_format_takes_over_under_load_and_no_request_is_lost() {
    let pods = Pod::pairs(2).into_iter().map(|pod| {
        pod.engine(|engine| {
            engine.prefill_delay_ms = 60.0;
            engine.token_interval_ms = 20.0;
        })
    });
    let mut stand = Stand::builder("upgrade").pods(pods).alone().start().await;
    let before = stand.envoy.status().await.unwrap();
    let load = crate::reload::load(&stand);
    load.more(60).await;
    stand
        .envoy
        .reload(|envoy| envoy.wasm = Programs::next_filter())
        .await
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(4);
    while std::time::Instant::now() < end {
        load.more(10).await;
    }
    let after = stand.envoy.status().await.unwrap();
    println!("format {} -> {}", before.format, after.format);
    assert_ne!(before.format, after.format);
    // The snapshot outlives the filter that stored it.
    let held = |status: &pd_wire::control::Status| status.topology.as_ref().map(|t| t.epoch);
    assert_eq!(held(&before), held(&after));

    // And back again, as a rollback would.
    stand
        .envoy
        .reload(|envoy| envoy.wasm = Programs::filter())
        .await
        .unwrap();
    let end = std::time::Instant::now() + Duration::from_secs(4);
    while std::time::Instant::now() < end {
        load.more(10).await;
    }
    let outcomes = load.stop().await;
    println!("{} requests, all good", outcomes.expect_all_good());
    stand.settled(Duration::from_secs(10)).await;
    // Filters that were replaced have ended, not died.
    let page = stand.envoy.metrics().await.unwrap();
    let lost = page
        .lines()
        .find(|line| line.starts_with("gateway_pd_lost_request_total"));
    assert_eq!(lost, None);
}
