//! What the legs carry is the client's body, byte for byte, but for the members the router owns.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use pd_e2e::{Answer, Call, Pod, Stand, chat_body, prompt_of};
use pd_engine_sim::Record;
use serde_json::{Value, json};

/// Splits a leg's body into the members the router put first and the rest: everything after
/// them, including the client's own bytes before the brace.
fn split(sent: &str, members: usize) -> (Value, String) {
    let (lead, inside) = sent.split_once('{').unwrap();
    let mut inserted = serde_json::Map::new();
    let mut rest = inside;
    for _ in 0..members {
        let mut parts = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let name = parts.next().unwrap().unwrap();
        let at = parts.byte_offset();
        let tail = rest[at..].trim_start().strip_prefix(':').unwrap();
        let mut parts = serde_json::Deserializer::from_str(tail).into_iter::<Value>();
        let value = parts.next().unwrap().unwrap();
        let at = parts.byte_offset();
        inserted.insert(name.as_str().unwrap().to_owned(), value);
        rest = tail[at..].strip_prefix(',').unwrap();
    }
    (Value::Object(inserted), format!("{lead}{{{rest}"))
}

fn body_of(record: &Record) -> &str {
    record.body.as_deref().unwrap()
}

fn golden(name: &str) -> String {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let text = std::fs::read_to_string(here.join(name)).unwrap();
    // Files end in a newline that is not part of the body.
    text.strip_suffix('\n').unwrap().to_owned()
}

