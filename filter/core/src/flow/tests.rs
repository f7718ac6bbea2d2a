//! Event scripts: what happens in, what is to be done out.

mod aborts;
mod ejection;
mod serve;
mod watchdog;

use super::*;
use crate::config::Config;
use crate::fleet::accept_topology;
use crate::reply::Reply;
use crate::request::{Endpoint, patch};
use crate::testkit::{MemoryStore, ModelBuilder, model, pod, topology};
use pd_wire::control::Charged;

const CHAT: &[u8] = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":6}"#;
const STREAM: &[u8] = br#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const HANDED_OVER: &[u8] = br#"{"id":"x","kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":15601}}"#;

mod explain;
mod filter;
mod freeing;
mod generation_first;
mod mistakes;
mod proxy;
mod rate;
mod sglang;
mod strategies;
mod trtllm;

const GONE: Event<'static> = Event::Gone {
    engine_cut: false,
    unsent: false,
};

mod sessions;

const REFUSED: Event<'static> = Event::CallReply {
    status: 400,
    body: b"{}",
};
const END: Event<'static> = Event::ResponseChunk {
    bytes: b"",
    end: true,
};
const ROLE: &[u8] =
    b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const TOKEN: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const ERROR: &[u8] = b"data: {\"error\":{\"message\":\"Internal server error\"}}\n\n";

/// A VM with a store, a clock and a snapshot.
struct Stage {
    store: MemoryStore,
    worker: crate::worker::Worker,
    config: Config,
    now_ms: u64,
}

impl Stage {
    /// Rolesets `r0…` of one prefill and one decode pod each, and further pods.
    fn new(rolesets: usize, config: &str) -> Self {
        Self::of_engine("vllm", rolesets, config)
    }

    /// The same with pods of another engine.
    fn of_engine(engine: &str, rolesets: usize, config: &str) -> Self {
        let mut served = model("m");
        for n in 0..rolesets {
            let set = format!("r{n}");
            let prefill = pod(&format!("ns/p{n}"))
                .prefill()
                .roleset(&set)
                .engine(engine);
            let decode = pod(&format!("ns/d{n}"))
                .decode()
                .roleset(&set)
                .engine(engine);
            served = served
                .pod(prefill.address(&format!("10.0.0.1:{}", 8000 + n)))
                .pod(decode.address(&format!("10.0.0.2:{}", 8000 + n)));
        }
        Self::serving(served, config)
    }

    /// The same with one model of any pods.
    fn serving(served: ModelBuilder, config: &str) -> Self {
        let mut stage = Self::empty(config);
        let bytes = topology(1, 1).model(served).json();
        accept_topology(&stage.store, &bytes, 0).unwrap();
        stage.worker.fleet.refresh(&stage.store);
        stage
    }

    fn empty(config: &str) -> Self {
        Self {
            store: MemoryStore::default(),
            worker: crate::worker::Worker::new([3; 32]),
            config: Config::parse(config.as_bytes(), |_| None).unwrap(),
            now_ms: 1000,
        }
    }

    fn scene(&mut self) -> Scene<'_> {
        Scene {
            worker: &mut self.worker,
            config: &self.config,
            store: &self.store,
            now_ms: self.now_ms,
        }
    }

    fn flow(&mut self) -> Flow {
        self.flow_with(&[("authorization", b"Bearer t")])
    }

    fn flow_with(&mut self, headers: &[(&str, &[u8])]) -> Flow {
        let headers = headers.iter().copied();
        let head = Head::read("/v1/chat/completions", Endpoint::Chat, headers);
        Flow::new(head, false, &mut self.scene())
    }

    fn flow_on(&mut self, path: &str) -> Flow {
        let head = Head::read(path, Endpoint::of_path(path), std::iter::empty());
        Flow::new(head, false, &mut self.scene())
    }

    fn on(&mut self, flow: &mut Flow, event: Event<'_>) -> Vec<Effect> {
        flow.on(event, &mut self.scene())
    }

    /// Refuses the call by which a flow has KV freed, as that call wants to be.
    fn freed(&mut self, flow: &mut Flow) {
        assert!(flow.is_orphaned());
        assert!(
            self.on(flow, REFUSED)
                .iter()
                .all(|effect| matches!(effect, Effect::Count(_)))
        );
        assert!(flow.is_ended());
    }

    fn charged(&mut self) -> Charged {
        self.worker
            .ledger
            .ledgers(&self.store, &mut self.worker.fleet)
            .total
    }

    fn assert_at_rest(&mut self) {
        assert_eq!(self.charged(), Charged::default());
        assert_eq!(
            (
                self.worker.in_flight,
                self.worker.retrying,
                self.worker.orphans
            ),
            (0, 0, 0)
        );
    }
}

