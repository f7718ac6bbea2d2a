//! What an operator sees: labelled metrics, an access log with the decision, explanations.

use pd_e2e::{Answer, Call, Pod, Stand, chat_body, eventually};
use serde_json::{Value, json};

async fn chat(stand: &Stand, explain: bool) -> Answer {
    let call = Call::post("/v1/chat/completions", chat_body("a secret prompt", false));
    let mut call = call.header("x-request-id", "the-clients-own");
    if explain {
        call = call.header("x-pd-explain", "true");
    }
    stand.send(call).await.expect(200)
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_come_out_with_labels() {
    let stand = Stand::pairs("metrics", 1).await;
    chat(&stand, false).await;
    let page = eventually("the success is counted", || async {
        let page = stand
            .envoy
            .metrics()
            .await
            .map_err(|error| format!("{error:#}"))?;
        let counted = page.lines().any(|line| {
            line.starts_with("gateway_request_model_success_total{")
                && line.contains("model=\"sim-model\"")
                && line.ends_with(" 1")
        });
        if counted { Ok(page) } else { Err(page) }
    })
    .await;
    let ours = page
        .lines()
        .filter(|l| l.starts_with("gateway_") || l.contains("gateway_"));
    for line in ours {
        println!("{line}");
        let name = line
            .trim_start_matches("# TYPE ")
            .split(['{', ' '])
            .next()
            .unwrap_or_default();
        let plain = name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        assert!(
            plain && !name.ends_with('_'),
            "labels left in the name: {line}"
        );
        assert!(!name.starts_with("envoy_"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_access_log_tells_the_decision_and_not_the_prompt() {
    let stand = Stand::pairs("access-log", 1).await;
    let answer = chat(&stand, false).await;
    let id = answer.header("request-id").to_owned();
    let entry = eventually("the access log has the request", || async {
        let log = stand.envoy.log();
        let lines = log.lines().filter(|line| line.starts_with('{'));
        let mut entries = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        entries
            .find(|entry| entry["request_id"] == id.as_str())
            .ok_or(())
    })
    .await;
    println!("{entry}");
    assert!(
        entry["decision"].as_str().is_some_and(|d| !d.is_empty()),
        "{entry}"
    );
    assert!(
        entry["prefill"]
            .as_str()
            .is_some_and(|p| p.contains("prefill-r0")),
        "{entry}"
    );
    assert!(
        entry["decode"]
            .as_str()
            .is_some_and(|p| p.contains("decode-r0")),
        "{entry}"
    );
    assert_eq!(entry["status"], 200);
    assert_eq!(entry["client_request_id"], "the-clients-own");
    assert!(
        !stand.envoy.log().contains("a secret prompt"),
        "the prompt was logged"
    );
    let agent = stand
        .agent
        .as_ref()
        .map(pd_e2e::Agent::log)
        .unwrap_or_default();
    assert!(!agent.contains("a secret prompt"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_is_explained_if_that_is_allowed() {
    let stand = Stand::pairs("not-explained", 1).await;
    assert_eq!(chat(&stand, true).await.header("x-pd-decision"), "");
    drop(stand);
    let plugin = json!({ "allowExplain": true });
    let stand = Stand::builder("explained")
        .pods(Pod::pairs(2))
        .plugin(&plugin)
        .start()
        .await;
    assert_eq!(chat(&stand, false).await.header("x-pd-decision"), "");
    let answer = chat(&stand, true).await;
    let decision = answer.header("x-pd-decision");
    println!("{decision}");
    for pod in ["prefill-r0", "prefill-r1", "decode-r0", "decode-r1"] {
        assert!(decision.contains(pod), "{pod} is not in {decision}");
    }
}
