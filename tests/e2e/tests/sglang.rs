//! SGLang on a real Envoy: both legs at once, and what is left when one of them fails.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::ensure;
use pd_e2e::{Answer, Call, Pod, Stand, chat_body, eventually, prompt_of};
use pd_engine_sim::{EngineConfig, EngineKind, Fault, FaultKind, On};
use serde_json::{Value, json};

/// How long engines and ledger may take to be empty: two rounds of aborts.
const SETTLED: Duration = Duration::from_secs(6);
const PREFILL: &str = "prefill-r0";
const DECODE: &str = "decode-r0";

async fn stand(name: &str, plugin: &Value, change: fn(&mut EngineConfig)) -> Stand {
    let pods = Pod::pairs(1)
        .into_iter()
        .map(|pod| pod.of_engine(EngineKind::Sglang).engine(change));
    Stand::builder(name).pods(pods).plugin(plugin).start().await
}

async fn chat(stand: &Stand, prompt: &str, stream: bool) -> Answer {
    let call = Call::post("/v1/chat/completions", chat_body(prompt, stream));
    stand.send(call).await
}

fn status(code: u16) -> FaultKind {
    FaultKind::Status {
        code,
        body: None,
        headers: Default::default(),
    }
}

fn stall() -> FaultKind {
    FaultKind::StallBeforeHeaders {
        ms: None,
        after_work: false,
    }
}

/// Requests that an engine dropped because it was told to.
fn dropped(stand: &Stand, pod: &str) -> u64 {
    stand.engine(pod).state().aborts.aborted_by_call
}

#[tokio::test(flavor = "multi_thread")]
async fn pairs_answer_streaming_and_not_in_rooms_of_their_own() {
    let stand = stand("sglang", &json!({}), |engine| {
        engine.transfer_delay_ms = 50.0;
    })
    .await;
    let mut rooms = BTreeSet::new();
    for stream in [false, true] {
        for (path, body) in [
            ("/v1/chat/completions", chat_body("room", stream)),
            (
                "/v1/completions",
                format!(
                    r#"{{"model":"sim-model","prompt":"room","stream":{stream},"max_tokens":4}}"#
                ),
            ),
        ] {
            let answer = stand.send(Call::post(path, body)).await.expect(200);
            prompt_of(&answer);
            let legs = stand.legs(&answer);
            assert_eq!(legs.len(), 2);
            let bodies: Vec<Value> = legs
                .iter()
                .map(|leg| serde_json::from_str(leg.body.as_deref().unwrap()).unwrap())
                .collect();
            for member in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
                assert_eq!(bodies[0][member], bodies[1][member], "{member}");
            }
            assert_eq!(bodies[0]["rid"], answer.header("request-id"));
            let room = bodies[0]["bootstrap_room"].as_u64().unwrap();
            assert!(room < 1 << 53 && rooms.insert(room));
        }
    }
    let decode = stand.engine(DECODE).state();
    assert_eq!((decode.kv.pulled, decode.kv.computed_locally), (4, 0));
    assert_eq!(stand.total(|state| state.aborts.abort_calls), 0);
    assert_eq!(stand.total(|state| state.rooms.rooms_duplicate), 0);
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_never_share_a_room() {
    let stand = stand("sglang-many", &json!({}), |engine| {
        engine.prefill_delay_ms = 20.0;
    })
    .await;
    let calls = (0..40).map(|n| {
        let body = chat_body(&format!("prompt {n}"), n % 2 == 0);
        tokio::spawn(Call::post("/v1/chat/completions", body).send(stand.envoy.data()))
    });
    for call in calls.collect::<Vec<_>>() {
        prompt_of(&call.await.unwrap().unwrap().expect(200));
    }
    assert_eq!(stand.total(|state| state.rooms.rooms_duplicate), 0);
    assert_eq!(stand.engine(PREFILL).state().rooms.rooms_failed, 0);
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_failure_is_the_clients_status_and_the_decode_leg_is_dropped() {
    let plugin = json!({"prefillRequestTimeout": 1});
    let stand = stand("sglang-prefill", &plugin, |_| {}).await;
    for (kind, expected) in [
        (status(400), 400),
        (status(500), 500),
        (status(503), 503),
        (
            FaultKind::ResetBeforeHeaders {
                how: Default::default(),
                after_ms: 0,
                after_work: false,
            },
            503,
        ),
        (stall(), 504),
    ] {
        for stream in [false, true] {
            assert!(
                stand
                    .engine(PREFILL)
                    .inject(Fault::next(1, On::Prefill, kind.clone()))
            );
            let answer = chat(&stand, "fails", stream).await.expect(expected);
            assert_eq!(answer.header("x-error-pd-prefill"), "true", "{kind:?}");
            assert!(!answer.text().is_empty());
            stand.settled(SETTLED).await;
        }
    }
    // Whoever was told again was there to be told: the pair serves on.
    prompt_of(&chat(&stand, "after", true).await.expect(200));
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_failure_is_told_and_the_prefill_leg_is_dropped() {
    let stand = stand("sglang-decode", &json!({}), |_| {}).await;
    for stream in [false, true] {
        let before = dropped(&stand, PREFILL);
        assert!(
            stand
                .engine(DECODE)
                .inject(Fault::next(1, On::Decode, status(500)))
        );
        // The engine's own answer, as it came.
        let answer = chat(&stand, "refused", stream).await;
        assert_eq!(answer.status, 500);
        eventually("the prefill leg is dropped", || async {
            ensure!(dropped(&stand, PREFILL) > before);
            Ok(())
        })
        .await;
        stand.settled(SETTLED).await;
    }
    stand.engine(DECODE).refuse(false);
    let answer = chat(&stand, "nobody", false).await.expect(503);
    assert_eq!(answer.header("x-error-pd-decode"), "true");
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_has_both_legs_dropped() {
    let stand = stand("sglang-leaves", &json!({}), |engine| {
        engine.prefill_delay_ms = 30_000.0;
    })
    .await;
    for stream in [false, true] {
        let call = Call::post("/v1/chat/completions", chat_body("leave", stream));
        let request = tokio::spawn(call.send(stand.envoy.data()));
        eventually("both legs are at work", || async {
            let rooms = stand.engine(PREFILL).state().rooms.rooms_met;
            ensure!(rooms > u64::from(stream), "{rooms} met");
            Ok(())
        })
        .await;
        request.abort();
        let _ = request.await;
        stand.settled(SETTLED).await;
        assert!(dropped(&stand, PREFILL) > u64::from(stream));
    }
}
