//! What a request gets that cannot be served: a status, OpenAI's shape, and what to do next.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hyper::Method;
use pd_e2e::{Answer, Call, EnvoyConfig, Pod, Stand, chat_body, prompt_of};
use pd_engine_sim::{Fault, FaultKind, On};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

fn has_request_id(answer: &Answer) {
    assert!(
        !answer.header("request-id").is_empty(),
        "{}",
        answer.shown()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_say_nothing_sensible_are_refused_before_any_engine() {
    let stand = Stand::pairs("nonsense", 1).await;
    let message = r#""messages":[{"role":"user","content":"x"}]"#;
    let refused = [
        (400, "{".to_owned()),
        (400, "not json".to_owned()),
        (400, "[1]".to_owned()),
        (400, "\"text\"".to_owned()),
        (400, "{}".to_owned()),
        (400, format!("{{{message}}}")),
        (400, format!(r#"{{"model":7,{message}}}"#)),
        (
            400,
            format!(r#"{{"model":"sim-model",{message}}} trailing"#),
        ),
        (400, format!(r#"{{"model":"sim-model",{message},}}"#)),
        // A key that the router acts on, twice, plainly or escaped.
        (
            400,
            format!(r#"{{"model":"sim-model","model":"sim-model",{message}}}"#),
        ),
        (
            400,
            format!(r#"{{"model":"sim-model",{message},"stream":true,"stream":false}}"#),
        ),
        (
            400,
            format!(r#"{{"model":"sim-model",{message},"max_tokens":1,"max_\u0074okens":9}}"#),
        ),
        (404, format!(r#"{{"model":"other-model",{message}}}"#)),
    ];
    for (status, body) in refused {
        let answer = stand.send(Call::post(CHAT, body.clone())).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.shown());
        let answer = answer.expect(status);
        has_request_id(&answer);
        if status == 404 {
            assert_eq!(answer.json()["error"]["code"], "model_not_found");
        }
    }
    let empty = stand
        .send(Call::new(Method::POST, CHAT).header("content-length", "0"))
        .await;
    has_request_id(&empty.expect(400));
    let coded = Call::post(CHAT, chat_body("x", false)).header("content-encoding", "gzip");
    has_request_id(&stand.send(coded).await.expect(415));
    // Identity is no encoding; what the engine thinks of the header is its own affair.
    let plain = Call::post(CHAT, chat_body("x", false)).header("content-encoding", "identity");
    assert_ne!(stand.send(plain).await.status, 415);
    let strategy = Call::post(CHAT, chat_body("x", false)).header("routing-strategy", "astrology");
    let answer = stand.send(strategy).await.expect(400);
    let message = answer.json()["error"]["message"].to_string();
    assert!(
        message.contains("least-request") && message.contains("pd"),
        "{message}"
    );
    let posts = |pod: &str| {
        let log = stand.engine(pod).log();
        log.iter().filter(|record| record.method == "POST").count()
    };
    let reached = (posts("prefill-r0"), posts("decode-r0"));
    assert_eq!(reached, (1, 1), "only the good request reached engines");
    stand.envoy.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_paths_are_404_and_models_are_listed() {
    let stand = Stand::pairs("paths", 1).await;
    for call in [
        Call::get("/"),
        Call::get(CHAT),
        Call::get("/v2/models"),
        Call::post("/v1/files", "{}"),
        Call::new(Method::DELETE, "/v1/models/sim-model"),
        Call::get("/pd/v1/ledgers"),
        Call::put("/pd/v1/topology", "{}"),
    ] {
        let answer = stand.send(call).await.expect(404);
        has_request_id(&answer);
    }
    let list = stand.send(Call::get("/v1/models")).await.expect(200).json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{list}");
    assert_eq!(list["data"][0]["id"], "sim-model");
    assert_eq!(list["data"][0]["object"], "model");
    let one = stand
        .send(Call::get("/v1/models/sim-model"))
        .await
        .expect(200)
        .json();
    assert_eq!(one["id"], "sim-model");
    let none = stand
        .send(Call::get("/v1/models/nobody"))
        .await
        .expect(404)
        .json();
    assert_eq!(none["error"]["code"], "model_not_found");
    stand.send(Call::get("/readyz")).await.expect(200);
    for pod in ["prefill-r0", "decode-r0"] {
        assert!(stand.seen(pod).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_known_model_without_usable_pods_is_503() {
    // A prefill pod alone makes no roleset.
    let stand = Stand::builder("no-pods")
        .pods([Pod::prefill("r0")])
        .start()
        .await;
    let answer = stand
        .send(Call::post(CHAT, chat_body("x", false)))
        .await
        .expect(503);
    has_request_id(&answer);
    assert_eq!(
        answer.header("x-error-routing"),
        "true",
        "{}",
        answer.shown()
    );
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engines_own_error_passes_untouched() {
    let stand = Stand::pairs("engine-error", 1).await;
    let body = r#"{"error":{"message":"the engine's own words","type":"BadRequestError","param":null,"code":422}}"#;
    for code in [400, 422, 500] {
        let kind = FaultKind::Status {
            code,
            body: Some(body.to_owned()),
            headers: [("x-engine".to_owned(), "yes".to_owned())].into(),
        };
        assert!(
            stand
                .engine("decode-r0")
                .inject(Fault::next(1, On::Decode, kind))
        );
        let answer = stand.send(Call::post(CHAT, chat_body("x", false))).await;
        assert_eq!(answer.status, code, "{}", answer.shown());
        assert_eq!(answer.text(), body);
        assert_eq!(answer.header("x-engine"), "yes");
        // Such an engine took no KV.
        stand.settled(Duration::from_secs(5)).await;
    }
}

/// Writes raw bytes, then waits for whatever comes until the other side closes.
async fn raw(to: SocketAddr, bytes: &[u8]) -> (String, Duration) {
    let start = Instant::now();
    let mut stream = TcpStream::connect(to).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut all = Vec::new();
    let read = stream.read_to_end(&mut all);
    let ended = tokio::time::timeout(Duration::from_secs(20), read).await;
    assert!(
        ended.is_ok(),
        "neither an answer nor an end: {}",
        String::from_utf8_lossy(&all)
    );
    (String::from_utf8_lossy(&all).into_owned(), start.elapsed())
}

/// An upload that stops, cut by the limit of this name.
async fn stalled_upload(limit: &'static str) {
    let short = move |envoy: &mut EnvoyConfig| envoy.listener(limit, "1s");
    let stand = Stand::builder(limit)
        .pods(Pod::pairs(1))
        .envoy(short)
        .start()
        .await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: 1000\r\n\r\n{{\"model\":\"sim-model\","
    );
    let (text, took) = raw(stand.envoy.data(), head.as_bytes()).await;
    println!("{limit}: answered after {took:?}");
    assert!(text.starts_with("HTTP/1.1 408"), "{text}");
    assert!(text.contains("content-type: application/json"), "{text}");
    assert!(text.contains("{\"error\":{"), "{text}");
    assert!(text.contains("\"code\":\"request_timeout\""), "{text}");
    assert!(text.contains("request-id: "), "{text}");
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_stalls_is_a_408_in_openai_form() {
    stalled_upload("REQUEST_TIMEOUT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_stalls_under_a_short_limit_of_the_wait_is_a_408_too() {
    stalled_upload("WAITING_TIMEOUT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_sent_json_whatever_the_client_calls_it() {
    let stand = Stand::pairs("content-type", 1).await;
    for kind in ["text/plain", "application/grpc", ""] {
        let call = Call::new(Method::POST, CHAT)
            .header("content-type", kind)
            .body(chat_body("x", false));
        let answer = stand.send(call).await.expect(200);
        let legs = stand.legs(&answer);
        assert_eq!(legs.len(), 2);
        for leg in legs {
            assert_eq!(leg.headers["content-type"], "application/json", "{kind:?}");
        }
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_not_http_get_an_error_in_openai_form() {
    let stand = Stand::pairs("not-http", 1).await;
    let (text, _) = raw(stand.envoy.data(), b"GARBAGE\r\n\r\n").await;
    assert!(
        text.starts_with("HTTP/1.1 400") && text.contains("{\"error\":{"),
        "{text}"
    );
    // The next client is not affected.
    let answer = stand
        .send(Call::post(CHAT, chat_body("x", false)))
        .await
        .expect(200);
    prompt_of(&answer);
}
