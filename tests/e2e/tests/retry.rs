//! A leg that fails: retried once where that is safe, else an answer that says which leg it was.

use std::time::Duration;

use pd_e2e::{Answer, Call, Pod, Stand, chat_body, prompt_of};
use pd_engine_sim::{Cut, Fault, FaultKind, On};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn chat(stand: &Stand, prompt: &str, stream: bool) -> Answer {
    stand
        .send(Call::post(CHAT, chat_body(prompt, stream)))
        .await
}

fn status_fault(code: u16) -> FaultKind {
    FaultKind::Status {
        code,
        body: None,
        headers: Default::default(),
    }
}

fn marked(answer: &Answer, stage: &str) {
    let marker = answer.header(&format!("x-error-pd-{stage}"));
    assert_eq!(marker, "true", "{}", answer.shown());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_engine_that_is_down_is_retried_on_the_other_roleset() {
    let stand = Stand::pairs("down", 2).await;
    stand.engine("prefill-r0").refuse(false);
    for n in 0..12 {
        let answer = chat(&stand, &format!("question {n}"), n % 2 == 0)
            .await
            .expect(200);
        assert_eq!(answer.header("prefill-target-pod"), "prefill-r1");
        assert_eq!(
            answer.header("target-pod"),
            "decode-r1",
            "the whole pair is new"
        );
        prompt_of(&answer);
    }
    let page = stand.envoy.metrics().await.unwrap();
    let retries = page
        .lines()
        .find(|line| line.starts_with("gateway_pd_prefill_retry_total{"));
    println!("{retries:?}");
    assert!(retries.is_some(), "no retry was counted:\n{page}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_and_gateway_errors_of_a_prefill_engine_are_retried_others_are_not() {
    let stand = Stand::pairs("statuses", 2).await;
    let arm = |kind: &FaultKind| {
        // Whichever roleset is chosen first fails once; the retry goes to the other.
        for pod in ["prefill-r0", "prefill-r1"] {
            stand.engine(pod).clear_faults();
        }
        assert!(
            stand
                .engine("prefill-r0")
                .inject(Fault::next(1, On::Prefill, kind.clone()))
        );
    };
    let retried = [
        status_fault(429),
        status_fault(502),
        status_fault(503),
        FaultKind::ResetBeforeHeaders {
            how: Cut::Rst,
            after_ms: 0,
            after_work: false,
        },
    ];
    for kind in &retried {
        arm(kind);
        for n in 0..6 {
            let answer = chat(&stand, &format!("{kind:?} {n}"), false).await;
            assert_eq!(answer.status, 200, "{kind:?}: {}", answer.shown());
            prompt_of(&answer);
        }
    }
    for code in [400, 404, 422, 500] {
        let body = format!(r#"{{"error":{{"message":"own words {code}","type":"x"}}}}"#);
        for pod in ["prefill-r0", "prefill-r1"] {
            stand.engine(pod).clear_faults();
            let kind = FaultKind::Status {
                code,
                body: Some(body.clone()),
                headers: Default::default(),
            };
            assert!(stand.engine(pod).inject(Fault::every(On::Prefill, kind)));
        }
        let before = stand.total(|state| state.requests_total);
        let answer = chat(&stand, "not retried", false).await.expect(code);
        marked(&answer, "prefill");
        let message = answer.json()["error"]["message"].to_string();
        assert!(
            message.contains(&format!("own words {code}")),
            "{}",
            answer.shown()
        );
        assert_eq!(
            stand.total(|state| state.requests_total) - before,
            1,
            "one leg for {code}"
        );
    }
    for pod in ["prefill-r0", "prefill-r1"] {
        stand.engine(pod).clear_faults();
    }
    stand.settled(Duration::from_secs(5)).await;
}

/// Two rolesets and, if asked for, a combined pod; all prefill engines are down.
async fn all_down(name: &str, fallback: Option<&str>, combined: bool) -> Stand {
    let mut pods = Pod::pairs(2);
    pods.extend(combined.then(Pod::combined));
    let plugin = fallback.map_or_else(|| json!({}), |f| json!({ "prefillFallback": f }));
    let stand = Stand::builder(name)
        .pods(pods)
        .plugin(&plugin)
        .start()
        .await;
    for pod in ["prefill-r0", "prefill-r1"] {
        stand.engine(pod).refuse(false);
    }
    stand
}

#[tokio::test(flavor = "multi_thread")]
async fn all_prefill_engines_down_is_503_with_the_marker() {
    for (name, fallback, combined) in [
        ("down-alone", None, false),
        ("down-strict", Some("strict"), true),
    ] {
        let stand = all_down(name, fallback, combined).await;
        for stream in [false, true] {
            let answer = chat(&stand, "x", stream).await.expect(503);
            marked(&answer, "prefill");
            assert!(!answer.header("request-id").is_empty());
        }
        assert_eq!(stand.total(|state| state.requests_total), 0);
        // They come back, and so does service; ejection ends by a probe.
        for pod in ["prefill-r0", "prefill-r1"] {
            stand.engine(pod).resume();
        }
        pd_e2e::eventually("service is back", || async {
            let answer = chat(&stand, "again", false).await;
            if answer.status == 200 {
                Ok(())
            } else {
                Err(answer.shown())
            }
        })
        .await;
        stand.settled(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_prefill_engines_down_falls_back_as_configured() {
    for (fallback, pod) in [("combined", "combined"), ("decode", "decode-")] {
        let stand = all_down(fallback, Some(fallback), fallback == "combined").await;
        for stream in [false, true] {
            let body = chat_body("fall back", stream);
            let answer = stand.send(Call::post(CHAT, body.clone())).await.expect(200);
            assert!(
                answer.header("target-pod").starts_with(pod),
                "{}",
                answer.shown()
            );
            assert_eq!(prompt_of(&answer).kv, None, "computed by the pod itself");
            let sent = stand.seen(answer.header("target-pod"));
            assert_eq!(
                sent.last().and_then(|r| r.body.as_deref()),
                Some(body.as_str())
            );
        }
        stand.settled(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_engine_that_stalls_is_504_after_its_timeout() {
    let plugin = json!({ "prefillRequestTimeout": 0.5, "prefillRetries": 0 });
    let stand = Stand::builder("stalls")
        .pods(Pod::pairs(1))
        .plugin(&plugin)
        .start()
        .await;
    let kind = FaultKind::StallBeforeHeaders {
        ms: Some(3000),
        after_work: false,
    };
    assert!(
        stand
            .engine("prefill-r0")
            .inject(Fault::next(1, On::Prefill, kind))
    );
    let answer = chat(&stand, "x", false).await.expect(504);
    marked(&answer, "prefill");
    println!("answered after {:?}", answer.total);
    assert!(
        answer.total >= Duration::from_millis(450),
        "{:?}",
        answer.total
    );
    assert!(
        answer.total < Duration::from_millis(1500),
        "{:?}",
        answer.total
    );
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_answer_that_is_no_json_is_502() {
    let stand = Stand::pairs("bad-json", 1).await;
    assert!(
        stand
            .engine("prefill-r0")
            .inject(Fault::next(1, On::Prefill, FaultKind::BadJson))
    );
    marked(&chat(&stand, "x", false).await.expect(502), "prefill");
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_hand_over_is_not_passed_on_and_decode_computes_the_prompt() {
    let stand = Stand::pairs("unusable", 1).await;
    let change = |merge: Value, remove: &[&str]| FaultKind::KvParams {
        merge: merge.as_object().cloned().unwrap_or_default(),
        remove: remove.iter().map(|name| (*name).to_owned()).collect(),
    };
    let kinds = [
        FaultKind::NoKvParams,
        change(json!({ "remote_block_ids": null }), &[]),
        change(json!({ "remote_block_ids": [] }), &[]),
        change(json!({}), &["remote_engine_id"]),
        change(json!({ "do_remote_prefill": false }), &[]),
        change(json!({}), &["remote_port"]),
    ];
    for kind in kinds {
        assert!(
            stand
                .engine("prefill-r0")
                .inject(Fault::next(1, On::Prefill, kind.clone()))
        );
        let answer = chat(&stand, "x", true).await;
        assert_eq!(answer.status, 200, "{kind:?}: {}", answer.shown());
        assert_eq!(prompt_of(&answer).kv, None, "{kind:?}");
        let legs = stand.legs(&answer);
        let decode = legs[1].body.as_deref().unwrap();
        assert!(!decode.contains("kv_transfer_params"), "{kind:?}: {decode}");
    }
    assert_eq!(stand.total(|state| state.deaths), 0, "no engine died");
    // An absent or unspecified host is the pod's own.
    for kind in [
        change(json!({ "remote_host": null }), &[]),
        change(json!({ "remote_host": "0.0.0.0" }), &[]),
        change(json!({}), &["remote_host"]),
    ] {
        assert!(
            stand
                .engine("prefill-r0")
                .inject(Fault::next(1, On::Prefill, kind.clone()))
        );
        let answer = chat(&stand, "host", true).await;
        assert_eq!(answer.status, 200, "{kind:?}: {}", answer.shown());
        assert!(
            prompt_of(&answer).kv.is_some(),
            "{kind:?}: {}",
            answer.shown()
        );
    }
    assert_eq!(stand.total(|state| state.deaths), 0, "no engine died");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_that_is_down_or_cuts_is_503_with_its_marker() {
    let stand = Stand::pairs("decode-down", 1).await;
    let kind = FaultKind::ResetBeforeHeaders {
        how: Cut::Rst,
        after_ms: 0,
        after_work: false,
    };
    for stream in [false, true] {
        assert!(
            stand
                .engine("decode-r0")
                .inject(Fault::next(1, On::Decode, kind.clone()))
        );
        let answer = chat(&stand, "cut", stream).await.expect(503);
        marked(&answer, "decode");
        // The call that frees the KV goes to the decode pod, where it must not meet the next fault.
        stand.settled(Duration::from_secs(5)).await;
    }
    stand.engine("decode-r0").refuse(false);
    marked(&chat(&stand, "down", true).await.expect(503), "decode");
    stand.engine("decode-r0").resume();
    stand.envoy.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_whose_first_event_is_an_error_is_502_not_a_200() {
    let stand = Stand::pairs("first-event", 1).await;
    let kind = FaultKind::ErrorMidStream { after_chunks: 0 };
    assert!(
        stand
            .engine("decode-r0")
            .inject(Fault::next(1, On::Decode, kind))
    );
    let answer = chat(&stand, "x", true).await.expect(502);
    marked(&answer, "decode");
    // The call that frees the KV goes to the decode pod, where it must not meet the next fault.
    stand.settled(Duration::from_secs(5)).await;
    // Later errors belong to a stream that has begun: they pass.
    let kind = FaultKind::ErrorMidStream { after_chunks: 2 };
    assert!(
        stand
            .engine("decode-r0")
            .inject(Fault::next(1, On::Decode, kind))
    );
    let answer = chat(&stand, "x", true).await.expect(200);
    assert!(answer.text().contains("\"error\""), "{}", answer.shown());
    stand.envoy.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_that_falls_silent_is_ended_by_the_watchdog() {
    // The limit for engines that have no timers of their own: 15 minutes unless set.
    let plugin = json!({ "streamIdleBackstop": 0.6 });
    let stand = Stand::builder("watchdog")
        .pods(Pod::pairs(1))
        .plugin(&plugin)
        .start()
        .await;
    let silent = |after_chunks| FaultKind::StallMidStream {
        after_chunks,
        ms: None,
    };
    let headers = FaultKind::StallBeforeHeaders {
        ms: None,
        after_work: false,
    };
    for (stream, kind) in [(true, headers.clone()), (true, silent(0)), (false, headers)] {
        assert!(
            stand
                .engine("decode-r0")
                .inject(Fault::next(1, On::Decode, kind))
        );
        let answer = chat(&stand, "silent", stream).await.expect(504);
        marked(&answer, "decode");
        println!("504 after {:?}", answer.total);
        // The next fault is not meant for the call that frees the KV.
        stand.settled(Duration::from_secs(5)).await;
    }
    assert!(
        stand
            .engine("decode-r0")
            .inject(Fault::next(1, On::Decode, silent(2)))
    );
    let answer = chat(&stand, "cut", true).await;
    assert_eq!(
        (answer.status, answer.complete),
        (200, false),
        "{}",
        answer.shown()
    );
    println!("cut after {:?}", answer.total);
    let page = stand.envoy.metrics().await.unwrap();
    let counted = page.lines().any(|line| {
        line.contains("status=\"pd_decode_watchdog\"") && line.contains("status_code=\"504\"")
    });
    assert!(counted, "{page}");
    stand.settled(Duration::from_secs(5)).await;
}
