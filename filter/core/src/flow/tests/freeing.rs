//! KV that no decode pod takes over is freed through one, where one can be asked.

use super::*;

/// An answer of the proxy in the pod's place.
fn of_proxy(details: &str) -> Event<'_> {
    Event::ResponseHeaders {
        status: 503,
        proxy_details: Some(details),
        event_stream: false,
        end: false,
    }
}

const UNREACHABLE: &str = "upstream_reset_before_response_started{remote_connection_failure}";
const LATE: &str = "upstream_reset_before_response_started{connection_timeout}";
const CUT: &str = "upstream_reset_before_response_started{connection_termination}";
const fn begins(bytes: &[u8]) -> Event<'_> {
    Event::ResponseChunk { bytes, end: false }
}

/// Who is asked to have the KV freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Nobody,
    TheSame,
    Another,
}

/// A roleset of one prefill pod and some decode pods.
fn stage(engine: &str, decode_pods: usize) -> Stage {
    let of = |name: &str| pod(&format!("ns/{name}")).roleset("r").engine(engine);
    let mut served = model("m").pod(of("p0").prefill().address("10.0.0.1:8000"));
    for n in 0..decode_pods {
        let decode = of(&format!("d{n}")).decode();
        served = served.pod(decode.address(&format!("10.0.0.2:{}", 8000 + n)));
    }
    Stage::serving(served, "")
}

/// Runs a request up to its decode leg and through `events`.
fn run(stage: &mut Stage, prefilled: &[u8], events: &[Event<'_>]) -> (Asked, Flow) {
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    let prefilled = Event::CallReply {
        status: 200,
        body: prefilled,
    };
    let charged = leg(&stage.on(&mut flow, prefilled)).address.clone();
    let mut counted = 0;
    let mut freed_by = None;
    for event in events {
        let effects = stage.on(&mut flow, *event);
        counted += endings(&effects);
        if has(&effects, |effect| matches!(effect, Effect::Call(_))) {
            let freeing = call(&effects);
            assert!(freeing.address.starts_with("10.0.0.2:"));
            freed_by = Some(freeing.clone());
        }
    }
    assert_eq!(counted, 1, "{events:?}");
    let asked = match freed_by {
        None => Asked::Nobody,
        Some(call) if call.address == charged => Asked::TheSame,
        Some(_) => Asked::Another,
    };
    (asked, flow)
}

#[test]
fn whatever_fails_at_the_decode_pod_the_kv_is_let_go() {
    let left = |unsent| Event::Gone {
        engine_cut: false,
        unsent,
    };
    let engine_cut = Event::Gone {
        engine_cut: true,
        unsent: false,
    };
    let cases: [(&[Event<'_>], [Asked; 2]); 12] = [
        // The client left before the request was on its way.
        (&[left(true)], [Asked::TheSame, Asked::Another]),
        // The engine sees it leave, and tells the prefill pod itself.
        (&[left(false)], [Asked::Nobody, Asked::Nobody]),
        (&[of_proxy(UNREACHABLE)], [Asked::Nobody, Asked::Another]),
        (&[of_proxy(LATE)], [Asked::Nobody, Asked::Another]),
        (&[of_proxy(CUT)], [Asked::TheSame, Asked::Another]),
        (
            &[headers(500, false), END],
            [Asked::TheSame, Asked::Another],
        ),
        (
            &[headers(503, false), END],
            [Asked::TheSame, Asked::Another],
        ),
        (
            &[headers(400, false), END],
            [Asked::TheSame, Asked::Another],
        ),
        (
            &[headers(200, true), begins(ERROR)],
            [Asked::TheSame, Asked::Another],
        ),
        (
            &[headers(200, true), engine_cut],
            [Asked::TheSame, Asked::Another],
        ),
        // It was taken over.
        (
            &[headers(200, true), begins(TOKEN), engine_cut],
            [Asked::Nobody, Asked::Nobody],
        ),
        (
            &[headers(200, false), engine_cut],
            [Asked::Nobody, Asked::Nobody],
        ),
    ];
    for (events, asked) in cases {
        for (pods, expected) in [1, 2].into_iter().zip(asked) {
            let mut stage = stage("vllm", pods);
            let (asked, mut flow) = run(&mut stage, HANDED_OVER, events);
            assert_eq!(asked, expected, "{pods} decode pods: {events:?}");
            if asked != Asked::Nobody {
                assert!(stage.charged().kv_tokens > 0);
                // The stream's own end does not disturb it.
                stage.on(&mut flow, left(true));
                stage.freed(&mut flow);
            }
            assert!(flow.is_ended());
            stage.assert_at_rest();
        }
    }
}

#[test]
fn a_context_is_let_go_by_a_leg_of_one_token() {
    const CONTEXT: &[u8] = br#"{"prompt_token_ids":[1,2],"choices":[{"disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":[7]}}]}"#;
    let gone = Event::Gone {
        engine_cut: false,
        unsent: false,
    };
    for (events, expected) in [
        (&[of_proxy(UNREACHABLE)][..], Asked::Another),
        // The other one may be taking it, or has taken it.
        (&[of_proxy(CUT)], Asked::Nobody),
        (&[headers(500, false), END], Asked::Nobody),
        (&[gone], Asked::Nobody),
        (&[headers(200, true), begins(ERROR)], Asked::Nobody),
    ] {
        let mut stage = stage("trtllm", 2);
        let (asked, _) = run(&mut stage, CONTEXT, events);
        assert_eq!(asked, expected, "{events:?}");
    }
}

#[test]
fn kv_is_freed_by_a_pod_that_looks_at_the_call_and_not_by_one_that_turns_it_away() {
    let cases = [
        (200, "freed"),
        (400, "freed"),
        (422, "freed"),
        (404, "not_freed"),
        (429, "not_freed"),
        (500, "not_freed"),
        (503, "not_freed"),
    ];
    for (status, result) in cases {
        let mut stage = stage("vllm", 1);
        let (_, mut flow) = run(&mut stage, HANDED_OVER, &[of_proxy(CUT)]);
        let answer = Event::CallReply { status, body: b"" };
        let effects = stage.on(&mut flow, answer);
        let counted = super::watchdog::counted(&effects, crate::meters::Meter::Orphan, result);
        assert_eq!(counted, 1, "{status}");
        assert!(flow.is_ended());
        stage.assert_at_rest();
    }
}
