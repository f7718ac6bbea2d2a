//! Plugin configurations: taken as a whole or refused with every mistake named.

use crate::stand::{
    bare, chat, config, control, healthy, logged, push, status_at, topology, two_pairs,
};
use pd_wasm_tests::{Exchange, Gateway, GatewayConfig};
use pd_wire::names;

const WRONG: &str = r#"{
    "prefillRetries": 9,
    "prefill_score_policy": "prefix_cache",
    "decodeScorePolicy": "best",
    "maxOrphans": "many",
    "streamIdleBackstop": -1,
    "nothing": 1,
    "controlTokens": ["secret"]
}"#;

#[test]
fn a_bad_config_is_refused_and_every_mistake_is_named() {
    let error = Gateway::try_new(config(1, WRONG)).err().unwrap();
    let log: Vec<&str> = error.logs.iter().map(|line| line.text.as_str()).collect();
    for field in [
        "prefillRetries",
        "prefill_score_policy",
        "decodeScorePolicy",
        "maxOrphans",
        "streamIdleBackstop",
        "nothing",
        "controlTokens",
    ] {
        assert!(
            log.iter().any(|line| line.contains(field)),
            "{field} is not named: {log:#?}"
        );
    }
    // A value is told with what would be right; a token never is.
    let retries = log.iter().find(|line| line.contains("prefillRetries"));
    assert!(retries.unwrap().contains('9') && retries.unwrap().contains('3'));
    assert!(!log.iter().any(|line| line.contains("\"secret\"")));
}

#[test]
fn no_json_at_all_is_refused_and_nothing_is_fine() {
    for text in ["{", "[]", "7", r#"{"maxOrphans":1,"maxOrphans":2}"#] {
        assert!(Gateway::try_new(config(1, text)).is_err(), "{text}");
    }
    for text in ["", " \n", "{}"] {
        assert!(Gateway::try_new(config(1, text)).is_ok(), "{text}");
    }
}

#[test]
fn a_refused_change_leaves_the_old_config_in_force() {
    let mut gateway = healthy(2, r#"{"prefillRetries":2}"#);
    assert!(
        gateway
            .reconfigure(Default::default(), WRONG.as_bytes())
            .is_err()
    );
    assert_eq!(status_at(&mut gateway, 0).knobs["prefillRetries"], 2);
    for worker in 0..2 {
        gateway.run(chat(true).worker(worker)).expect(200);
    }
}

#[test]
fn variables_stand_below_the_config_and_bad_ones_are_warned_about() {
    let mut gateway = Gateway::new(GatewayConfig {
        env: vec![
            ("AIBRIX_PREFILL_REQUEST_TIMEOUT".into(), "7".into()),
            ("AIBRIX_DECODE_SCORE_POLICY".into(), "least_request".into()),
            ("AIBRIX_TOKEN_LOAD_REQUEST_COST".into(), "free".into()),
        ],
        ..config(1, r#"{"decodeScorePolicy":"load_balancing"}"#)
    });
    let knobs = status_at(&mut gateway, 0).knobs;
    assert_eq!(knobs["prefillRequestTimeout"], 7);
    assert_eq!(knobs["decodeScorePolicy"], "load_balancing");
    assert_eq!(knobs["tokenLoadRequestCost"], 3500);
    assert!(logged(&gateway, "AIBRIX_TOKEN_LOAD_REQUEST_COST"));
}

#[test]
fn a_variable_that_no_default_may_replace_is_refused() {
    let env = vec![("AIBRIX_TRT_MACHINE_ID".into(), "1024".into())];
    let error = Gateway::try_new(GatewayConfig {
        env,
        ..config(1, "")
    });
    let logs = error.err().unwrap().logs;
    assert!(logs.iter().any(|line| line.text.contains("1024")));
}

#[test]
fn a_listener_that_hides_bodies_is_a_500_within_two_ticks_and_nothing_goes_unrouted() {
    let mut gateway = Gateway::new(GatewayConfig {
        allow_on_headers_stop_iteration: false,
        ..config(1, "")
    });
    let sent_at = gateway.now_ms();
    let outcome = gateway.run(chat(true));
    assert!(outcome.ended_at_ms - sent_at <= 200, "{outcome:#?}");
    assert!(
        outcome
            .expect(500)
            .text()
            .contains("allow_on_headers_stop_iteration")
    );
    assert!(outcome.upstream.is_none());
    assert!(logged(&gateway, "allow_on_headers_stop_iteration"));
}

#[test]
fn a_slow_upload_is_not_taken_for_a_hidden_body() {
    let mut gateway = bare(1, "");
    let flight = gateway
        .begin(Exchange::new("POST", "/v1/chat/completions").header("content-length", "100"));
    gateway.advance(10_000);
    assert_eq!(gateway.outcome(flight).status, None);
}

#[test]
fn the_status_page_tells_versions_vms_and_knobs_but_no_token() {
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let plugin = format!(r#"{{"controlTokens":["{hash}"]}}"#);
    let mut gateway = Gateway::new(config(2, &plugin));
    gateway.advance(200);
    let page = control("GET", names::PATH_STATUS).header("authorization", "Bearer secret");
    let outcome = gateway.run(page);
    let page = outcome.expect(200);
    assert!(!page.text().contains(hash));
    let page = page.json();
    assert_eq!(page["format"], 1);
    assert_eq!(page["vms"].as_array().unwrap().len(), 2);
    assert!(page["vms"][0]["memoryPages"].as_u64().unwrap() > 0);
    assert!(page.get("topology").is_none());
    push(&mut gateway, &topology(1, &two_pairs())).expect(401);
}
