//! SGLang: both legs at once.

use super::*;
use crate::meters::Meter;

/// A request both of whose legs are out.
fn both_out(stage: &mut Stage, body: &[u8]) -> Flow {
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(body));
    assert_eq!(call(&effects).path, "/v1/chat/completions");
    leg(&effects);
    flow
}

fn stage() -> Stage {
    Stage::of_engine("sglang", 2, "")
}

const PREFILLED: Event<'static> = Event::CallReply {
    status: 200,
    body: b"{}",
};

fn refused(status: u16) -> Event<'static> {
    Event::CallReply {
        status,
        body: br#"{"message":"no"}"#,
    }
}

fn chunk(bytes: &[u8], end: bool) -> Event<'_> {
    Event::ResponseChunk { bytes, end }
}

fn holds(effects: &[Effect]) -> bool {
    has(effects, |effect| matches!(effect, Effect::Hold))
}

/// How often something was counted.
fn counted(effects: &[Effect], meter: Meter) -> usize {
    let is_it = |effect: &&Effect| matches!(effect, Effect::Count(count) if count.meter == meter);
    effects.iter().filter(is_it).count()
}

/// Pods that are told to drop the request, by all calls until the flow has ended.
fn told(stage: &mut Stage, flow: &mut Flow, mut effects: Vec<Effect>) -> Vec<String> {
    let mut pods = Vec::new();
    for _ in 0..8 {
        if has(&effects, |effect| matches!(effect, Effect::Call(_))) {
            let sent = call(&effects);
            assert_eq!(sent.path, "/abort_request");
            pods.push(sent.address.rsplit_once(':').unwrap().0.to_owned());
            effects = stage.on(
                flow,
                Event::CallReply {
                    status: 200,
                    body: b"",
                },
            );
        } else if let Some(deadline) = flow.deadline() {
            stage.now_ms = deadline;
            effects = stage.on(flow, Event::Due);
        }
    }
    assert!(flow.is_ended());
    stage.assert_at_rest();
    pods
}

const PREFILL: &str = "10.0.0.1";
const DECODE: &str = "10.0.0.2";

#[test]
fn both_legs_name_one_room_and_one_request() {
    let mut stage = stage();
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(STREAM));
    // The call leaves first: when it cannot, the request stays.
    let position = |wanted: fn(&Effect) -> bool| effects.iter().position(wanted).unwrap();
    assert!(
        position(|effect| matches!(effect, Effect::Call(_)))
            < position(|effect| matches!(effect, Effect::Send(_)))
    );
    let prefill: serde_json::Value = serde_json::from_slice(&call(&effects).body).unwrap();
    let decode = leg(&effects).body.apply(STREAM);
    let decode: serde_json::Value = serde_json::from_slice(&decode).unwrap();
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"] {
        assert_eq!(prefill[name], decode[name], "{name}");
    }
    assert_eq!(prefill["bootstrap_host"], PREFILL);
    assert_eq!(prefill["bootstrap_port"], 8998);
    assert!(prefill["bootstrap_room"].as_u64().unwrap() < 1 << 53);
    assert_eq!(prefill["rid"], leg(&effects).request_id);
    assert_eq!(
        (&prefill["stream"], &decode["stream"]),
        (&false.into(), &true.into())
    );
    let charged = stage.charged();
    assert_eq!((charged.prefill_requests, charged.decode_running), (1, 1));
}

#[test]
fn the_reply_may_come_before_or_after_the_answer_begins() {
    let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    for reply_at in 0..3 {
        let mut stage = stage();
        let mut flow = both_out(&mut stage, STREAM);
        let mut effects = Vec::new();
        for (step, event) in [headers(200, true), chunk(token, false), chunk(b"", true)]
            .into_iter()
            .enumerate()
        {
            if step == reply_at {
                effects.extend(stage.on(&mut flow, PREFILLED));
                assert_eq!(stage.charged().prefill_requests, 0);
            }
            let now = stage.on(&mut flow, event);
            assert_eq!(holds(&now), step == 0);
            effects.extend(now);
        }
        assert!(flow.is_ended());
        assert_eq!(endings(&effects), 1);
        assert_eq!(counted(&effects, Meter::PrefillSuccess), 1);
        stage.assert_at_rest();
    }
}

