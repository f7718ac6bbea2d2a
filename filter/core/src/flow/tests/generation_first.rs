//! TensorRT-LLM, generation first: the context worker is asked where it is, then both legs go.

use super::*;

const INFO: Event<'static> = Event::CallReply {
    status: 200,
    body: br#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["tcp://h:1/a"]}}"#,
};
const PREFILLED: Event<'static> = Event::CallReply {
    status: 200,
    body: b"{}",
};

fn stage(rolesets: usize) -> Stage {
    Stage::of_engine(
        "trtllm",
        rolesets,
        r#"{"trtScheduleStyle":"generation_first"}"#,
    )
}

fn asks(effects: &[Effect]) -> bool {
    has(
        effects,
        |effect| matches!(effect, Effect::Call(call) if call.method == "GET" && call.path == "/server_info"),
    )
}

fn sends(effects: &[Effect]) -> bool {
    has(effects, |effect| matches!(effect, Effect::Send(_)))
}

#[test]
fn a_worker_is_asked_once_and_both_legs_carry_one_id() {
    let mut stage = stage(1);
    let mut first = stage.flow();
    let effects = stage.on(&mut first, Event::Body(CHAT));
    assert!(asks(&effects) && !sends(&effects));
    assert!(call(&effects).body.is_empty());
    // Another one waits for that answer.
    let mut second = stage.flow();
    let effects = stage.on(&mut second, Event::Body(CHAT));
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));

    let effects = stage.on(&mut first, INFO);
    let prefill: serde_json::Value = serde_json::from_slice(&call(&effects).body).unwrap();
    let decode: serde_json::Value =
        serde_json::from_slice(&leg(&effects).body.apply(CHAT)).unwrap();
    let (ctx, generation) = (
        &prefill["disaggregated_params"],
        &decode["disaggregated_params"],
    );
    assert_eq!(ctx["schedule_style"], 1);
    assert_eq!(ctx["disagg_request_id"], generation["ctx_request_id"]);
    assert_eq!(
        generation["disagg_request_id"],
        generation["ctx_request_id"]
    );
    assert_eq!(generation["ctx_info_endpoint"], "tcp://h:1/a");

    stage.now_ms = second.deadline().unwrap();
    let effects = stage.on(&mut second, Event::Due);
    assert!(sends(&effects) && !asks(&effects));
    // A minute later it is asked again.
    stage.now_ms += 60_000;
    let mut third = stage.flow();
    assert!(asks(&stage.on(&mut third, Event::Body(CHAT))));
}

#[test]
fn a_failed_look_up_is_tried_elsewhere_before_any_leg_is_sent() {
    for (event, status) in [
        (
            Event::CallReply {
                status: 200,
                body: br#"{"disaggregated_params":{}}"#,
            },
            503,
        ),
        (
            Event::CallReply {
                status: 404,
                body: b"",
            },
            503,
        ),
        (Event::CallFailed, 503),
        (Event::Due, 504),
    ] {
        let mut stage = stage(2);
        let mut flow = stage.flow();
        let mut effects = stage.on(&mut flow, Event::Body(CHAT));
        for _ in 0..2 {
            assert!(asks(&effects));
            if matches!(event, Event::Due) {
                stage.now_ms = flow.deadline().unwrap();
            }
            effects = stage.on(&mut flow, event);
            assert!(has(&effects, |effect| matches!(effect, Effect::ReadBody)));
            effects = stage.on(&mut flow, Event::Body(CHAT));
        }
        let sent = reply(&effects);
        assert_eq!(sent.status, status, "{event:?}");
        let marker = ("x-error-pd-prefill", "true".to_owned());
        assert!(sent.headers.contains(&marker));
        if let Event::CallReply { status: 200, .. } = event {
            let text = String::from_utf8_lossy(&sent.body);
            assert!(text.contains("transceiver_runtime: PYTHON"), "{text}");
        }
        assert_eq!(endings(&effects), 1);
        stage.assert_at_rest();
    }
}

#[test]
fn who_leaves_while_asking_leaves_the_question_to_others() {
    let mut stage = stage(1);
    let mut first = stage.flow();
    stage.on(&mut first, Event::Body(CHAT));
    let mut second = stage.flow();
    stage.on(&mut second, Event::Body(CHAT));
    assert_eq!(endings(&stage.on(&mut first, GONE)), 1);
    stage.now_ms = second.deadline().unwrap();
    assert!(asks(&stage.on(&mut second, Event::Due)));
    stage.on(&mut second, GONE);
    assert!(first.is_ended() && second.is_ended());
    stage.assert_at_rest();
}

#[test]
fn a_worker_that_failed_is_asked_anew() {
    let mut stage = stage(1);
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    stage.on(&mut flow, INFO);
    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 500,
            body: b"{}",
        },
    );
    assert_eq!(reply(&effects).status, 500);
    // The client's own stream ends the generation leg; nothing else can.
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    assert!(flow.is_ended());
    stage.assert_at_rest();
    let mut next = stage.flow();
    assert!(asks(&stage.on(&mut next, Event::Body(CHAT))));
}

#[test]
fn a_client_that_leaves_leaves_the_context_leg_to_end_by_itself() {
    let mut stage = stage(1);
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    stage.on(&mut flow, INFO);
    assert_eq!(endings(&stage.on(&mut flow, GONE)), 1);
    assert!(flow.is_orphaned());
    assert_eq!(stage.charged().prefill_requests, 1);
    let effects = stage.on(&mut flow, PREFILLED);
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    assert!(flow.is_ended());
    stage.assert_at_rest();
}