fn call(effects: &[Effect]) -> &Call {
    effects
        .iter()
        .find_map(|effect| {
            if let Effect::Call(call) = effect {
                Some(call)
            } else {
                None
            }
        })
        .expect("a call")
}

fn leg(effects: &[Effect]) -> &Leg {
    effects
        .iter()
        .find_map(|effect| {
            if let Effect::Send(leg) = effect {
                Some(leg)
            } else {
                None
            }
        })
        .expect("a leg")
}

fn reply(effects: &[Effect]) -> &Reply {
    effects
        .iter()
        .find_map(|effect| match effect {
            Effect::Reply(reply) | Effect::Rewrite(reply) => Some(reply),
            _ => None,
        })
        .expect("a reply")
}

fn endings(effects: &[Effect]) -> usize {
    use crate::meters::Meter::{RequestFail, RequestSuccess};
    effects
        .iter()
        .filter(|effect| {
            matches!(effect, Effect::Count(count)
                if matches!(count.meter, RequestFail | RequestSuccess))
        })
        .count()
}

fn headers(status: u16, event_stream: bool) -> Event<'static> {
    Event::ResponseHeaders {
        status,
        proxy_details: None,
        event_stream,
        end: false,
    }
}

fn has(effects: &[Effect], wanted: fn(&Effect) -> bool) -> bool {
    effects.iter().any(wanted)
}

#[test]
fn a_pair_is_charged_prefilled_handed_over_and_given_back() {
    let mut stage = Stage::new(1, "");
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    let sent = call(&effects);
    assert_eq!(sent.address, "10.0.0.1:8000");
    assert!(
        sent.headers
            .contains(&("authorization", "Bearer t".to_owned()))
    );
    let prefill: serde_json::Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
    let charged = stage.charged();
    assert_eq!((charged.prefill_requests, charged.decode_pending), (1, 1));

    let effects = stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        },
    );
    let decode = leg(&effects);
    assert_eq!(decode.address, "10.0.0.2:8000");
    let BodyEdit::Prefix(patch::Prefix { replace: 1, bytes }) = &decode.body else {
        panic!("a prefix edit")
    };
    assert!(bytes.starts_with(br#"{"kv_transfer_params":{"do_remote_prefill":true"#));
    assert!(bytes.ends_with(b"},"));
    let charged = stage.charged();
    assert_eq!((charged.prefill_requests, charged.active_tokens), (0, 0));
    assert_eq!((charged.decode_pending, charged.decode_running), (0, 1));
    assert!(charged.kv_tokens > 0);

    let effects = stage.on(&mut flow, headers(200, false));
    assert!(has(&effects, |effect| matches!(effect, Effect::Dress(_))));
    let effects = stage.on(
        &mut flow,
        Event::ResponseChunk {
            bytes: b"{}",
            end: true,
        },
    );
    assert_eq!(endings(&effects), 1);
    assert!(flow.is_ended());
    stage.assert_at_rest();
}

#[test]
fn a_stream_is_held_up_to_its_first_content_and_an_error_there_is_a_502() {
    for (second, is_error) in [(TOKEN, false), (ERROR, true)] {
        let mut stage = Stage::new(1, "");
        let mut flow = stage.flow();
        stage.on(&mut flow, Event::Body(STREAM));
        stage.on(
            &mut flow,
            Event::CallReply {
                status: 200,
                body: HANDED_OVER,
            },
        );
        let effects = stage.on(&mut flow, headers(200, true));
        assert!(has(&effects, |effect| matches!(effect, Effect::Hold)));
        let effects = stage.on(
            &mut flow,
            Event::ResponseChunk {
                bytes: ROLE,
                end: false,
            },
        );
        assert!(has(&effects, |effect| matches!(effect, Effect::Hold)));
        let effects = stage.on(
            &mut flow,
            Event::ResponseChunk {
                bytes: second,
                end: false,
            },
        );
        assert!(!has(&effects, |effect| matches!(effect, Effect::Hold)));
        assert_eq!(flow.is_orphaned(), is_error);
        if is_error {
            assert_eq!(reply(&effects).status, 502);
            stage.freed(&mut flow);
        } else {
            assert!(!flow.reads_response());
            stage.on(&mut flow, END);
        }
        stage.assert_at_rest();
    }
}

#[test]
fn a_refused_prefill_is_tried_once_on_another_roleset_with_a_new_id() {
    let mut stage = Stage::new(2, "");
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    let (first, first_id) = (call(&effects).address.clone(), flow.request_id().to_owned());
    let effects = stage.on(&mut flow, Event::CallFailed);
    assert!(has(&effects, |effect| matches!(effect, Effect::ReadBody)));
    assert_eq!(stage.charged(), Charged::default());
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    assert_ne!(call(&effects).address, first);
    assert_ne!(flow.request_id(), first_id);
    stage.on(
        &mut flow,
        Event::CallReply {
            status: 503,
            body: b"busy",
        },
    );
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    let reply = reply(&effects);
    assert_eq!(reply.status, 503);
    assert!(
        reply
            .headers
            .iter()
            .any(|(name, _)| *name == "x-error-pd-prefill")
    );
    assert_eq!(endings(&effects), 1);
    stage.assert_at_rest();
}

#[test]
fn an_engines_refusal_reaches_the_client_as_it_came() {
    let mut stage = Stage::new(2, "");
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    let body = br#"{"error":{"message":"too long"}}"#;
    let effects = stage.on(&mut flow, Event::CallReply { status: 400, body });
    assert_eq!(
        (reply(&effects).status, reply(&effects).body.as_slice()),
        (400, body.as_slice())
    );
    stage.assert_at_rest();
}

#[test]
fn a_late_prefill_goes_on_as_an_orphan_while_the_request_is_tried_elsewhere() {
    let mut stage = Stage::new(2, r#"{"prefillRequestTimeout": 1}"#);
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(flow.deadline(), Some(2000));
    assert!(stage.on(&mut flow, Event::Due).is_empty());
    stage.now_ms = 2000;
    let mut effects = stage.on(&mut flow, Event::Due);
    let place = effects
        .iter()
        .position(|effect| matches!(effect, Effect::Orphan(_)));
    let Effect::Orphan(mut orphan) = effects.remove(place.unwrap()) else {
        unreachable!()
    };
    assert_eq!(
        stage.charged().prefill_requests,
        1,
        "the charge follows the work"
    );
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    assert_eq!(stage.charged().prefill_requests, 2);
    let second = call(&effects).address.clone();

    let effects = stage.on(
        &mut orphan,
        Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        },
    );
    let freeing = call(&effects);
    assert_ne!(freeing.address, second);
    let body: serde_json::Value = serde_json::from_slice(&freeing.body).unwrap();
    assert_eq!(body["temperature"], -1);
    assert_eq!(body["kv_transfer_params"]["remote_request_id"], "r");
    let effects = stage.on(
        &mut orphan,
        Event::CallReply {
            status: 400,
            body: b"",
        },
    );
    assert!(orphan.is_ended());
    assert_eq!(endings(&effects), 0, "the client's request still goes on");

    stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        },
    );
    stage.on(&mut flow, GONE);
    stage.assert_at_rest();
}

