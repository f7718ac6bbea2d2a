//! A process that stood still for ten seconds finds every heartbeat late, and miscounts nothing.

use std::time::Duration;

use pd_e2e::{Pod, Stand};

#[tokio::test(flavor = "multi_thread")]
async fn ten_seconds_of_sigstop_under_load_leave_the_ledger_right() {
    let pods = Pod::pairs(2).into_iter().map(|pod| {
        pod.engine(|engine| {
            engine.prefill_delay_ms = 80.0;
            engine.token_interval_ms = 30.0;
        })
    });
    let stand = Stand::builder("pause").pods(pods).alone().start().await;
    let load = crate::reload::load(&stand);
    load.more(60).await;
    stand.envoy.signal("STOP").unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    stand.envoy.signal("CONT").unwrap();
    load.more(100).await;
    // With requests running, no more is charged than they can have.
    let charged = stand.envoy.ledgers().await.unwrap().total;
    println!("under load: {charged:?}");
    assert!(
        charged.decode_running + charged.decode_pending <= 32,
        "{charged:?}"
    );
    let outcomes = load.stop().await;
    println!("{outcomes:?}");
    // Requests in flight may have met idle connections that engines closed meanwhile.
    let good = outcomes.complete.get(&200).copied().unwrap_or_default();
    assert!(outcomes.total() - good <= 32, "{outcomes:#?}");
    assert!(outcomes.lost.is_empty(), "{outcomes:#?}");
    stand.settled(Duration::from_secs(10)).await;
}
