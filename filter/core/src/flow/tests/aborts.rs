//! Requests that their engines are told to drop.

use super::watchdog::{counted, decoding, due};
use super::*;
use crate::flow::abort::{Order, Reason};
use crate::flow::state::{Choice, Decoding};
use crate::flow::timers::Awaited;
use crate::meters::Meter;

const DECODE: &str = "10.0.0.2:8000";
const PREFILL: &str = "10.0.0.1:8000";

/// The decode leg of a flow that is decoding.
fn decode_leg(flow: &mut Flow) -> &mut Decoding {
    match &mut flow.state {
        State::Decoding(leg) => leg,
        other => panic!("{other:?}"),
    }
}

/// A pair's request at a decode pod that aborts, as far as the flow can tell.
fn abortable(stage: &mut Stage, rid: Option<&str>) -> Flow {
    let mut flow = decoding(stage, STREAM, HANDED_OVER);
    let leg = decode_leg(&mut flow);
    let mut fleet = (*leg.choice.fleet).clone();
    let mut pods = fleet.pods.to_vec();
    for pod in &mut pods {
        pod.engine = "sglang".to_owned();
    }
    fleet.pods = pods.into();
    leg.choice.fleet = fleet.into();
    leg.choice.rid = rid.map(Into::into);
    leg.kv = None;
    flow
}

/// Aborts the decode leg of a choice, once.
fn decode_only(choice: &Choice, reason: Reason) -> Order {
    Order {
        rid: choice.rid.clone(),
        pods: vec![DECODE.to_owned()],
        reason,
        twice: false,
        charge: Some(choice.charge),
    }
}

/// Aborts both legs of a choice, once.
fn both_legs(choice: &Choice, reason: Reason) -> Order {
    Order {
        pods: vec![DECODE.to_owned(), PREFILL.to_owned()],
        ..decode_only(choice, reason)
    }
}

/// Starts an abort by hand.
fn abort(stage: &mut Stage, flow: &mut Flow, order: fn(&Choice) -> Order) -> Vec<Effect> {
    let State::Decoding(leg) = std::mem::replace(&mut flow.state, State::Ended) else {
        panic!("decoding")
    };
    let mut effects = Vec::new();
    let scene = &mut stage.scene();
    flow.client_gone(scene, &mut effects);
    flow.state = flow.abort(&leg.choice, order(&leg.choice), scene, &mut effects);
    effects
}

/// Asserts that one pod is told.
fn assert_told(effects: &[Effect], address: &str) {
    let call = call(effects);
    assert_eq!(
        (call.address.as_str(), call.path.as_str()),
        (address, "/abort_request")
    );
    assert_eq!(call.body, br#"{"rid":"r-1"}"#);
    let bearer = ("authorization", "Bearer t".to_owned());
    assert!(call.headers.contains(&bearer));
}

fn answered(status: u16) -> Event<'static> {
    Event::CallReply { status, body: b"" }
}

