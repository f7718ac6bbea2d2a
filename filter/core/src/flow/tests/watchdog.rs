//! The decode timers: what arms them, what ends them, and what the client gets.

use super::*;
use crate::engine::Engine;
use crate::flow::timers::{Awaited, Overdue, Timers, Watch};
use crate::meters::{Label, Meter};

const ROLE: &[u8] =
    b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const TOKEN: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
/// Limits of a quarter, half and three quarters of a second.
const SHORT: &str = r#"{"decodeFirstResponseTimeout": 0.25, "decodeResponseTimeout": 0.5,
    "decodeStreamIdleTimeout": 0.75}"#;
const ANSWERS: &[u8] = br#"{"id":"x"}"#;

/// A pair's request whose prefill has just succeeded.
pub(super) fn decoding(stage: &mut Stage, body: &[u8], prefilled: &[u8]) -> Flow {
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(body));
    let (status, body) = (200, prefilled);
    stage.on(&mut flow, Event::CallReply { status, body });
    flow
}

fn chunk(bytes: &[u8]) -> Event<'_> {
    Event::ResponseChunk { bytes, end: false }
}

/// The clock moves to when the flow wants to be heard, and it is.
pub(super) fn due(stage: &mut Stage, flow: &mut Flow) -> Vec<Effect> {
    stage.now_ms = flow.deadline().unwrap() - 1;
    assert!(stage.on(flow, Event::Due).is_empty());
    stage.now_ms += 1;
    stage.on(flow, Event::Due)
}

/// How often the counter was raised with a label of this value.
pub(super) fn counted(effects: &[Effect], meter: Meter, word: &str) -> usize {
    let is_it = |effect: &&Effect| {
        matches!(effect, Effect::Count(count) if count.meter == meter
            && count.labels.iter().flatten().any(|label| matches!(label, Label::Word(_, w) if *w == word)))
    };
    effects.iter().filter(is_it).count()
}

fn message(effects: &[Effect]) -> String {
    let reply = reply(effects);
    assert_eq!(reply.status, 504);
    let marker = ("x-error-pd-decode", "true".to_owned());
    assert!(reply.headers.contains(&marker));
    let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    body["error"]["message"].as_str().unwrap().to_owned()
}

/// Asserts the one ending of a request that a timer ended.
fn assert_ended(stage: &mut Stage, flow: &mut Flow, effects: &[Effect], phase: &str) {
    if has(effects, |effect| matches!(effect, Effect::Call(_))) {
        stage.freed(flow);
    }
    assert!(flow.is_ended());
    assert_eq!(endings(effects), 1);
    assert_eq!(
        counted(effects, Meter::RequestFail, "pd_decode_watchdog"),
        1
    );
    assert_eq!(counted(effects, Meter::Watchdog, phase), 1);
    stage.assert_at_rest();
}

#[test]
fn a_streamed_answer_must_begin_in_time() {
    // Held headers reached nobody.
    for held in [false, true] {
        let mut stage = Stage::new(1, SHORT);
        let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
        stage.now_ms += 100;
        if held {
            let effects = stage.on(&mut flow, headers(200, true));
            assert!(has(&effects, |effect| matches!(effect, Effect::Hold)));
        }
        assert_eq!(flow.deadline(), Some(1250), "headers do not end it");
        let effects = due(&mut stage, &mut flow);
        let expected = "decode pod d0 did not start responding within 0.25 s";
        assert_eq!(message(&effects), expected);
        assert_ended(&mut stage, &mut flow, &effects, "first_response");
    }
}

#[test]
fn headers_that_reached_the_client_make_it_a_cut() {
    let mut stage = Stage::new(1, SHORT);
    // Without a usable hand-over nothing is held.
    let mut flow = decoding(&mut stage, STREAM, ANSWERS);
    stage.on(&mut flow, headers(200, true));
    let effects = due(&mut stage, &mut flow);
    assert!(has(&effects, |effect| matches!(effect, Effect::Cut)));
    assert!(!has(&effects, |effect| matches!(effect, Effect::Reply(_))));
    assert_ended(&mut stage, &mut flow, &effects, "first_response");
}