#[test]
fn an_answer_that_ends_first_waits_for_the_reply_without_its_client() {
    let mut stage = stage();
    let mut flow = both_out(&mut stage, CHAT);
    assert!(holds(&stage.on(&mut flow, headers(200, false))));
    let effects = stage.on(&mut flow, chunk(b"{}", true));
    assert!(!holds(&effects) && flow.is_orphaned());
    assert_eq!(endings(&effects), 1);
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    assert_eq!(endings(&stage.on(&mut flow, GONE)), 0);
    stage.on(&mut flow, PREFILLED);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn a_prefill_failure_has_its_own_status_until_something_reached_the_client() {
    for (event, status) in [
        (refused(400), 400),
        (refused(500), 500),
        (refused(503), 503),
        (refused(302), 502),
        (Event::CallFailed, 503),
        (Event::CallLost(Lost::Unsent), 503),
    ] {
        for begun in [false, true] {
            let mut stage = stage();
            let mut flow = both_out(&mut stage, STREAM);
            if begun {
                // Headers, and what says nothing yet.
                stage.on(&mut flow, headers(200, true));
                stage.on(&mut flow, chunk(b": ping\n\n", false));
            }
            let effects = stage.on(&mut flow, event);
            let sent = reply(&effects);
            assert_eq!(sent.status, status, "{event:?}");
            let marker = ("x-error-pd-prefill", "true".to_owned());
            assert!(sent.headers.contains(&marker));
            assert_eq!(endings(&effects), 1);
            assert_eq!(counted(&effects, Meter::PrefillFailure), 1);
            let pair_failure = usize::from(status != 400);
            assert_eq!(counted(&effects, Meter::PairFailure), pair_failure);
            // The first may have come too soon, unless the pod has answered.
            let pods: &[&str] = if begun { &[DECODE] } else { &[DECODE, DECODE] };
            assert_eq!(told(&mut stage, &mut flow, effects), pods);
        }
    }
}

#[test]
fn a_late_prefill_is_dropped_at_both_pods() {
    let mut stage = stage();
    let mut flow = both_out(&mut stage, CHAT);
    stage.now_ms = flow.deadline().unwrap();
    let effects = stage.on(&mut flow, Event::Due);
    assert_eq!(reply(&effects).status, 504);
    let pods = told(&mut stage, &mut flow, effects);
    assert_eq!(pods, [DECODE, PREFILL, DECODE, PREFILL]);
}

#[test]
fn a_stream_that_has_begun_is_cut_when_the_prefill_fails() {
    let mut stage = stage();
    let mut flow = both_out(&mut stage, CHAT);
    stage.on(&mut flow, headers(200, false));
    stage.on(&mut flow, chunk(b"{", false));
    let effects = stage.on(&mut flow, refused(500));
    assert!(has(&effects, |effect| matches!(effect, Effect::Cut)));
    assert!(!has(&effects, |effect| matches!(effect, Effect::Reply(_))));
    assert_eq!(endings(&effects), 1);
    told(&mut stage, &mut flow, effects);
}

#[test]
fn a_reply_that_cannot_be_read_ends_nothing() {
    let mut stage = stage();
    let mut flow = both_out(&mut stage, CHAT);
    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: b"[",
        },
    );
    assert_eq!(endings(&effects), 0);
    assert_eq!(counted(&effects, Meter::PrefillFailure), 1);
    stage.on(&mut flow, headers(200, false));
    let effects = stage.on(&mut flow, chunk(b"{}", true));
    assert_eq!(endings(&effects), 1);
    stage.assert_at_rest();
}

#[test]
fn a_client_that_leaves_has_both_legs_dropped() {
    let mut stage = stage();
    let mut flow = both_out(&mut stage, STREAM);
    let effects = stage.on(&mut flow, GONE);
    assert_eq!(endings(&effects), 1);
    let pods = told(&mut stage, &mut flow, effects);
    assert_eq!(pods, [DECODE, PREFILL, DECODE, PREFILL]);
    // The reply has come: only the decode pod still works.
    let mut flow = both_out(&mut stage, STREAM);
    stage.on(&mut flow, PREFILLED);
    let effects = stage.on(&mut flow, GONE);
    assert_eq!(told(&mut stage, &mut flow, effects), [DECODE]);
}

