//! The proxy answers a request itself, before its pod was asked.

use super::*;

const TIMEOUT: Event<'static> = Event::ResponseHeaders {
    status: 504,
    proxy_details: Some("stream_idle_timeout"),
    event_stream: false,
    end: false,
};

fn warned(effects: &[Effect]) -> bool {
    has(
        effects,
        |effect| matches!(effect, Effect::Warn(text) if text.contains("idle_timeout")),
    )
}

#[test]
fn a_wait_for_the_prefill_that_the_proxy_cuts_is_a_prefill_timeout_and_the_kv_is_freed() {
    let mut stage = Stage::new(1, "");
    let mut flow = stage.flow_with(&[("x-request-id", b"mine")]);
    stage.on(&mut flow, Event::Body(CHAT));
    let effects = stage.on(&mut flow, TIMEOUT);
    let reply = reply(&effects);
    assert_eq!(reply.status, 504);
    assert!(
        reply
            .headers
            .contains(&("x-error-pd-prefill", "true".to_owned()))
    );
    assert!(reply.headers.contains(&("x-request-id", "mine".to_owned())));
    assert!(warned(&effects));
    assert_eq!(endings(&effects), 1);

    assert!(stage.on(&mut flow, GONE).is_empty());
    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        },
    );
    assert_eq!(call(&effects).address, "10.0.0.2:8000");
    stage.freed(&mut flow);
    stage.assert_at_rest();
}

#[test]
fn a_wait_for_the_look_up_that_the_proxy_cuts_leaves_nothing_behind() {
    let mut stage = Stage::of_engine("trtllm", 1, r#"{"trtScheduleStyle":"generation_first"}"#);
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    let effects = stage.on(&mut flow, TIMEOUT);
    assert_eq!(reply(&effects).status, 504);
    assert!(warned(&effects));
    assert_eq!(endings(&effects), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
    // The next one asks anew.
    let mut next = stage.flow();
    let effects = stage.on(&mut next, Event::Body(CHAT));
    assert_eq!(call(&effects).path, "/server_info");
}

#[test]
fn a_wait_for_the_snapshot_that_the_proxy_cuts_is_not_ready() {
    let mut stage = Stage::empty(r#"{"snapshotWait":5}"#);
    let mut flow = stage.flow();
    assert!(stage.on(&mut flow, Event::Body(CHAT)).is_empty());
    let effects = stage.on(&mut flow, TIMEOUT);
    assert_eq!(reply(&effects).status, 503);
    assert!(warned(&effects));
    assert_eq!(endings(&effects), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}