#[test]
fn a_watchdog_has_the_request_dropped_and_charges_end_with_that() {
    for (answer, result) in [
        (answered(200), "ok"),
        (answered(404), "error"),
        (Event::CallFailed, "error"),
        (Event::CallLost(Lost::Unsent), "error"),
    ] {
        let mut stage = Stage::new(1, r#"{"decodeFirstResponseTimeout": 1}"#);
        let mut flow = abortable(&mut stage, Some("r-1"));
        let effects = due(&mut stage, &mut flow);
        assert_eq!(reply(&effects).status, 504);
        assert_eq!(endings(&effects), 1);
        assert_told(&effects, DECODE);
        assert!(flow.is_orphaned());
        assert_eq!(stage.charged().decode_running, 1);
        // The end of the client's stream does not disturb it.
        assert!(stage.on(&mut flow, GONE).is_empty());
        let effects = stage.on(&mut flow, answer);
        assert_eq!(
            counted(&effects, Meter::Abort, "watchdog_first_response"),
            1
        );
        assert_eq!(counted(&effects, Meter::Abort, result), 1);
        assert!(flow.is_ended());
        stage.assert_at_rest();
    }
}

#[test]
fn a_client_that_leaves_a_stream_has_it_dropped() {
    let mut stage = Stage::new(1, "");
    let mut flow = abortable(&mut stage, Some("r-1"));
    stage.on(&mut flow, headers(200, true));
    let effects = stage.on(&mut flow, GONE);
    assert_eq!(endings(&effects), 1);
    assert_told(&effects, DECODE);
    let effects = stage.on(&mut flow, answered(200));
    assert_eq!(counted(&effects, Meter::Abort, "canceled"), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn an_abort_that_is_never_answered_ends_at_its_timeout() {
    let mut stage = Stage::new(1, r#"{"decodeAbortTimeout": 0.4}"#);
    let mut flow = abortable(&mut stage, Some("r-1"));
    let effects = stage.on(&mut flow, GONE);
    assert_eq!(call(&effects).timeout_ms, 1400);
    assert_eq!(flow.deadline(), Some(1400));
    let effects = due(&mut stage, &mut flow);
    assert_eq!(counted(&effects, Meter::Abort, "error"), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn the_second_round_comes_after_the_delay_and_asks_every_pod_again() {
    let mut stage = Stage::new(1, r#"{"decodeAbortRetryDelay": 0.5}"#);
    let mut flow = abortable(&mut stage, Some("r-1"));
    let effects = abort(&mut stage, &mut flow, |choice| Order {
        twice: true,
        ..both_legs(choice, Reason::Prefill(PrefillFailure::Transport))
    });
    assert_told(&effects, DECODE);
    let effects = stage.on(&mut flow, answered(200));
    assert_told(&effects, PREFILL);
    let effects = stage.on(&mut flow, Event::CallFailed);
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    assert_eq!(flow.deadline(), Some(1500));
    // Nothing is out, so an answer is nobody's.
    assert!(stage.on(&mut flow, answered(200)).is_empty());
    let effects = due(&mut stage, &mut flow);
    assert_told(&effects, DECODE);
    assert_eq!(stage.charged().decode_running, 1);
    let effects = stage.on(&mut flow, answered(200));
    assert_told(&effects, PREFILL);
    let effects = stage.on(&mut flow, answered(200));
    assert_eq!(counted(&effects, Meter::Abort, "transport"), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn without_a_delay_there_is_one_round() {
    let mut stage = Stage::new(1, r#"{"decodeAbortRetryDelay": 0}"#);
    let mut flow = abortable(&mut stage, Some("r-1"));
    abort(&mut stage, &mut flow, |choice| Order {
        twice: true,
        ..decode_only(choice, Reason::Watchdog(Awaited::Next))
    });
    let effects = stage.on(&mut flow, answered(200));
    assert_eq!(counted(&effects, Meter::Abort, "watchdog_stream_idle"), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn what_cannot_be_aborted_is_counted_and_given_back_at_once() {
    for (config, rid, result) in [
        ("", None, "skipped_no_rid"),
        (
            r#"{"decodeAbortTimeout": 0}"#,
            Some("r-1"),
            "skipped_disabled",
        ),
    ] {
        let mut stage = Stage::new(1, config);
        let mut flow = abortable(&mut stage, rid);
        let effects = stage.on(&mut flow, GONE);
        assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
        assert_eq!(counted(&effects, Meter::Abort, result), 1);
        assert!(flow.is_ended());
        stage.assert_at_rest();
    }
    let mut stage = Stage::new(1, "");
    let mut flow = abortable(&mut stage, Some("r-1"));
    let effects = abort(&mut stage, &mut flow, |choice| Order {
        pods: Vec::new(),
        ..decode_only(choice, Reason::ClientGone)
    });
    assert_eq!(counted(&effects, Meter::Abort, "skipped_no_target"), 1);
    stage.assert_at_rest();
}

#[test]
fn aborts_are_bounded_like_orphans() {
    let mut stage = Stage::new(1, r#"{"maxOrphans": 1}"#);
    let mut flows = [(); 2].map(|()| abortable(&mut stage, Some("r-1")));
    let [first, second] = &mut flows;
    assert_told(&stage.on(first, GONE), DECODE);
    let effects = stage.on(second, GONE);
    assert_eq!(counted(&effects, Meter::Abort, "skipped_limit"), 1);
    assert!(second.is_ended());
    assert_eq!(stage.charged().decode_running, 1);
    stage.on(first, answered(200));
    stage.assert_at_rest();
}

#[test]
fn an_engine_that_knows_no_aborts_is_never_told() {
    let mut stage = Stage::new(1, "");
    let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
    decode_leg(&mut flow).choice.rid = Some("r-1".into());
    let effects = stage.on(&mut flow, GONE);
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    stage.assert_at_rest();
}
