//! What endings tell the ejections, and whom choices then avoid.

use super::*;
use crate::eject::{Cause, Ejections};
use crate::port::SharedStore;
use pd_wire::control::Ejected;

/// One failure ejects, so that every one that counts shows.
const ONE: &str = r#"{"ejectAfterFailures":1,"prefillRetries":0}"#;
const BUSY: &[u8] = b"busy";

fn reply_of(status: u16, body: &[u8]) -> Event<'_> {
    Event::CallReply { status, body }
}

fn refused(details: &str) -> Event<'_> {
    Event::ResponseHeaders {
        status: 503,
        proxy_details: Some(details),
        event_stream: false,
        end: false,
    }
}

fn chunk(bytes: &[u8], end: bool) -> Event<'_> {
    Event::ResponseChunk { bytes, end }
}

const CUT: Event<'static> = Event::Gone {
    engine_cut: true,
    unsent: false,
};

impl Stage {
    /// Who is out, as `pods cause`.
    fn out(&mut self) -> Vec<String> {
        let list = Ejections::list(&self.store, &mut self.worker.fleet, self.now_ms);
        let text = |Ejected { pods, cause, .. }: Ejected| format!("{} {cause}", pods.join("+"));
        list.into_iter().map(text).collect()
    }

    /// Starts a request; the number is the roleset it went to.
    fn begin(&mut self, body: &[u8]) -> (Flow, String) {
        let mut flow = self.flow();
        let effects = self.on(&mut flow, Event::Body(body));
        let address = call(&effects).address.clone();
        let roleset = address.strip_prefix("10.0.0.1:800").unwrap().to_owned();
        (flow, roleset)
    }

    /// A request whose decode leg is out.
    fn decode(&mut self, body: &[u8]) -> (Flow, String) {
        let (mut flow, roleset) = self.begin(body);
        self.on(&mut flow, reply_of(200, HANDED_OVER));
        (flow, roleset)
    }

    /// Runs a request to its good end; the number is the roleset it went to.
    fn run_well(&mut self) -> String {
        let (mut flow, roleset) = self.decode(CHAT);
        self.on(&mut flow, headers(200, false));
        self.on(&mut flow, chunk(b"{}", true));
        assert!(flow.is_ended());
        roleset
    }
}

/// Checks who is out after an ending; `{}` stands for the number of the roleset.
fn assert_out(stage: &mut Stage, roleset: &str, expected: Option<&str>, what: &str) {
    let expected: Vec<String> = expected
        .iter()
        .map(|text| text.replace("{}", roleset))
        .collect();
    assert_eq!(stage.out(), expected, "{what}");
}