/// Sends `CASE.request.json` and compares both legs with `CASE.prefill.json`, which starts with
/// `{@NEW@,` where the router's members go, and with the request itself.
async fn matches_golden(stand: &Stand, path: &str, case: &str, new_in_prefill: &[&str]) {
    let request = golden(&format!("{case}.request.json"));
    let expected = golden(&format!("{case}.prefill.json"));
    let answer = stand
        .send(Call::post(path, request.clone()))
        .await
        .expect(200);
    prompt_of(&answer);
    let legs = stand.legs(&answer);
    assert_eq!(legs.len(), 2, "{case}: {}", answer.shown());

    let (inserted, rest) = split(body_of(&legs[0]), new_in_prefill.len());
    let mut names: Vec<_> = inserted
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    assert_eq!(names, new_in_prefill, "{case}: {}", body_of(&legs[0]));
    assert_eq!(
        rest,
        expected.replacen("@NEW@,", "", 1),
        "{case}: prefill leg"
    );
    for (name, value) in inserted.as_object().unwrap() {
        match name.as_str() {
            "kv_transfer_params" => assert_eq!(
                value,
                &json!({
                    "do_remote_decode": true,
                    "do_remote_prefill": false,
                    "remote_engine_id": null,
                    "remote_block_ids": null,
                    "remote_host": null,
                    "remote_port": null,
                })
            ),
            "stream" => assert_eq!(value, &json!(false)),
            _ => assert_eq!(value, &json!(1), "{name}"),
        }
    }

    let (inserted, rest) = split(body_of(&legs[1]), 1);
    assert_eq!(rest, request, "{case}: decode leg");
    let handed = &inserted["kv_transfer_params"];
    assert_eq!(handed["do_remote_prefill"], true, "{handed}");
    assert_eq!(handed["do_remote_decode"], false, "{handed}");
    // Passed on as it came: a list of lists, and fields the router knows nothing of.
    assert!(handed["remote_block_ids"][0].is_array(), "{handed}");
    assert!(handed["remote_request_id"].is_string(), "{handed}");
    assert!(handed.get("tp_size").is_some(), "{handed}");
    for leg in &legs {
        let length = body_of(leg).len().to_string();
        assert_eq!(leg.headers.get("content-length"), Some(&length), "{case}");
        assert_eq!(leg.headers.get("transfer-encoding"), None, "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_legs_match_the_golden_files() {
    let stand = Stand::pairs("golden", 1).await;
    let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
    let fresh = [
        "kv_transfer_params",
        "max_completion_tokens",
        "max_tokens",
        "stream",
    ];
    // Tool schemas, unicode raw and escaped, integers beyond 64 bits, unusual numbers, key order.
    matches_golden(&stand, chat, "tools", &fresh).await;
    // White space everywhere, also before the brace.
    matches_golden(&stand, chat, "spaces", &fresh).await;
    // Members the router owns are replaced in place, or leave with their comma.
    let some = ["kv_transfer_params", "max_completion_tokens"];
    matches_golden(&stand, chat, "owned", &some).await;
    matches_golden(
        &stand,
        completions,
        "completion",
        &["kv_transfer_params", "stream"],
    )
    .await;
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_byte_order_mark_is_accepted_and_kept() {
    let stand = Stand::pairs("bom", 1).await;
    let body = format!("\u{feff} \n{}", chat_body("with a mark", false));
    let answer = stand
        .send(Call::post("/v1/chat/completions", body.clone()))
        .await;
    // The engine may refuse the mark itself; the router must not, and passes it on.
    assert!([200, 400].contains(&answer.status), "{}", answer.shown());
    let log = stand.engine("prefill-r0").log();
    let sent = log.iter().find(|record| record.method == "POST");
    let Some(sent) = sent else {
        panic!("nothing reached the engine: {}", answer.shown())
    };
    let sent = body_of(sent);
    assert!(sent.starts_with("\u{feff} \n{"), "{sent}");
    assert!(sent.contains("with a mark"), "{sent}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunked_request_body_reaches_both_legs_with_its_length() {
    let stand = Stand::pairs("chunked", 1).await;
    let prompt = "chunk ".repeat(20_000);
    let body = chat_body(&prompt, true);
    for size in [1000, 65_536] {
        let call = Call::post("/v1/chat/completions", body.clone()).chunks_of(size);
        let answer = stand.send(call).await.expect(200);
        prompt_of(&answer);
        let legs = stand.legs(&answer);
        assert_eq!(legs.len(), 2);
        let (_, rest) = split(body_of(&legs[1]), 1);
        assert!(rest == body, "the decode leg is the client's body");
        for leg in &legs {
            assert_eq!(leg.headers["content-length"], leg.body_length.to_string());
            assert_eq!(leg.headers.get("transfer-encoding"), None);
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_ten_megabytes_is_routed() {
    let stand = Stand::pairs("ten-megabytes", 1).await;
    let body = chat_body(&"0123456789abcde ".repeat(640 << 10), true);
    assert!(body.len() > 10 << 20);
    let answer = stand
        .send(Call::post("/v1/chat/completions", body.clone()))
        .await
        .expect(200);
    prompt_of(&answer);
    let legs = stand.legs(&answer);
    assert_eq!(legs.len(), 2);
    let (_, rest) = split(body_of(&legs[1]), 1);
    assert!(rest == body, "the decode leg is the client's body");
    println!(
        "{} bytes: first byte {:?}, total {:?}",
        body.len(),
        answer.head_at,
        answer.total
    );
    stand.settled(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_a_413_in_openai_form() {
    let stand = Stand::builder("413")
        .pods(Pod::pairs(1))
        .body_limit(2_000_000)
        .start()
        .await;
    let body = |bytes: usize| -> Bytes { chat_body(&"x".repeat(bytes), false).into() };
    let path = "/v1/chat/completions";
    stand
        .send(Call::post(path, body(1_900_000)))
        .await
        .expect(200);
    for call in [
        Call::post(path, body(2_100_000)),
        Call::post(path, body(2_100_000)).chunks_of(50_000),
    ] {
        let answer = stand.send(call).await.expect(413);
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert!(
            !answer.header("request-id").is_empty(),
            "{}",
            answer.shown()
        );
    }
    assert_eq!(stand.seen("prefill-r0").len(), 1);
    stand.settled(Duration::from_secs(5)).await;
}

/// Sends a body that must be refused.
async fn refused(stand: &Stand, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut call = Call::post(path, body.to_owned());
    for (name, value) in headers {
        call = call.header(name, value);
    }
    stand.send(call).await.expect(400)
}

#[tokio::test(flavor = "multi_thread")]
async fn hand_over_members_from_a_client_are_refused_on_every_route() {
    let stand = Stand::pairs("hand-over", 1).await;
    let members = [
        "kv_transfer_params",
        "disagg_prefill_resp",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disaggregated_params",
        "ec_transfer_params",
        "rid",
        // The same name to every JSON reader.
        r"kv\u005ftransfer_params",
        r"\u006b\u0076_transfer_params",
        r"\u0072id",
        r"bootstrap\u005Fhost",
    ];
    for member in members {
        let rest = r#""model":"sim-model","messages":[{"role":"user","content":"x"}]"#;
        for body in [
            format!(r#"{{"{member}":{{"do_remote_prefill":true}},{rest}}}"#),
            format!(r#"{{{rest},"{member}":null}}"#),
        ] {
            refused(&stand, "/v1/chat/completions", &[], &body).await;
            // One leg: by strategy, and by path.
            let one_leg = [("routing-strategy", "random")];
            refused(&stand, "/v1/chat/completions", &one_leg, &body).await;
        }
        let body = format!(r#"{{"model":"sim-model","input":"x","{member}":1}}"#);
        refused(&stand, "/v1/embeddings", &[], &body).await;
        let body = format!(r#"{{"model":"sim-model","prompt":["a","b"],"{member}":1}}"#);
        refused(&stand, "/v1/completions", &[], &body).await;
    }
    // The same words inside a message are nobody's business.
    let body = chat_body(r#"{"kv_transfer_params": {"rid": 1}}"#, false);
    stand
        .send(Call::post("/v1/chat/completions", body))
        .await
        .expect(200);
    let seen = stand.seen("prefill-r0").len() + stand.seen("decode-r0").len();
    assert_eq!(seen, 2, "only the last request reached the engines");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_hand_kv_over_goes_in_one_leg() {
    let stand = Stand::pairs("one-leg", 1).await;
    let bodies = [
        r#"{"model":"sim-model","prompt":["a","b"],"max_tokens":2}"#,
        r#"{"model":"sim-model","prompt":"a","n":2,"max_tokens":2}"#,
        r#"{"model":"sim-model","prompt":"a","best_of":2,"max_tokens":2}"#,
    ];
    for body in bodies {
        let answer = stand
            .send(Call::post("/v1/completions", body))
            .await
            .expect(200);
        assert_eq!(
            answer.header("target-pod"),
            "decode-r0",
            "{}",
            answer.shown()
        );
        assert_eq!(
            answer.header("prefill-target-pod"),
            "",
            "{}",
            answer.shown()
        );
        let sent = stand.seen("decode-r0");
        assert_eq!(sent.last().and_then(|r| r.body.as_deref()), Some(body));
    }
    assert!(stand.seen("prefill-r0").is_empty());
    stand.settled(Duration::from_secs(5)).await;
}