#[test]
fn a_client_that_leaves_during_prefill_ends_its_charges_with_the_work() {
    let outcomes: [(Event<'static>, bool); 3] = [
        (
            Event::CallReply {
                status: 200,
                body: HANDED_OVER,
            },
            true,
        ),
        (
            Event::CallReply {
                status: 500,
                body: b"",
            },
            false,
        ),
        (Event::CallFailed, false),
    ];
    for (outcome, frees) in outcomes {
        let mut stage = Stage::new(1, "");
        let mut flow = stage.flow();
        stage.on(&mut flow, Event::Body(CHAT));
        let effects = stage.on(&mut flow, GONE);
        assert_eq!(endings(&effects), 1);
        assert!(flow.is_orphaned());
        assert_eq!(stage.charged().prefill_requests, 1);
        let effects = stage.on(&mut flow, outcome);
        assert_eq!(
            has(&effects, |effect| matches!(effect, Effect::Call(_))),
            frees
        );
        if frees {
            stage.on(&mut flow, Event::CallFailed);
        }
        assert!(flow.is_ended());
        stage.assert_at_rest();
    }
}

#[test]
fn a_request_waits_for_the_first_snapshot_a_bounded_time() {
    let mut stage = Stage::empty(r#"{"snapshotWait": 2}"#);
    let mut flow = stage.flow();
    assert!(stage.on(&mut flow, Event::Body(CHAT)).is_empty());
    let mut late = stage.flow();
    stage.on(&mut late, Event::Body(CHAT));
    stage.now_ms = 3000;
    let effects = stage.on(&mut late, Event::Due);
    assert_eq!(reply(&effects).status, 503);

    let served = model("m")
        .pod(pod("ns/p").prefill().roleset("r"))
        .pod(pod("ns/d").decode().roleset("r"));
    accept_topology(&stage.store, &topology(1, 1).model(served).json(), 0).unwrap();
    let effects = stage.on(&mut flow, Event::Due);
    assert!(has(&effects, |effect| matches!(effect, Effect::ReadBody)));
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    call(&effects);
    stage.on(&mut flow, GONE);
    stage.on(&mut flow, Event::CallFailed);
    stage.assert_at_rest();
}

#[test]
fn a_hidden_body_is_answered_and_never_let_through() {
    let mut stage = Stage::new(1, "");
    let head = Head::read("/v1/completions", Endpoint::Completions, std::iter::empty());
    let mut flow = Flow::new(head, true, &mut stage.scene());
    stage.now_ms = flow.deadline().unwrap();
    let effects = stage.on(&mut flow, Event::Due);
    assert!(has(&effects, |effect| matches!(effect, Effect::ProbeBody)));
    assert!(
        stage
            .on(&mut flow, Event::Probed { hidden_body: false })
            .is_empty()
    );
    let effects = stage.on(&mut flow, Event::Probed { hidden_body: true });
    assert_eq!(reply(&effects).status, 500);
    stage.assert_at_rest();
}

#[test]
fn a_silent_engine_gets_a_504_before_its_answer_and_a_cut_after() {
    for started in [false, true] {
        let mut stage = Stage::new(1, r#"{"streamIdleBackstop": 900}"#);
        let mut flow = stage.flow();
        stage.on(&mut flow, Event::Body(CHAT));
        stage.on(
            &mut flow,
            Event::CallReply {
                status: 200,
                body: HANDED_OVER,
            },
        );
        if started {
            stage.on(&mut flow, headers(200, false));
        }
        stage.now_ms = flow.deadline().unwrap();
        let effects = stage.on(&mut flow, Event::Due);
        assert_eq!(
            has(&effects, |effect| matches!(effect, Effect::Cut)),
            started
        );
        if !started {
            assert_eq!(reply(&effects).status, 504);
        }
        assert_eq!(endings(&effects), 1);
        if !started {
            stage.freed(&mut flow);
        }
        stage.assert_at_rest();
    }
}

#[test]
fn the_proxys_own_answer_becomes_ours_and_an_engines_error_stays() {
    let mut stage = Stage::new(1, "");
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(CHAT));
    stage.on(
        &mut flow,
        Event::CallReply {
            status: 200,
            body: HANDED_OVER,
        },
    );
    let effects = stage.on(
        &mut flow,
        Event::ResponseHeaders {
            status: 503,
            proxy_details: Some("upstream_reset_before_response_started{connection_failure}"),
            event_stream: false,
            end: false,
        },
    );
    let rewritten = reply(&effects);
    assert_eq!(rewritten.status, 503);
    assert!(
        rewritten
            .headers
            .iter()
            .any(|(name, _)| *name == "x-error-pd-decode")
    );
    stage.assert_at_rest();
}

#[test]
fn what_cannot_be_served_says_which_field_and_charges_nothing() {
    let cases: [(&[u8], u16); 5] = [
        (b"{", 400),
        (br#"{"model":"m","model":"m","messages":[]}"#, 400),
        (
            br#"{"model":"m","messages":[],"kv_tr\u0061nsfer_params":{}}"#,
            400,
        ),
        (br#"{"model":"unknown","messages":[]}"#, 404),
        (br#"{"messages":[]}"#, 400),
    ];
    for (body, status) in cases {
        let mut stage = Stage::new(1, "");
        let mut flow = stage.flow();
        let effects = stage.on(&mut flow, Event::Body(body));
        assert_eq!(
            reply(&effects).status,
            status,
            "{}",
            String::from_utf8_lossy(body)
        );
        assert_eq!(endings(&effects), 1);
        stage.assert_at_rest();
    }
}

#[test]
fn what_cannot_hand_kv_over_goes_in_one_leg() {
    let mut stage = Stage::new(1, "");
    let mut flow = stage.flow();
    let body = br#"{"model":"m","n":2,"messages":[{"role":"user","content":"hi"}]}"#;
    let effects = stage.on(&mut flow, Event::Body(body));
    let sent = leg(&effects);
    assert_eq!(
        (sent.address.as_str(), &sent.body),
        ("10.0.0.2:8000", &BodyEdit::Keep)
    );
    stage.on(&mut flow, GONE);
    stage.assert_at_rest();
}