#[test]
fn a_prefill_pod_answers_for_its_leg() {
    let fails = |cause: &str| Some(format!("ns/p{{}} {cause}"));
    let cases: [(Event<'static>, Option<String>); 13] = [
        (Event::CallFailed, fails("transport")),
        (reply_of(500, b"{}"), fails("http_status")),
        (reply_of(502, b"{}"), fails("http_status")),
        (reply_of(504, b"{}"), fails("http_status")),
        (reply_of(200, b"<html>"), fails("bad_response")),
        (reply_of(200, b"{}"), None),
        (reply_of(200, HANDED_OVER), None),
        (reply_of(503, BUSY), None),
        (reply_of(429, BUSY), None),
        (reply_of(400, b"{}"), None),
        (reply_of(404, b"{}"), None),
        (Event::CallLost(Lost::Unsent), None),
        // The first one is let pass.
        (Event::CallLost(Lost::Cut), None),
    ];
    for (event, expected) in cases {
        let mut stage = Stage::new(2, ONE);
        let (mut flow, roleset) = stage.begin(CHAT);
        stage.on(&mut flow, event);
        assert_out(
            &mut stage,
            &roleset,
            expected.as_deref(),
            &format!("{event:?}"),
        );
    }
}

#[test]
fn connections_that_end_early_one_after_the_other_count() {
    let mut stage = Stage::new(
        2,
        r#"{"ejectAfterFailures":1,"prefillRetries":0,"tieSeed":1}"#,
    );
    for expected in [None, Some("ns/p{} connection_ended")] {
        let (mut flow, roleset) = stage.begin(CHAT);
        stage.on(&mut flow, Event::CallLost(Lost::Cut));
        stage.on(&mut flow, Event::Body(CHAT));
        assert_out(&mut stage, &roleset, expected, "cut");
    }
}

#[test]
fn a_late_prefill_counts_once_with_its_client_and_without() {
    for abandoned in [false, true] {
        let mut stage = Stage::new(2, r#"{"ejectAfterFailures":2,"prefillRetries":0}"#);
        let (mut flow, _) = stage.begin(CHAT);
        let mut orphan = None;
        if abandoned {
            stage.on(&mut flow, GONE);
        }
        stage.now_ms = flow.deadline().unwrap();
        for effect in stage.on(&mut flow, Event::Due) {
            if let Effect::Orphan(flow) = effect {
                orphan = Some(*flow);
            }
        }
        assert_eq!(orphan.is_some(), !abandoned);
        if let Some(mut orphan) = orphan {
            // Whatever still comes of it is known to be late.
            stage.on(&mut orphan, reply_of(500, b""));
        }
        let key = format!("pd{}.eject.0", crate::FORMAT);
        let stored = stage.store.get(&key).unwrap();
        let failures = u16::from_le_bytes([stored.bytes[8], stored.bytes[9]]);
        assert_eq!(failures, 1);
    }
}

#[test]
fn a_client_that_leaves_says_nothing_and_the_engine_still_answers_for_itself() {
    let cases: [(Event<'static>, Option<&str>); 5] = [
        (reply_of(200, b"{}"), None),
        (reply_of(503, BUSY), None),
        (reply_of(500, b"{}"), Some("ns/p{} http_status")),
        (Event::CallFailed, Some("ns/p{} transport")),
        (Event::CallLost(Lost::Unsent), None),
    ];
    for (event, expected) in cases {
        let mut stage = Stage::new(2, ONE);
        let (mut flow, roleset) = stage.begin(CHAT);
        stage.on(&mut flow, GONE);
        assert_out(&mut stage, &roleset, None, "gone");
        stage.on(&mut flow, event);
        assert_out(&mut stage, &roleset, expected, &format!("{event:?}"));
    }
}

#[test]
fn the_call_that_frees_kv_never_counts() {
    for event in [
        reply_of(400, b"{}"),
        reply_of(500, b"{}"),
        Event::CallFailed,
        Event::CallLost(Lost::Cut),
    ] {
        let mut stage = Stage::new(2, ONE);
        let (mut flow, roleset) = stage.begin(CHAT);
        stage.on(&mut flow, GONE);
        let effects = stage.on(&mut flow, reply_of(200, HANDED_OVER));
        assert!(has(&effects, |effect| matches!(effect, Effect::Call(_))));
        stage.on(&mut flow, event);
        assert!(flow.is_ended());
        assert_out(&mut stage, &roleset, None, &format!("{event:?}"));
    }
}

#[test]
fn a_decode_pod_answers_for_its_connection_and_the_pair_for_the_kv() {
    let pod = |cause: &str| Some(format!("ns/d{{}} {cause}"));
    let pair = |cause: &str| Some(format!("ns/p{{}}+ns/d{{}} {cause}"));
    let before = "upstream_reset_before_response_started";
    let role = b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    let error = b"data: {\"error\":{\"message\":\"Internal server error\"}}\n\n";
    let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let words: Vec<String> = [
        "remote_connection_failure",
        "overflow",
        "connection_termination",
    ]
    .iter()
    .map(|reason| format!("{before}{{{reason}}}"))
    .collect();
    let streams = headers(200, true);
    let cases: Vec<(Vec<Event<'_>>, Option<String>)> = vec![
        (vec![refused(&words[0])], pod("transport")),
        (vec![refused(&words[1])], None),
        (vec![refused(&words[2])], None),
        (vec![refused("request_payload_too_large")], None),
        (vec![headers(500, false)], pair("http_status")),
        (vec![headers(503, false)], None),
        (vec![headers(429, false)], None),
        (vec![headers(400, false), chunk(b"{}", true)], None),
        (vec![headers(200, false), chunk(b"{}", true)], None),
        (vec![headers(200, false), CUT], pod("transport")),
        (
            vec![streams, chunk(role, false), chunk(error, false)],
            pair("hand_over"),
        ),
        (vec![streams, chunk(token, false), chunk(error, true)], None),
        (vec![streams, chunk(token, false), CUT], pod("transport")),
        (vec![streams, GONE], None),
        (vec![GONE], None),
    ];
    for (events, expected) in cases {
        let mut stage = Stage::new(2, ONE);
        let (mut flow, roleset) = stage.decode(STREAM);
        for event in &events {
            stage.on(&mut flow, *event);
        }
        assert_out(
            &mut stage,
            &roleset,
            expected.as_deref(),
            &format!("{events:?}"),
        );
    }
}

#[test]
fn silence_before_the_answer_is_the_pairs_and_after_it_the_pods() {
    let token = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let cases: [(&[Event<'_>], &str); 3] = [
        (&[], "ns/p{}+ns/d{} timeout"),
        (&[headers(200, true)], "ns/p{}+ns/d{} timeout"),
        (&[headers(200, true), chunk(token, false)], "ns/d{} timeout"),
    ];
    for (events, expected) in cases {
        let mut stage = Stage::new(2, ONE);
        let (mut flow, roleset) = stage.decode(STREAM);
        for event in events {
            stage.on(&mut flow, *event);
        }
        stage.now_ms = flow.deadline().unwrap();
        stage.on(&mut flow, Event::Due);
        assert_out(&mut stage, &roleset, Some(expected), "silent");
    }
}

#[test]
fn a_pod_that_serves_alone_answers_for_itself() {
    let two = br#"{"model":"m","n":2,"messages":[{"role":"user","content":"hi"}]}"#;
    let mut stage = Stage::new(2, ONE);
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(two));
    let roleset = leg(&effects)
        .address
        .strip_prefix("10.0.0.2:800")
        .unwrap()
        .to_owned();
    let effects = stage.on(&mut flow, headers(500, false));
    assert_out(&mut stage, &roleset, Some("ns/d{} http_status"), "500");
    let counted = effects.iter().find_map(|effect| match effect {
        Effect::Count(count) => Some(count.metric()),
        _ => None,
    });
    assert_eq!(
        counted.unwrap(),
        "gateway_pd_ejection_total{model=m,kind=one_leg,class=http_status}"
    );
}

#[test]
fn the_operator_hears_of_an_ejection_and_of_its_end() {
    let mut stage = Stage::new(
        2,
        r#"{"ejectAfterFailures":2,"prefillRetries":0,"tieSeed":1}"#,
    );
    let warned = |effects: &[Effect]| -> Vec<String> {
        let text = |effect: &Effect| match effect {
            Effect::Warn(text) => Some(text.clone()),
            _ => None,
        };
        effects.iter().filter_map(text).collect()
    };
    let mut said = Vec::new();
    for _ in 0..2 {
        let (mut flow, _) = stage.begin(CHAT);
        said = warned(&stage.on(&mut flow, Event::CallFailed));
        stage.on(&mut flow, Event::Body(CHAT));
    }
    let ejected = "pod ns/p0 of model m is ejected for 10 s: transport after 2 failures in a row";
    assert_eq!(said, [ejected]);
    stage.now_ms += 10_000;
    let (mut flow, roleset) = stage.begin(CHAT);
    assert_eq!(roleset, "0");
    let said = warned(&stage.on(&mut flow, reply_of(200, HANDED_OVER)));
    assert_eq!(said, ["pod ns/p0 of model m serves again"]);
}

#[test]
fn an_ejected_pod_gets_nothing_until_its_one_trial() {
    let mut stage = Stage::new(
        2,
        r#"{"ejectAfterFailures":1,"prefillRetries":0,"tieSeed":1}"#,
    );
    let (mut flow, first) = stage.begin(CHAT);
    assert_eq!(first, "0");
    stage.on(&mut flow, Event::CallFailed);
    stage.on(&mut flow, Event::Body(CHAT));
    for _ in 0..20 {
        assert_eq!(stage.run_well(), "1");
    }
    stage.now_ms += 10_000;
    let (mut trial, roleset) = stage.begin(CHAT);
    assert_eq!(roleset, "0");
    for _ in 0..20 {
        assert_eq!(stage.run_well(), "1");
    }
    // It fails: twice as long.
    stage.on(&mut trial, Event::CallFailed);
    stage.on(&mut trial, Event::Body(CHAT));
    stage.now_ms += 19_999;
    assert_eq!(stage.run_well(), "1");
    stage.now_ms += 1;
    assert_eq!(stage.run_well(), "0");
    assert_eq!(stage.out(), Vec::<String>::new());
    assert_eq!(stage.run_well(), "0");
    stage.assert_at_rest();
}

#[test]
fn a_request_that_finds_nobody_else_is_served_by_whom_is_ejected() {
    let mut stage = Stage::new(2, r#"{"ejectAfterFailures":1,"tieSeed":1}"#);
    let (mut flow, roleset) = stage.begin(CHAT);
    assert_eq!(roleset, "0");
    stage.on(&mut flow, Event::CallFailed);
    assert_eq!(stage.out(), ["ns/p0 transport"]);
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(call(&effects).address, "10.0.0.1:8001");
    // The only other pair is busy: for its next try there is nobody else.
    let (mut other, _) = stage.begin(CHAT);
    stage.on(&mut other, reply_of(503, BUSY));
    let effects = stage.on(&mut other, Event::Body(CHAT));
    assert_eq!(call(&effects).address, "10.0.0.1:8000");
}

#[test]
fn pods_at_their_capacity_are_a_429_and_not_a_reason_to_try_the_ejected() {
    let mut stage = Stage::new(
        2,
        r#"{"ejectAfterFailures":1,"prefillRetries":0,"tieSeed":1,"maxPrefillPerPod":1}"#,
    );
    let (mut flow, _) = stage.begin(CHAT);
    stage.on(&mut flow, Event::CallFailed);
    stage.on(&mut flow, Event::Body(CHAT));
    let (_held, roleset) = stage.begin(CHAT);
    assert_eq!(roleset, "1");
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(reply(&effects).status, 429);
    let named = |(name, _): &&(&str, String)| *name == "retry-after";
    assert!(reply(&effects).headers.iter().any(|header| named(&header)));
}

#[test]
fn a_pod_that_is_drained_takes_nothing_new_and_ends_what_it_has() {
    let mut stage = Stage::new(2, r#"{"tieSeed":1}"#);
    let (mut flow, roleset) = stage.begin(CHAT);
    assert_eq!(roleset, "0");
    let pair = |n: usize| {
        let set = format!("r{n}");
        let prefill = pod(&format!("ns/p{n}")).prefill().roleset(&set);
        let decode = pod(&format!("ns/d{n}")).decode().roleset(&set);
        (
            prefill.address(&format!("10.0.0.1:{}", 8000 + n)),
            decode.address(&format!("10.0.0.2:{}", 8000 + n)),
        )
    };
    let ((p0, d0), (p1, d1)) = (pair(0), pair(1));
    let served = model("m").pod(p0.draining()).pod(d0).pod(p1).pod(d1);
    let bytes = topology(1, 2).model(served).json();
    accept_topology(&stage.store, &bytes, 0).unwrap();
    stage.worker.fleet.refresh(&stage.store);
    for _ in 0..5 {
        assert_eq!(stage.run_well(), "1");
    }
    let effects = stage.on(&mut flow, reply_of(200, HANDED_OVER));
    assert_eq!(leg(&effects).address, "10.0.0.2:8000");
    stage.on(&mut flow, GONE);
    stage.assert_at_rest();
}

#[test]
fn switched_off_nothing_is_ever_ejected() {
    let mut stage = Stage::new(
        2,
        r#"{"ejectAfterFailures":0,"prefillRetries":0,"tieSeed":1}"#,
    );
    for _ in 0..20 {
        let (mut flow, roleset) = stage.begin(CHAT);
        assert_eq!(roleset, "0");
        stage.on(&mut flow, Event::CallFailed);
        stage.on(&mut flow, Event::Body(CHAT));
    }
    assert_eq!(stage.out(), Vec::<String>::new());
    assert_eq!(Cause::of_status(500), Some(Cause::Status));
}
