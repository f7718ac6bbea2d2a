//! Configuration mistakes are named, and never let a request through unrouted.

use std::time::{Duration, Instant};

use pd_e2e::{Call, EnvoyConfig, Pod, Stand, chat_body, prompt_of};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_plugin_configuration_is_refused_with_every_mistake_and_the_old_one_stays() {
    let plugin = json!({ "prefillRequestTimeout": 17 });
    let mut stand = Stand::builder("bad-config")
        .pods(Pod::pairs(1))
        .plugin(&plugin)
        .start()
        .await;
    let bad = json!({
        "prefillRequestTimeout": -1,
        "decodeScorePolicy": "horoscope",
        "prefillRetries": "many",
        "noSuchSetting": true,
    });
    let refused = stand
        .envoy
        .reload(|envoy| envoy.plugin = bad.to_string())
        .await;
    println!("{refused:?}");
    assert!(refused.is_err());
    let log = stand.envoy.log();
    for name in [
        "prefillRequestTimeout",
        "decodeScorePolicy",
        "horoscope",
        "prefillRetries",
        "noSuchSetting",
    ] {
        assert!(log.contains(name), "the log does not name {name}");
    }
    // What is allowed is said too.
    assert!(
        log.contains("load_balancing"),
        "the log does not say what is allowed"
    );
    let not_json = stand
        .envoy
        .reload(|envoy| envoy.plugin = "{\"a\":".to_owned())
        .await;
    assert!(not_json.is_err());

    prompt_of(
        &stand
            .send(Call::post(CHAT, chat_body("still here", false)))
            .await
            .expect(200),
    );
    let knobs = stand.envoy.status().await.unwrap().knobs;
    let value = knobs.get("prefillRequestTimeout").and_then(|v| v.as_f64());
    assert_eq!(value, Some(17.0), "{knobs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_are_read_from_envoys_environment_and_a_bad_one_only_warns() {
    let change = |envoy: &mut EnvoyConfig| {
        let variables = [
            ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "13"),
            ("AIBRIX_DECODE_SCORE_POLICY", "least_request"),
            ("AIBRIX_TOKEN_LOAD_KV_WEIGHT", "heavy"),
        ];
        for (name, value) in variables {
            envoy.environment.insert(name.to_owned(), value.to_owned());
        }
        envoy.plugin = json!({ "decodeScorePolicy": "token_load" }).to_string();
    };
    let stand = Stand::builder("variables")
        .pods(Pod::pairs(1))
        .envoy(change)
        .start()
        .await;
    let knobs = stand.envoy.status().await.unwrap().knobs;
    let number = |name: &str| knobs.get(name).and_then(|v| v.as_f64());
    assert_eq!(
        number("prefillRequestTimeout"),
        Some(13.0),
        "from the variable: {knobs:?}"
    );
    assert_eq!(
        knobs["decodeScorePolicy"], "token_load",
        "plugin settings come first"
    );
    assert_eq!(
        number("tokenLoadKVWeight"),
        Some(0.3),
        "a bad variable: the default"
    );
    assert!(
        stand.envoy.log().contains("AIBRIX_TOKEN_LOAD_KV_WEIGHT"),
        "and a warning"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_allow_on_headers_stop_iteration_requests_get_500_and_the_log_says_why() {
    let change = |envoy: &mut EnvoyConfig| envoy.listener("ALLOW_STOP", "false");
    let builder = Stand::builder("no-stop")
        .pods(Pod::pairs(1))
        .envoy(change)
        .without_agent();
    let stand = builder.start().await;
    for size in [10, 300_000] {
        let start = Instant::now();
        let call = Call::post(CHAT, chat_body(&"x".repeat(size), false));
        let answer = stand.send(call).await.expect(500);
        println!("{size} bytes: 500 after {:?}", start.elapsed());
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
        let message = answer.json()["error"]["message"].to_string();
        assert!(
            message.contains("allow_on_headers_stop_iteration"),
            "{message}"
        );
    }
    assert!(
        stand
            .envoy
            .log()
            .contains("allow_on_headers_stop_iteration")
    );
    for pod in ["prefill-r0", "decode-r0"] {
        assert_eq!(
            stand.engine(pod).state().connections_total,
            0,
            "{pod} was reached"
        );
    }
}

#[test]
fn the_shipped_files_use_the_names_the_programs_know() {
    use pd_wire::names::{CLUSTER, CONTROL, HEADER_TARGET, VM_ID};
    let folder = pd_e2e::Programs::repository().join("envoy/standalone");
    let [bootstrap, listeners] = ["envoy.yaml", "listeners.yaml"]
        .map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
    let has = |text: &str, line: String| {
        assert!(text.lines().any(|l| l.trim() == line), "no line {line:?}");
    };
    has(&bootstrap, format!("- name: {CLUSTER}"));
    has(&bootstrap, format!("http_header_name: {HEADER_TARGET}"));
    has(&bootstrap, format!("- remove: {HEADER_TARGET}"));
    has(&listeners, format!("- remove: {HEADER_TARGET}"));
    has(&listeners, format!("cluster: {CLUSTER}"));
    has(&listeners, format!("vm_id: {VM_ID}"));
    // Filter chain and route; the filter looks at either.
    let control = format!("- name: {CONTROL}");
    assert!(listeners.lines().filter(|l| l.trim() == control).count() >= 2);
}
