//! Requests that wait for their prefill: Envoy's own limit of that wait, and what it is there for.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use pd_e2e::{Answer, Call, EnvoyConfig, Pod, Programs, Stand, StandBuilder, chat_body, within};

const CHAT: &str = "/v1/chat/completions";
/// Envoy takes the time once per turn of its loop.
const TICK: Duration = Duration::from_millis(50);

fn stand(name: &str, prefill: Duration, wait: Duration) -> StandBuilder {
    let pods = Pod::pairs(2).into_iter().map(|pod| {
        pod.engine(|engine| {
            engine.prefill_delay_ms = prefill.as_secs_f64() * 1e3;
            engine.lease_ms = 4_000;
        })
    });
    let limit = |envoy: &mut EnvoyConfig| {
        envoy.listener("WAITING_TIMEOUT", &format!("{}s", wait.as_secs_f64()));
    };
    Stand::builder(name).pods(pods).envoy(limit)
}

/// A trap while requests on both workers wait for their prefill.
async fn trap_while_requests_wait(name: &str, envoy: PathBuf) {
    const WAIT: Duration = Duration::from_millis(3500);
    let stand = stand(name, Duration::from_millis(2500), WAIT)
        .program(envoy)
        .envoy(|envoy| envoy.wasm = Programs::trapping_filter())
        .alone()
        .start()
        .await;
    let to = stand.envoy.data();
    let waiting: Vec<_> = (0..24)
        .map(|n| {
            let call = Call::post(CHAT, chat_body(&format!("wait {n}"), n % 2 == 0));
            tokio::spawn(call.send(to))
        })
        .collect();
    within(Duration::from_secs(2), "all wait", async || {
        let charged = stand.envoy.ledgers().await.unwrap().total;
        let all = charged.prefill_requests == 24;
        all.then_some(()).ok_or(charged)
    })
    .await;
    let trapping = Call::post(CHAT, chat_body("trap", false)).header("x-pd-test-trap", "1");
    trapping.send(to).await.unwrap().expect(503);

    let (mut served, mut failed) = (0, 0);
    for answer in waiting {
        let answer: Answer = answer.await.unwrap().unwrap();
        if answer.status == 200 {
            assert!(answer.complete, "{}", answer.shown());
            served += 1;
            continue;
        }
        let answer = answer.expect(503);
        assert_eq!(answer.json()["error"]["code"], "router_restarting");
        assert_eq!(answer.header("retry-after"), "1");
        assert!(!answer.header("request-id").is_empty());
        assert!(answer.total + TICK >= WAIT, "{:?}", answer.total);
        let slack = Duration::from_millis(500);
        assert!(answer.total < WAIT + slack, "{:?}", answer.total);
        failed += 1;
    }
    println!("{served} served by the other worker, {failed} failed");
    assert!(served > 0, "requests of the other worker go on");
    assert!(failed > 0, "the trap hit a worker with waiting requests");
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_in_a_dead_vm_is_a_503_when_its_wait_is_over() {
    trap_while_requests_wait("waiting-trap", Programs::envoy()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_in_a_dead_vm_of_the_oldest_envoy_is_a_503_too() {
    trap_while_requests_wait("waiting-trap-oldest", Programs::oldest_envoy()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_envoy_cuts_short_is_a_prefill_timeout_and_says_which_setting_to_raise() {
    let (prefill, wait) = (Duration::from_secs(2), Duration::from_secs(1));
    let stand = stand("waiting-cut", prefill, wait).start().await;
    for stream in [false, true] {
        let call = Call::post(CHAT, chat_body("slow", stream)).header("x-request-id", "mine");
        let answer = stand.send(call).await.expect(504);
        assert_eq!(answer.header("x-error-pd-prefill"), "true");
        assert_eq!(answer.header("x-request-id"), "mine");
        assert_eq!(answer.json()["error"]["code"], "prefill_failed");
        assert!(answer.total < prefill, "{:?}", answer.total);
    }
    // The late replies free what was computed.
    within(Duration::from_secs(4), "the KV is freed", async || {
        let freed = stand.total(|state| state.kv.kv_freed_by_refusal);
        ensure!(freed == 2, "{freed} freed");
        Ok(())
    })
    .await;
    stand.settled(Duration::from_secs(3)).await;
    let log = stand.envoy.log();
    let says =
        |line: &&str| line.contains("idle_timeout") && line.contains("prefillRequestTimeout");
    assert_eq!(log.lines().filter(says).count(), 2, "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_the_wait_ends_with_the_wait() {
    let wait = Duration::from_secs(1);
    let stand = stand("waiting-over", Duration::from_millis(50), wait)
        .start()
        .await;
    let stall = pd_engine_sim::FaultKind::StallMidStream {
        after_chunks: 2,
        ms: Some(2500),
    };
    for pod in ["decode-r0", "decode-r1"] {
        let fault = pd_engine_sim::Fault::every(pd_engine_sim::On::Decode, stall.clone());
        assert!(stand.engine(pod).inject(fault));
    }
    let answer = stand
        .send(Call::post(CHAT, chat_body("pauses", true)))
        .await;
    let answer = answer.expect(200);
    assert!(
        answer.complete && answer.total > 2 * wait,
        "{}",
        answer.shown()
    );
}