#[test]
fn a_decode_leg_that_fails_has_the_prefill_leg_dropped() {
    let unreachable = Event::ResponseHeaders {
        status: 503,
        proxy_details: Some("upstream_reset_before_response_started{connection_failure}"),
        event_stream: false,
        end: false,
    };
    let unsent = Event::Gone {
        engine_cut: false,
        unsent: true,
    };
    let cut = Event::Gone {
        engine_cut: true,
        unsent: false,
    };
    for event in [unreachable, unsent, cut] {
        let mut stage = stage();
        let mut flow = both_out(&mut stage, STREAM);
        let effects = stage.on(&mut flow, event);
        assert_eq!(endings(&effects), 1, "{event:?}");
        assert_eq!(told(&mut stage, &mut flow, effects), [PREFILL, PREFILL]);
    }
}

/// Brings a request whose decode leg fails first into doubt: by an error answer, whole or not, or
/// by an error in its stream.
fn in_doubt(stage: &mut Stage, how: &str) -> Flow {
    let mut flow = both_out(stage, STREAM);
    let mut effects = stage.on(
        &mut flow,
        headers(if how == "stream" { 200 } else { 500 }, how == "stream"),
    );
    match how {
        "begun" => {}
        "whole" => effects = stage.on(&mut flow, chunk(b"{}", true)),
        _ => effects = stage.on(&mut flow, chunk(b"data: {\"error\":{}}\n\n", false)),
    }
    assert!(holds(&effects), "{how}");
    assert_eq!(endings(&effects), 0, "{how}");
    flow
}

const WAYS_TO_FAIL: [&str; 3] = ["begun", "whole", "stream"];

#[test]
fn when_both_legs_fail_the_client_hears_of_the_prefill() {
    for how in WAYS_TO_FAIL {
        let mut stage = stage();
        let mut flow = in_doubt(&mut stage, how);
        let effects = stage.on(&mut flow, refused(429));
        let sent = reply(&effects);
        assert_eq!(sent.status, 429, "{how}");
        let marker = ("x-error-pd-prefill", "true".to_owned());
        assert!(sent.headers.contains(&marker), "{how}");
        assert_eq!(endings(&effects), 1, "{how}");
        assert_eq!(told(&mut stage, &mut flow, effects), [DECODE]);
        stage.assert_at_rest();
    }
}

#[test]
fn a_decode_failure_waits_for_the_prefill_but_not_long() {
    for prefill_answers in [false, true] {
        for how in WAYS_TO_FAIL {
            let mut stage = stage();
            let mut flow = in_doubt(&mut stage, how);
            let mut effects = if prefill_answers {
                stage.on(&mut flow, PREFILLED)
            } else {
                let due = flow.deadline().unwrap();
                assert!(due - stage.now_ms <= 100);
                stage.now_ms = due;
                stage.on(&mut flow, Event::Due)
            };
            if how == "stream" {
                assert_eq!(reply(&effects).status, 502);
            } else {
                assert!(has(&effects, |effect| matches!(effect, Effect::Resume)));
            }
            if how == "begun" {
                assert_eq!(endings(&effects), 0);
                effects = stage.on(&mut flow, chunk(b"{}", true));
            }
            assert_eq!(endings(&effects), 1, "{how}");
            let pods: &[&str] = if prefill_answers {
                &[]
            } else {
                &[PREFILL, PREFILL]
            };
            assert_eq!(told(&mut stage, &mut flow, effects), pods);
            stage.assert_at_rest();
        }
    }
}

#[test]
fn a_client_may_leave_while_the_cause_is_in_doubt() {
    for how in WAYS_TO_FAIL {
        let mut stage = stage();
        let mut flow = in_doubt(&mut stage, how);
        let effects = stage.on(&mut flow, GONE);
        assert_eq!(endings(&effects), 1);
        told(&mut stage, &mut flow, effects);
        stage.assert_at_rest();
    }
}

#[test]
fn without_aborts_the_prefill_leg_is_awaited() {
    let mut stage = Stage::of_engine("sglang", 1, r#"{"decodeAbortTimeout":0}"#);
    let mut flow = both_out(&mut stage, STREAM);
    assert_eq!(endings(&stage.on(&mut flow, GONE)), 1);
    assert!(flow.is_orphaned());
    assert_eq!(stage.charged().prefill_requests, 1);
    stage.on(&mut flow, refused(500));
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn what_needs_a_pod_that_answers_alone_is_refused() {
    let many = br#"{"model":"m","messages":[],"n":2}"#;
    let mut stage = stage();
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(many));
    let reply = reply(&effects);
    assert_eq!(reply.status, 503);
    let text = String::from_utf8_lossy(&reply.body);
    assert!(
        text.contains("answers alone; start a standard pod"),
        "{text}"
    );
    stage.assert_at_rest();
}
