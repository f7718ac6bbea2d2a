//! TensorRT-LLM on a real Envoy: context first and generation first.

use std::time::Duration;

use anyhow::ensure;
use pd_e2e::{Answer, Call, Pod, Stand, chat_body, eventually, prompt_of};
use pd_engine_sim::{Cut, EngineConfig, EngineKind, Fault, FaultKind, On, Transceiver};
use serde_json::{Value, json};

const SETTLED: Duration = Duration::from_secs(5);
const PREFILL: &str = "prefill-r0";
const DECODE: &str = "decode-r0";

async fn stand(name: &str, plugin: Value, change: fn(&mut EngineConfig)) -> Stand {
    let pods = Pod::pairs(1)
        .into_iter()
        .map(|pod| pod.of_engine(EngineKind::Trtllm).engine(change));
    Stand::builder(name)
        .pods(pods)
        .plugin(&plugin)
        .start()
        .await
}

fn generation_first() -> Value {
    json!({"trtScheduleStyle": "generation_first", "prefillRequestTimeout": 2, "prefillRetries": 0})
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

/// Both APIs, streaming and not.
fn requests() -> Vec<Call> {
    let mut calls = Vec::new();
    for stream in [false, true] {
        calls.push(Call::post(
            "/v1/chat/completions",
            chat_body("context", stream),
        ));
        let body = format!(
            r#"{{"model":"sim-model","prompt":"context","stream":{stream},"max_tokens":4}}"#
        );
        calls.push(Call::post("/v1/completions", body));
    }
    calls
}

/// The parameters of the context leg and of the generation leg.
fn params(stand: &Stand, answer: &Answer) -> [Value; 2] {
    let mut legs = stand.legs(answer);
    legs.sort_by_key(|record| record.leg != Some(On::Prefill));
    let params = legs.iter().map(|leg| {
        let body: Value = serde_json::from_str(leg.body.as_deref().unwrap()).unwrap();
        body["disaggregated_params"].clone()
    });
    params.collect::<Vec<_>>().try_into().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn context_first_passes_the_context_on_streaming_and_not() {
    let stand = stand("trt-context", json!({"trtMachineId": 3}), |_| {}).await;
    let mut last = 0;
    for call in requests() {
        let answer = stand.send(call).await.expect(200);
        prompt_of(&answer);
        let [context, generation] = params(&stand, &answer);
        assert_eq!(context["request_type"], "context_only");
        assert_eq!(generation["request_type"], "generation_only");
        let id = context["disagg_request_id"].as_u64().unwrap();
        assert!(id > last && id > 1 << 53, "{id} after {last}");
        assert_eq!(id >> 12 & 1023, 3);
        last = id;
        assert_eq!(generation["ctx_request_id"], id);
    }
    let decode = stand.engine(DECODE).state();
    assert_eq!((decode.kv.pulled, decode.kv.computed_locally), (4, 0));
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_context_of_a_client_that_left_is_freed() {
    let stand = stand("trt-leaves", json!({}), |engine| {
        engine.prefill_delay_ms = 800.0;
    })
    .await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let body = match path {
            "/v1/completions" => r#"{"model":"sim-model","prompt":"leave"}"#.to_owned(),
            _ => chat_body("leave", true),
        };
        let request = tokio::spawn(Call::post(path, body).send(stand.envoy.data()));
        eventually("the context worker works", || async {
            let running = stand.engine(PREFILL).state().running;
            ensure!(running == 1, "{running}");
            Ok(())
        })
        .await;
        request.abort();
        let _ = request.await;
        stand.settled(SETTLED).await;
    }
    let kv = stand.engine(PREFILL).state().kv;
    assert_eq!((kv.kv_taken, kv.kv_expired), (2, 0), "{kv:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn context_first_tells_the_client_of_a_failed_context() {
    let stand = stand("trt-fails", json!({"prefillRetries": 0}), |_| {}).await;
    for (code, expected) in [(400, 400), (500, 500), (503, 503)] {
        assert!(
            stand
                .engine(PREFILL)
                .inject(Fault::next(1, On::Prefill, status(code)))
        );
        let answer = chat(&stand, "fails", true).await.expect(expected);
        assert_eq!(answer.header("x-error-pd-prefill"), "true");
    }
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn generation_first_sends_both_legs_at_once_streaming_and_not() {
    let stand = stand("trt-generation", generation_first(), |_| {}).await;
    for call in requests() {
        let answer = stand.send(call).await.expect(200);
        prompt_of(&answer);
        let [context, generation] = params(&stand, &answer);
        assert_eq!(
            (&context["schedule_style"], &generation["schedule_style"]),
            (&1.into(), &1.into())
        );
        assert_eq!(context["disagg_request_id"], generation["ctx_request_id"]);
        assert!(generation["ctx_info_endpoint"].is_string());
    }
    // At most one look-up by each of the two workers.
    let log = stand.engine(PREFILL).log();
    let asked = log
        .iter()
        .filter(|record| record.path == "/server_info")
        .count();
    assert!((1..=2).contains(&asked), "{asked} look-ups");
    let decode = stand.engine(DECODE).state();
    assert_eq!((decode.kv.pulled, decode.kv.computed_locally), (4, 0));
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_the_python_transceiver_is_named_before_anything_is_sent() {
    let stand = stand("trt-cpp", generation_first(), |engine| {
        engine.transceiver = Transceiver::Cpp;
    })
    .await;
    let answer = chat(&stand, "cpp", false).await.expect(503);
    assert_eq!(answer.header("x-error-pd-prefill"), "true");
    assert!(
        answer.text().contains("transceiver_runtime: PYTHON"),
        "{}",
        answer.shown()
    );
    assert!(stand.seen(PREFILL).is_empty() && stand.seen(DECODE).is_empty());
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_worker_is_looked_up_anew() {
    let mut stand = stand("trt-restart", generation_first(), |_| {}).await;
    // Both of Envoy's workers know the first process.
    for n in 0..8 {
        chat(&stand, &format!("before {n}"), false)
            .await
            .expect(200);
    }
    stand.engine(PREFILL).restart();
    stand
        .change_pods(|pods| pods[0].restarts = 1)
        .await
        .unwrap();
    for n in 0..8 {
        prompt_of(
            &chat(&stand, &format!("after {n}"), n % 2 == 0)
                .await
                .expect(200),
        );
    }
    stand.settled(SETTLED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn generation_first_failures_end_both_legs() {
    let stand = stand("trt-generation-fails", generation_first(), |_| {}).await;
    for (kind, expected) in [(status(500), 500), (status(503), 503)] {
        for stream in [false, true] {
            assert!(
                stand
                    .engine(PREFILL)
                    .inject(Fault::next(1, On::Prefill, kind.clone()))
            );
            let answer = chat(&stand, "fails", stream).await.expect(expected);
            assert_eq!(answer.header("x-error-pd-prefill"), "true");
            stand.settled(SETTLED).await;
        }
    }
    assert!(
        stand
            .engine(DECODE)
            .inject(Fault::next(1, On::Decode, status(500)))
    );
    // The engine's own answer, as it came.
    let answer = chat(&stand, "refused", false).await;
    assert_eq!(answer.status, 500);
    prompt_of(&chat(&stand, "after", true).await.expect(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_that_was_taken_is_not_asked_for_again() {
    let stand = stand("trt-taken", json!({}), |_| {}).await;
    let failures = [
        FaultKind::LateStatus {
            code: 500,
            body: r#"{"error":{"message":"after the context was taken"}}"#.to_owned(),
            after_ms: 0,
            after_work: true,
        },
        FaultKind::ResetBeforeHeaders {
            how: Cut::Rst,
            after_ms: 0,
            after_work: true,
        },
    ];
    for (failure, expected) in failures.into_iter().zip([500, 503]) {
        let fault = Fault::next(1, On::Decode, failure);
        assert!(stand.engine(DECODE).inject(fault));
        assert_eq!(chat(&stand, "taken", false).await.status, expected);
        stand.settled(SETTLED).await;
    }
    let kv = stand.engine(PREFILL).state().kv;
    assert_eq!((kv.kv_taken, kv.stale_pulls), (2, 0));
}
