//! `requestsPerSecond`: which requests it costs, refuses and gives back.

use super::strategies::request;
use super::*;
use pd_wire::profile::ModelConfig;

/// One pair whose model has this annotation; `replicas` gateways.
fn stage(annotation: &str, replicas: u32) -> Stage {
    let annotation = ModelConfig::parse(annotation).0.unwrap();
    let served = model("m")
        .pod(pod("ns/p").prefill().roleset("r").config(annotation))
        .pod(pod("ns/d").decode().roleset("r").label("gpu", "old"));
    let mut stage = Stage::empty("");
    let pushed = topology(1, 1).replicas(replicas).model(served).json();
    accept_topology(&stage.store, &pushed, 0).unwrap();
    stage.worker.fleet.refresh(&stage.store);
    stage
}

/// Sends a request; its answer, when it was answered at once.
fn status(stage: &mut Stage, headers: &[(&str, &str)]) -> Option<u16> {
    let mut flow = request(stage, headers);
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    if has(&effects, |effect| matches!(effect, Effect::Call(_))) {
        stage.on(&mut flow, GONE);
        stage.on(&mut flow, Event::CallFailed);
        return None;
    }
    Some(reply(&effects).status)
}

const LIMITED: &str = r#"{"profiles": {"default": {"requestsPerSecond": 4}, "free": {}}}"#;

#[test]
fn requests_beyond_the_limit_get_a_429_that_says_when_to_come_back() {
    let mut stage = stage(LIMITED, 2);
    for expected in [None, None, Some(429), Some(429)] {
        assert_eq!(status(&mut stage, &[]), expected);
    }
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    let reply = reply(&effects);
    for header in [("x-error-model-rps-exceeded", "true"), ("retry-after", "1")] {
        assert!(reply.headers.contains(&(header.0, header.1.to_owned())));
    }
    let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(body["error"]["type"], "rate_limit_error");
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    assert_eq!(endings(&effects), 1);
    assert_eq!(status(&mut stage, &[("config-profile", "free")]), None);
    stage.now_ms += 1000;
    assert_eq!(status(&mut stage, &[]), None);
    stage.assert_at_rest();
}

#[test]
fn only_requests_of_a_limited_profile_touch_the_count() {
    let mut stage = stage(LIMITED, 1);
    status(&mut stage, &[("config-profile", "free")]);
    assert!(!stage.store.keys().iter().any(|key| key.contains("rate")));
    status(&mut stage, &[]);
    assert!(stage.store.keys().iter().any(|key| key.contains("rate")));
}

#[test]
fn a_request_that_no_pod_can_serve_does_not_count() {
    let mut stage = stage(LIMITED, 1);
    for _ in 0..10 {
        let excluded = [("external-filter", "gpu=new")];
        assert_eq!(status(&mut stage, &excluded), Some(503));
        assert_eq!(
            status(&mut stage, &[("routing-strategy", "none")]),
            Some(400)
        );
    }
    for expected in [None, None, None, None, Some(429)] {
        assert_eq!(status(&mut stage, &[]), expected);
    }
}

#[test]
fn a_retry_is_no_other_request() {
    let annotation = r#"{"profiles": {"default": {"requestsPerSecond": 1}}}"#;
    let annotation = ModelConfig::parse(annotation).0.unwrap();
    let mut served = model("m");
    for set in ["r0", "r1"] {
        let config = annotation.clone();
        served = served
            .pod(
                pod(&format!("ns/{set}-p"))
                    .prefill()
                    .roleset(set)
                    .config(config),
            )
            .pod(pod(&format!("ns/{set}-d")).decode().roleset(set));
    }
    let mut stage = Stage::serving(served, "");
    let mut flow = stage.flow();
    call(&stage.on(&mut flow, Event::Body(CHAT)));
    stage.on(&mut flow, Event::CallFailed);
    call(&stage.on(&mut flow, Event::Body(CHAT)));
    assert_eq!(status(&mut stage, &[]), Some(429));
}
