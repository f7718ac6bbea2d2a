//! A request is served by a prefill and a decode pod of one roleset.

use std::time::Duration;

use pd_e2e::{Answer, Call, Pod, Stand, chat_body, prompt_of};
use pd_engine_sim::On;
use serde_json::Value;

/// The legs of an answer are one prefill and one decode on the pods its headers name, and the
/// decode engine used the KV that the prefill engine made for this very request.
fn assert_pair(stand: &Stand, answer: &Answer, body: &str) {
    let (prefill, decode) = (
        answer.header("prefill-target-pod"),
        answer.header("target-pod"),
    );
    let legs = stand.legs(answer);
    let shown: Vec<_> = legs.iter().map(|l| (l.engine.as_str(), l.leg)).collect();
    assert_eq!(
        shown,
        [(prefill, Some(On::Prefill)), (decode, Some(On::Decode))],
        "{}",
        answer.shown()
    );
    let rolesets = [prefill, decode].map(|pod| pod.split_once('-').map(|(_, set)| set));
    assert_eq!(rolesets[0], rolesets[1], "one roleset");
    assert_eq!(answer.header("routing-strategy"), "pd");
    for header in ["target-pod-ip", "prefill-target-pod-ip"] {
        assert!(
            answer.header(header).starts_with("127.0.0.1"),
            "{}",
            answer.shown()
        );
    }

    let sent: Value = serde_json::from_str(legs[0].body.as_deref().unwrap()).unwrap();
    assert_eq!(sent["stream"], false);
    assert_eq!(sent["max_tokens"], 1);
    assert_eq!(sent["max_completion_tokens"], 1);
    assert_eq!(sent["kv_transfer_params"]["do_remote_decode"], true);

    let sent = legs[1].body.as_deref().unwrap();
    let handed: Value = serde_json::from_str(sent).unwrap();
    assert_eq!(handed["kv_transfer_params"]["do_remote_prefill"], true);
    // The member is put first; every other byte is the client's.
    assert!(sent.starts_with(r#"{"kv_transfer_params":{"#), "{sent}");
    assert!(sent.ends_with(&body[1..]), "{sent}");
    assert_eq!(legs[1].headers["content-length"], sent.len().to_string());
    assert!(!legs[1].headers.contains_key("transfer-encoding"));

    let identity = prompt_of(answer);
    assert_eq!(identity.engine, decode);
    assert_eq!(
        identity.kv,
        Some(identity.prompt),
        "the decode engine used handed-over KV"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_request_is_prefilled_on_one_engine_and_decoded_on_another() {
    let stand = Stand::pairs("chat", 2).await;
    for stream in [false, true] {
        let body = chat_body("Why is the sky blue?", stream);
        let call = Call::post("/v1/chat/completions", body.clone());
        let answer = stand.send(call).await.expect(200);
        assert_pair(&stand, &answer, &body);
        if stream {
            let events = answer.events();
            assert_eq!(events.last().map(|(_, data)| data.as_str()), Some("[DONE]"));
            assert!(answer.complete);
        }
        println!(
            "stream {stream}: {} -> {}, first byte {:?}, total {:?}",
            answer.header("prefill-target-pod"),
            answer.header("target-pod"),
            answer.head_at,
            answer.total
        );
    }
    stand.settled(Duration::from_secs(5)).await;
    assert_eq!(stand.total(|state| state.kv.kv_taken), 2);
    assert_eq!(stand.total(|state| state.kv.kv_expired), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_and_a_query_string_are_routed_the_same_way() {
    let stand = Stand::pairs("completions", 1).await;
    let body = r#"{"model":"sim-model","prompt":"Once upon a time","max_tokens":4}"#;
    let call = Call::post("/v1/completions?trace=1", body);
    let answer = stand.send(call).await.expect(200);
    let legs = stand.legs(&answer);
    let paths: Vec<_> = legs.iter().map(|leg| leg.path.as_str()).collect();
    assert_eq!(
        paths,
        ["/v1/completions?trace=1", "/v1/completions?trace=1"]
    );
    assert_eq!(prompt_of(&answer).engine, "decode-r0");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_are_spread_over_rolesets_by_what_is_charged() {
    let slow = |pod: Pod| pod.engine(|engine| engine.prefill_delay_ms = 300.0);
    let pods = Pod::pairs(2).into_iter().map(slow);
    let stand = Stand::builder("spread").pods(pods).start().await;
    let calls = (0..8).map(|n| {
        let to = stand.envoy.data();
        let body = chat_body(&format!("question {n}"), false);
        tokio::spawn(Call::post("/v1/chat/completions", body).send(to))
    });
    let calls: Vec<_> = calls.collect();
    let mut counts = std::collections::BTreeMap::<String, u32>::new();
    for call in calls {
        let answer = call.await.unwrap().unwrap().expect(200);
        prompt_of(&answer);
        *counts
            .entry(answer.header("prefill-target-pod").to_owned())
            .or_default() += 1;
    }
    println!("{counts:?}");
    // Both workers see each other's charges: neither prefill pod gets more than two thirds.
    assert_eq!(counts.len(), 2, "{counts:?}");
    assert!(counts.values().all(|count| *count <= 5), "{counts:?}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_and_messages_hand_kv_over_too() {
    let stand = Stand::pairs("responses", 1).await;
    for (path, body, cap) in [
        (
            "/v1/responses",
            r#"{"model":"sim-model","input":"Say something","max_output_tokens":5}"#,
            "max_output_tokens",
        ),
        (
            "/v1/messages",
            r#"{"model":"sim-model","messages":[{"role":"user","content":"hi"}],"max_tokens":5}"#,
            "max_tokens",
        ),
    ] {
        let answer = stand.send(Call::post(path, body)).await.expect(200);
        let legs = stand.legs(&answer);
        let shown: Vec<_> = legs
            .iter()
            .map(|leg| (leg.path.as_str(), leg.leg))
            .collect();
        assert_eq!(
            shown,
            [(path, Some(On::Prefill)), (path, Some(On::Decode))],
            "{}",
            answer.shown()
        );
        let prefill: Value = serde_json::from_str(legs[0].body.as_deref().unwrap()).unwrap();
        assert_eq!(prefill[cap], 1, "{prefill}");
        let decode = legs[1].body.as_deref().unwrap();
        assert!(decode.ends_with(&body[1..]), "{decode}");
    }
    stand.settled(Duration::from_secs(5)).await;
    assert_eq!(stand.total(|state| state.kv.kv_taken), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_goes_back_to_the_prefill_pod_that_knows_it() {
    let stand = Stand::pairs("prefix", 3).await;
    let mut homes = Vec::new();
    for topic in ["apples", "bridges", "clouds", "dunes"] {
        let context = format!("All about {topic}. ").repeat(500);
        let mut home = None;
        for n in 0..5 {
            let body = chat_body(&format!("{context} Question {n}?"), false);
            let answer = stand
                .send(Call::post("/v1/chat/completions", body))
                .await
                .expect(200);
            let pod = answer.header("prefill-target-pod").to_owned();
            // Any worker knows what another one's request left in the index.
            assert_eq!(*home.get_or_insert_with(|| pod.clone()), pod, "{topic} {n}");
        }
        homes.extend(home);
    }
    println!("{homes:?}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strategies_without_phases_use_one_leg_and_never_a_prefill_pod() {
    let pods = Pod::pairs(2);
    let stand = Stand::builder("one-leg-strategies")
        .pods(pods)
        .start()
        .await;
    for strategy in [
        "random",
        "least-request",
        "prefix-cache",
        "session-affinity",
    ] {
        for n in 0..4 {
            let body = chat_body(&format!("{strategy} {n}"), n % 2 == 0);
            let call = Call::post("/v1/chat/completions", body.clone());
            let answer = stand
                .send(call.header("routing-strategy", strategy))
                .await
                .expect(200);
            assert_eq!(answer.header("routing-strategy"), strategy);
            assert_eq!(answer.header("prefill-target-pod"), "");
            let pod = answer.header("target-pod");
            assert!(pod.starts_with("decode-"), "{}", answer.shown());
            let seen = stand.seen(pod);
            let last = seen.last().and_then(|record| record.body.as_deref());
            assert_eq!(last, Some(body.as_str()), "the body is untouched");
        }
    }
    for pod in ["prefill-r0", "prefill-r1"] {
        assert!(stand.seen(pod).is_empty());
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_inference_paths_go_to_a_decode_pod_in_one_leg() {
    let stand = Stand::pairs("embeddings", 1).await;
    let body = r#"{"model":"sim-model","input":"embed me"}"#;
    for path in ["/v1/embeddings", "/v1/rerank", "/v1/classify", "/tokenize"] {
        // The simulated engine knows none of these: its own 404 passes.
        let answer = stand.send(Call::post(path, body)).await;
        assert_eq!(
            answer.header("target-pod"),
            "decode-r0",
            "{}",
            answer.shown()
        );
        let log = stand.engine("decode-r0").log();
        let last = log.iter().rfind(|record| record.method == "POST").unwrap();
        assert_eq!(
            (last.path.as_str(), last.body.as_deref()),
            (path, Some(body))
        );
    }
    let log = stand.engine("prefill-r0").log();
    assert!(log.iter().all(|record| record.method != "POST"));
    stand.settled(Duration::from_secs(5)).await;
}
