//! Tokens reach the client one by one, while the engine still generates.

use std::time::Duration;

use pd_e2e::{Call, Pod, Stand, chat_body, eventually, prompt_of};

const TOKEN_MS: f64 = 120.0;

fn slow_decode(pods: Vec<Pod>) -> Vec<Pod> {
    let slow = |pod: Pod| {
        pod.engine(|engine| {
            engine.token_interval_ms = TOKEN_MS;
            engine.transfer_delay_ms = 300.0;
        })
    };
    pods.into_iter().map(slow).collect()
}

/// True for an event that carries generated text.
fn is_content(data: &str) -> bool {
    let value: serde_json::Value = serde_json::from_str(data).unwrap_or_default();
    let choice = &value["choices"][0];
    let text = choice["delta"]["content"]
        .as_str()
        .or(choice["text"].as_str());
    text.is_some_and(|text| !text.is_empty())
}

#[tokio::test(flavor = "multi_thread")]
async fn content_chunks_pass_one_by_one_while_the_engine_generates() {
    let stand = Stand::builder("one-by-one")
        .pods(slow_decode(Pod::pairs(1)))
        .start()
        .await;
    for (path, body) in [
        ("/v1/chat/completions", chat_body("slowly", true)),
        (
            "/v1/completions",
            r#"{"model":"sim-model","prompt":"slowly","stream":true,"max_tokens":8}"#.to_owned(),
        ),
    ] {
        let mut live = Call::post(path, body)
            .start(stand.envoy.data())
            .await
            .unwrap();
        assert_eq!(live.status, 200);
        let mut seen = String::new();
        while !seen
            .split("\n\n")
            .any(|e| e.strip_prefix("data: ").is_some_and(is_content))
        {
            let piece = live.next().await.unwrap().expect("the stream goes on");
            seen.push_str(&String::from_utf8_lossy(&piece.bytes));
        }
        // The first content is here and the engine is not done.
        assert_eq!(stand.engine("decode-r0").state().running, 1);
        let answer = live.finish().await.unwrap();
        assert!(answer.complete);
        let content: Vec<Duration> = answer
            .events()
            .into_iter()
            .filter_map(|(at, data)| is_content(&data).then_some(at))
            .collect();
        let gaps: Vec<Duration> = content.windows(2).map(|w| w[1] - w[0]).collect();
        println!("{path}: headers {:?}, gaps {gaps:?}", answer.head_at);
        assert!(gaps.len() >= 6, "{gaps:?}");
        // Nothing is gathered: each content chunk is a piece of its own, an interval apart. A busy
        // machine may delay one, then the next is early.
        let least = Duration::from_secs_f64(TOKEN_MS / 1000.0 / 4.0);
        let apart = gaps.iter().filter(|gap| **gap >= least).count();
        assert!(apart + 1 >= gaps.len(), "{gaps:?}");
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_precedes_the_first_content_is_held_and_then_complete() {
    let stand = Stand::builder("held")
        .pods(slow_decode(Pod::pairs(1)))
        .start()
        .await;
    let direct = Call::post("/v1/chat/completions", chat_body("direct", true));
    let direct = direct
        .send(stand.engine("decode-r0").address())
        .await
        .unwrap();
    let call = Call::post("/v1/chat/completions", chat_body("routed", true));
    let routed = stand.send(call).await.expect(200);
    // The engine sends headers and a role chunk before it pulls the KV, which takes 300 ms.
    let took = routed.head_at;
    assert!(
        took >= Duration::from_millis(280),
        "headers came before the pull ended: {took:?}"
    );
    // Event by event the stream is the engine's own, but for ids and texts.
    let shape = |answer: &pd_e2e::Answer| -> Vec<(bool, bool, bool)> {
        let events = answer.events();
        let shapes = events.iter().map(|(_, data)| {
            (
                data.contains("\"role\""),
                is_content(data),
                data == "[DONE]",
            )
        });
        shapes.collect()
    };
    assert_eq!(shape(&routed), shape(&direct));
    prompt_of(&routed);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_not_streamed_has_the_engines_bytes_and_length() {
    let stand = Stand::pairs("whole", 1).await;
    let call = Call::post("/v1/chat/completions", chat_body("whole", false));
    let answer = stand.send(call).await.expect(200);
    assert_eq!(
        answer.header("content-length"),
        answer.bytes().len().to_string()
    );
    assert_eq!(answer.json()["object"], "chat.completion");
    prompt_of(&answer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_decode_ends_the_work_and_the_charges() {
    let stand = Stand::builder("leaves")
        .pods(slow_decode(Pod::pairs(1)))
        .start()
        .await;
    let mut body = chat_body("leave", true);
    body = body.replace("\"max_tokens\":8", "\"max_tokens\":500");
    let call = Call::post("/v1/chat/completions", body);
    let mut live = call.start(stand.envoy.data()).await.unwrap();
    live.next().await.unwrap().expect("a first chunk");
    let charged = stand.envoy.ledgers().await.unwrap().total;
    assert_eq!(charged.decode_running, 1, "{charged:?}");
    drop(live);
    eventually("the engine sees the client leave", || async {
        let state = stand.engine("decode-r0").state();
        if state.aborted == 1 && state.running == 0 {
            Ok(())
        } else {
            Err(state)
        }
    })
    .await;
    stand.settled(Duration::from_secs(5)).await;
}