#[test]
fn an_answer_that_is_not_streamed_must_end_in_time() {
    for begun in [false, true] {
        let mut stage = Stage::new(1, SHORT);
        let mut flow = decoding(&mut stage, CHAT, HANDED_OVER);
        stage.now_ms += 400;
        if begun {
            stage.on(&mut flow, headers(200, false));
            stage.on(&mut flow, chunk(b"{"));
        }
        assert_eq!(flow.deadline(), Some(1500), "a chunk does not end it");
        let effects = due(&mut stage, &mut flow);
        if begun {
            assert!(has(&effects, |effect| matches!(effect, Effect::Cut)));
        } else {
            let expected = "decode pod d0 did not finish responding within 0.5 s";
            assert_eq!(message(&effects), expected);
        }
        assert_ended(&mut stage, &mut flow, &effects, "first_response");
    }
}

#[test]
fn a_begun_stream_must_go_on() {
    for (first, chunks, held) in [(ROLE, 1, true), (TOKEN, 100, false)] {
        let mut stage = Stage::new(1, SHORT);
        let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
        stage.on(&mut flow, headers(200, true));
        for _ in 0..chunks {
            stage.on(&mut flow, chunk(first));
            assert_eq!(flow.deadline(), Some(stage.now_ms + 750));
            stage.now_ms += 749;
            assert!(stage.on(&mut flow, Event::Due).is_empty());
        }
        let effects = due(&mut stage, &mut flow);
        if held {
            let expected = "decode pod d0 did not go on responding within 0.75 s";
            assert_eq!(message(&effects), expected);
        } else {
            assert!(has(&effects, |effect| matches!(effect, Effect::Cut)));
        }
        assert_ended(&mut stage, &mut flow, &effects, "stream_idle");
    }
}

#[test]
fn vllm_has_the_backstop_alone_until_a_timer_is_set() {
    let backstop = 900_000;
    for (config, streamed, whole, idle) in [
        ("", backstop, backstop, backstop),
        (
            r#"{"decodeFirstResponseTimeout": 60}"#,
            60_000,
            backstop,
            backstop,
        ),
        (
            r#"{"decodeResponseTimeout": 70}"#,
            backstop,
            70_000,
            backstop,
        ),
        (
            r#"{"decodeStreamIdleTimeout": 80}"#,
            backstop,
            backstop,
            80_000,
        ),
        (
            r#"{"decodeFirstResponseTimeout": 0}"#,
            backstop,
            backstop,
            backstop,
        ),
        (
            r#"{"decodeFirstResponseTimeout": 9, "streamIdleBackstop": 2}"#,
            2000,
            2000,
            2000,
        ),
    ] {
        let mut stage = Stage::new(1, config);
        let mut stream = decoding(&mut stage, STREAM, HANDED_OVER);
        let whole_answer = decoding(&mut stage, CHAT, HANDED_OVER);
        assert_eq!(stream.deadline(), Some(1000 + streamed), "{config}");
        assert_eq!(whole_answer.deadline(), Some(1000 + whole), "{config}");
        stage.on(&mut stream, headers(200, true));
        stage.on(&mut stream, chunk(TOKEN));
        assert_eq!(stream.deadline(), Some(1000 + idle), "{config}");
    }
}

#[test]
fn one_leg_has_the_backstop_alone() {
    let mut stage = Stage::new(1, SHORT);
    let mut flow = stage.flow();
    let body = br#"{"model":"m","stream":true,"n":2,"messages":[{"role":"user","content":"hi"}]}"#;
    let effects = stage.on(&mut flow, Event::Body(body));
    leg(&effects);
    assert_eq!(flow.deadline(), Some(901_000));
    stage.on(&mut flow, headers(200, true));
    stage.on(&mut flow, chunk(TOKEN));
    assert_eq!(flow.deadline(), Some(901_000));
}

#[test]
fn a_profile_sets_the_timers_of_its_requests() {
    let mut stage = Stage::new(0, "");
    let profile = r#"{"profiles": {"default": {"routingConfig": {"pd": {
        "decodeFirstResponseTimeout": 1.5}}}}}"#;
    let (profile, _) = pd_wire::profile::ModelConfig::parse(profile);
    let served = model("m")
        .pod(pod("ns/p").prefill().roleset("r").config(profile.unwrap()))
        .pod(pod("ns/d").decode().roleset("r"));
    accept_topology(&stage.store, &topology(1, 2).model(served).json(), 0).unwrap();
    stage.worker.fleet.refresh(&stage.store);
    let flow = decoding(&mut stage, STREAM, HANDED_OVER);
    assert_eq!(flow.deadline(), Some(2500));
}

