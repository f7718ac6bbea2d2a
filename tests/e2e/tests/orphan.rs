//! A client that leaves during prefill: the work is seen to its end, and charged until then.

use std::time::{Duration, Instant};

use anyhow::ensure;
use pd_e2e::{Call, Pod, Stand, chat_body, eventually, within};

#[tokio::test(flavor = "multi_thread")]
async fn the_late_reply_is_seen_its_kv_freed_and_the_charges_end_with_the_work() {
    let pods = Pod::pairs(1)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.prefill_delay_ms = 1500.0));
    let stand = Stand::builder("orphan").pods(pods).start().await;
    for stream in [false, true] {
        stand.engine("prefill-r0").reset_counters();
        let call = Call::post("/v1/chat/completions", chat_body("leave early", stream));
        let sent = Instant::now();
        let request = tokio::spawn(call.send(stand.envoy.data()));
        eventually("the prefill engine works", || async {
            let running = stand.engine("prefill-r0").state().running;
            if running == 1 { Ok(()) } else { Err(running) }
        })
        .await;
        request.abort();
        let _ = request.await;

        // The client is gone, the work is not: neither are the charges.
        while sent.elapsed() < Duration::from_millis(1200) {
            let ledgers = stand.envoy.ledgers().await.unwrap();
            assert_eq!(
                ledgers.total.prefill_requests,
                1,
                "{ledgers:?} {:?}",
                sent.elapsed()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let freed = within(Duration::from_secs(5), "the KV is freed", || async {
            let kv = stand.engine("prefill-r0").state().kv;
            ensure!(kv.kv_freed_by_refusal == 1 && kv.kv_held == 0, "{kv:?}");
            Ok(sent.elapsed())
        })
        .await;
        println!("stream {stream}: freed {freed:?} after the request");
        let state = stand.engine("prefill-r0").state();
        assert_eq!(
            state.kv.computed_for_others, 1,
            "the prefill ran to its end"
        );
        assert_eq!(state.kv.kv_expired, 0);
        stand.settled(Duration::from_secs(3)).await;
    }
    assert_eq!(stand.total(|state| state.deaths), 0);
    // The refused call that freed the KV is nobody's failure: the pod serves on.
    stand
        .send(Call::post(
            "/v1/chat/completions",
            chat_body("after", false),
        ))
        .await
        .expect(200);
}