#[test]
fn time_in_which_nobody_listened_is_no_silence() {
    let mut stage = Stage::new(1, SHORT);
    let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
    flow.unheard_for(10_000);
    assert_eq!(flow.deadline(), Some(11_250));
    stage.now_ms += 10_000;
    stage.on(&mut flow, headers(200, true));
    stage.on(&mut flow, chunk(TOKEN));
    flow.unheard_for(10_000);
    assert_eq!(flow.deadline(), Some(21_750));
}

#[test]
fn engines_whose_prefill_ends_with_the_hand_over_are_timed_by_default() {
    let config = |text: &str| Config::parse(text.as_bytes(), |_| None).unwrap();
    let timers = |config: &Config, engine| Timers::of(&config.knobs, &Engine::of_label(engine));
    let default = config("");
    let sglang = Timers {
        first_response: Some(60_000),
        response: None,
        stream_idle: Some(120_000),
        backstop: 900_000,
    };
    assert_eq!(timers(&default, "sglang"), sglang);
    let off = config(r#"{"decodeFirstResponseTimeout": 0, "decodeStreamIdleTimeout": 0}"#);
    for (config, engine) in [(&default, "vllm"), (&default, "trtllm"), (&off, "sglang")] {
        let alone = Timers {
            first_response: None,
            stream_idle: None,
            ..sglang
        };
        assert_eq!(timers(config, engine), alone, "{engine}");
    }
    let variable = |name: &str| (name == "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT").then(|| "7".into());
    let by_variable = Config::parse(b"", variable).unwrap();
    assert_eq!(timers(&by_variable, "vllm").stream_idle, Some(7000));
}

#[test]
fn legs_that_go_out_together_are_timed_from_the_prefills_success() {
    let timers = Timers {
        first_response: Some(50),
        response: Some(70),
        stream_idle: Some(60),
        backstop: 1000,
    };
    // The decode leg is sent at 100, the prefill succeeds at 300.
    let mut watch = Watch::new(timers, true, 100);
    watch.headers(200);
    assert_eq!(
        watch.deadline(),
        1200,
        "no timer before the prefill's success"
    );
    watch.prefilled(300);
    watch.prefilled(310);
    assert_eq!(watch.deadline(), 350);
    let late = Overdue {
        limit_ms: 50,
        awaited: Awaited::Start,
    };
    assert_eq!((watch.overdue(349), watch.overdue(350)), (None, Some(late)));

    // The first chunk is there before the prefill's answer is.
    let mut watch = Watch::new(timers, true, 100);
    watch.chunk(200);
    assert_eq!(watch.overdue(299), None);
    watch.prefilled(300);
    assert_eq!(watch.deadline(), 360);
    watch.chunk(340);
    assert_eq!(watch.deadline(), 400);

    let mut watch = Watch::new(timers, false, 100);
    watch.prefilled(300);
    assert_eq!(watch.deadline(), 370);
}

#[test]
fn what_is_held_puts_no_limit_off_but_by_its_beginning() {
    // SHORT's first limit, and the backstop where there is no other.
    for (config, limit_ms) in [(SHORT, 250), (r#"{"streamIdleBackstop": 0.6}"#, 600)] {
        let mut stage = Stage::new(1, config);
        let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
        stage.on(&mut flow, headers(200, true));
        let until = stage.now_ms + limit_ms;
        while stage.now_ms + 50 < until {
            stage.now_ms += 50;
            let effects = stage.on(&mut flow, chunk(b": ping\n\n"));
            assert!(has(&effects, |effect| matches!(effect, Effect::Hold)));
        }
        assert_eq!(flow.deadline(), Some(until));
        let effects = due(&mut stage, &mut flow);
        message(&effects);
        assert_ended(&mut stage, &mut flow, &effects, "first_response");
    }
    for (config, limit_ms) in [(SHORT, 750), (r#"{"streamIdleBackstop": 0.6}"#, 600)] {
        let mut stage = Stage::new(1, config);
        let mut flow = decoding(&mut stage, STREAM, HANDED_OVER);
        stage.on(&mut flow, headers(200, true));
        stage.now_ms += 100;
        let until = stage.now_ms + limit_ms;
        while stage.now_ms + 50 < until {
            let effects = stage.on(&mut flow, chunk(ROLE));
            assert!(has(&effects, |effect| matches!(effect, Effect::Hold)));
            stage.now_ms += 50;
        }
        assert_eq!(flow.deadline(), Some(until));
        let effects = due(&mut stage, &mut flow);
        message(&effects);
        assert_ended(&mut stage, &mut flow, &effects, "stream_idle");
    }
}
