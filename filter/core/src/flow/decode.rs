//! The client's own request at its pod: released, dressed, watched, ended.

use super::abort::Reason;
use super::affinity;
use super::doubt::Failed;
use super::plan;
use super::sse::{Opening, Verdict};
use super::state::{Choice, Decoding, PrefillCall, State};
use super::timers::{Overdue, Timers, Watch};
use super::together::Work;
use super::verdict::{Part, cause_of};
use super::{BodyEdit, Effect, Event, Flow, Leg};
use crate::eject::{Cause, Outcome};
use crate::engine::{KvReference, Legs};
use crate::meters::{Count, Meter};
use crate::prefix::Chain;
use crate::reply::Fault;
use crate::worker::Scene;
use pd_wire::knobs::{Choice as _, Strategy};
use pd_wire::names;

/// What the proxy says when no connection to the pod came about.
const NEVER_CONNECTED: [&str; 2] = ["connection_failure", "connection_timeout"];

/// How the client's request goes to the pod that answers it.
#[derive(Debug)]
pub(super) struct DecodeLeg {
    /// Change to the body.
    pub(super) body: BodyEdit,
    /// The protocol of the pair; `None` for one leg.
    pub(super) legs: Option<Legs>,
    /// The pod takes KV over.
    pub(super) takes_kv: bool,
    /// The call of a prefill leg that is out at the same time.
    pub(super) prefill: Option<PrefillCall>,
    /// The KV reference that the body carries then.
    pub(super) kv: Option<KvReference>,
    /// The prefill has succeeded, so the pod owes an answer from now on.
    pub(super) prefilled: bool,
    /// Prompt blocks, when the pod's cache shall be remembered.
    pub(super) chain: Option<Chain>,
}

impl Flow {
    /// Lets the client's request go to the pod that answers it.
    pub(super) fn send_decode(
        &self,
        choice: Choice,
        leg: DecodeLeg,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Some(pod) = choice.decode_pod() else {
            // A position of this very snapshot; without it there is nowhere to go.
            Self::release(&choice, scene);
            let fault = Fault::DecodeUnreachable("the pod left the snapshot".to_owned());
            return self.fail(&fault, scene, effects);
        };
        effects.push(Effect::Send(Leg {
            address: pod.address.clone(),
            request_id: self.request_id.clone(),
            says_json: self.head.says_json,
            body: leg.body,
        }));
        scene.worker.ledger.decode_sent(choice.charge);
        let timers = Timers::of(&choice.knobs, &choice.engine());
        let mut watch = Watch::new(timers, choice.streams, scene.now_ms);
        if leg.prefilled {
            watch.prefilled(scene.now_ms);
        }
        State::Decoding(Decoding {
            choice,
            took_kv: leg.takes_kv,
            prefill: leg.prefill,
            legs: leg.legs,
            kv: leg.kv,
            chain: leg.chain,
            watch,
            status: None,
            opening: None,
            held: false,
            doubt: None,
        })
    }

    /// The request is at its pod.
    pub(super) fn decoding(
        &self,
        mut leg: Decoding,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !matches!(event, Event::Gone { .. })
            && let Some(doubt) = leg.doubt
        {
            return self.in_doubt(leg, doubt, event, scene, effects);
        }
        match event {
            Event::CallReply { .. } | Event::CallFailed | Event::CallLost(_) => {
                self.prefill_verdict(leg, event, scene, effects)
            }
            Event::ResponseHeaders {
                proxy_details: Some(details),
                ..
            } => self.decode_unreachable(leg, details, scene, effects),
            Event::ResponseHeaders {
                status,
                event_stream,
                end,
                ..
            } => {
                leg.status = Some(status);
                leg.watch.headers(scene.now_ms);
                effects.push(Effect::Dress(self.response_headers(&leg.choice)));
                if !(200..300).contains(&status) {
                    leg.chain = None;
                }
                if status >= 400 && leg.prefill.is_some() {
                    return Self::doubt(leg, Failed::Answer { whole: end }, scene, effects);
                }
                self.judge_status(&leg, status, scene, effects);
                if status == 200 && event_stream && leg.took_kv && !end {
                    leg.opening = Some(Opening::default());
                    effects.push(Effect::Hold);
                    return State::Decoding(leg);
                }
                if status < 400 && leg.prefill.is_some() && !end {
                    // Until its first body chunk a failure of the prefill gets a status of its own.
                    leg.held = true;
                    effects.push(Effect::Hold);
                }
                if status < 400 && leg.took_kv {
                    leg.kv = None;
                    self.judge(&leg.choice, Part::Pair, Outcome::Works, scene, effects);
                }
                leg.learn(scene);
                if end {
                    return self.answered(leg, scene, effects);
                }
                State::Decoding(leg)
            }
            Event::ResponseChunk { bytes, end } => {
                leg.held = false;
                let had_begun = leg.opening.as_ref().is_some_and(Opening::has_begun);
                let verdict = leg
                    .opening
                    .as_mut()
                    .map(|opening| match opening.feed(bytes) {
                        Verdict::Preamble if end => opening.finish(),
                        verdict => verdict,
                    });
                let begins = !had_begun && leg.opening.as_ref().is_some_and(Opening::has_begun);
                // Of what is held the client has nothing: only its beginning puts a limit off, or an
                // engine could go on for ever without a word.
                if verdict != Some(Verdict::Preamble) || begins {
                    leg.watch.chunk(scene.now_ms);
                }
                match verdict {
                    Some(Verdict::Error) if leg.prefill.is_some() => {
                        return Self::doubt(leg, Failed::HandOver, scene, effects);
                    }
                    Some(Verdict::Error) => return self.not_taken_over(leg, scene, effects),
                    Some(Verdict::Preamble) if !end => effects.push(Effect::Hold),
                    Some(_) => {
                        leg.opening = None;
                        leg.kv = None;
                        leg.learn(scene);
                        self.judge(&leg.choice, Part::Pair, Outcome::Works, scene, effects);
                    }
                    None => {}
                }
                if end {
                    self.answered(leg, scene, effects)
                } else {
                    State::Decoding(leg)
                }
            }
            Event::Due if leg.prefill_late(scene.now_ms) => {
                self.prefill_verdict(leg, event, scene, effects)
            }
            Event::Due => match leg.watch.overdue(scene.now_ms) {
                Some(overdue) => self.silent(leg, overdue, scene, effects),
                None => State::Decoding(leg),
            },
            Event::Gone { unsent: true, .. } => {
                self.client_gone(scene, effects);
                if leg.prefill.is_some() {
                    return self.part(leg, Work::Prefill(Reason::ClientGone), scene, effects);
                }
                // The charged pod may be slow to connect to.
                let pod = leg.choice.other_decode_pod().or(leg.choice.decode_pod());
                self.free(&leg, pod, scene, effects)
            }
            Event::Gone {
                engine_cut: true, ..
            } => {
                let cut = Outcome::Fails(Cause::Transport);
                self.judge(&leg.choice, Part::Decode, cut, scene, effects);
                self.ended("engine_cut", 502, scene, effects);
                self.decode_failed(leg, scene, effects)
            }
            Event::Gone { .. } => {
                self.client_gone(scene, effects);
                self.part(leg, Work::Both(Reason::ClientGone), scene, effects)
            }
            _ => State::Decoding(leg),
        }
    }

    /// The engine's answer is complete.
    pub(super) fn answered(
        &self,
        leg: Decoding,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let status = leg.status.unwrap_or(200);
        if status < 400 {
            self.judge(&leg.choice, Part::Decode, Outcome::Works, scene, effects);
            self.ended("gateway_request_success", status, scene, effects);
            self.part(leg, Work::Reply, scene, effects)
        } else {
            self.ended("engine_error", status, scene, effects);
            self.decode_failed(leg, scene, effects)
        }
    }

    /// The decode engine has given the request up, and the client's part is over.
    fn decode_failed(
        &self,
        leg: Decoding,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if leg.prefill.is_some() {
            return self.part(leg, Work::Prefill(Reason::Decode), scene, effects);
        }
        // The pod had the request, and may have taken the KV before it failed.
        let refuses = leg.legs.as_ref().is_some_and(Legs::releases_by_refusal);
        let pod = leg.choice.other_decode_pod().or(leg.choice.decode_pod());
        self.free(&leg, pod.filter(|_| refuses), scene, effects)
    }

    /// The proxy answered in the engine's place.
    fn decode_unreachable(
        &self,
        leg: Decoding,
        details: &str,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if let Some(cause) = cause_of(details) {
            self.judge(
                &leg.choice,
                Part::Decode,
                Outcome::Fails(cause),
                scene,
                effects,
            );
        }
        // What follows the first brace is the transport's own text, of any length.
        let cause = details
            .split('{')
            .next()
            .unwrap_or_default()
            .trim_end_matches('_');
        let fault = Fault::DecodeUnreachable(cause.to_owned());
        self.rewrite(&fault, scene, effects);
        let never = NEVER_CONNECTED.iter().any(|words| details.contains(words));
        if never && leg.prefill.is_none() {
            return self.free(&leg, leg.choice.other_decode_pod(), scene, effects);
        }
        self.decode_failed(leg, scene, effects)
    }

    /// The decode engine could not take the KV, and said so after its headers.
    pub(super) fn not_taken_over(
        &self,
        leg: Decoding,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        effects.push(Effect::Count(Count::new(
            Meter::PairFailure,
            self.model.clone(),
        )));
        let failed = Outcome::Fails(Cause::HandOver);
        self.judge(&leg.choice, Part::Pair, failed, scene, effects);
        self.fail(&Fault::DecodeHandOver, scene, effects);
        self.decode_failed(leg, scene, effects)
    }

    /// The engine fell silent: a real answer while nothing reached the client, else a cut.
    fn silent(
        &self,
        leg: Decoding,
        overdue: Overdue,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let started = leg.started();
        let late = Outcome::Fails(Cause::Timeout);
        let who = if started { Part::Decode } else { leg.liable() };
        self.judge(&leg.choice, who, late, scene, effects);
        let awaited = overdue.awaited;
        effects.push(Effect::Count(
            Count::new(Meter::Watchdog, self.model.clone()).word("phase", awaited.phase()),
        ));
        let pod = leg.choice.decode_pod();
        let fault = Fault::DecodeTimeout {
            pod: pod.map_or_else(String::new, |pod| pod.name.clone()),
            what: awaited.words(),
            limit_ms: overdue.limit_ms,
        };
        if started {
            effects.push(Effect::Cut);
            self.ended(fault.label(), fault.status(), scene, effects);
        } else {
            self.fail(&fault, scene, effects);
        }
        if leg.kv.is_some() && leg.legs.as_ref().is_some_and(Legs::releases_by_refusal) {
            // An engine that hears of the cut lets the KV go by itself. A silent one may not.
            return self.decode_failed(leg, scene, effects);
        }
        self.part(leg, Work::Both(Reason::Watchdog(awaited)), scene, effects)
    }

    /// What the response says about the route.
    fn response_headers(&self, choice: &Choice) -> Vec<(&'static str, String)> {
        // Room for what most answers have.
        let mut headers = Vec::with_capacity(8);
        headers.push((names::HEADER_GATEWAY_REQUEST_ID, self.request_id.clone()));
        headers.push((names::HEADER_STRATEGY, choice.strategy.name().to_owned()));
        if let Some(pod) = choice.decode_pod() {
            headers.push((names::HEADER_TARGET_NAME, pod.name.clone()));
            headers.push((names::HEADER_TARGET_IP, pod.address.clone()));
            if choice.strategy == Strategy::SessionAffinity {
                let id = affinity::session_id(&pod.address);
                headers.push((names::HEADER_SESSION_ID, id));
            }
        }
        if let Some(pod) = choice.prefill_pod() {
            headers.push((names::HEADER_PREFILL_NAME, pod.name.clone()));
            headers.push((names::HEADER_PREFILL_IP, pod.ip().to_owned()));
        }
        if let Some(id) = &self.head.client_request_id {
            headers.push((names::HEADER_REQUEST_ID, id.clone()));
        }
        if let Some(profile) = &choice.auto_profile {
            headers.push((names::HEADER_RESOLVED_PROFILE, profile.clone()));
        }
        if let Some(decision) = &choice.decision {
            headers.push((names::HEADER_DECISION, decision.clone()));
        }
        headers
    }
}

// === impl Decoding ===

impl Decoding {
    /// The pod has computed the prompt or taken its KV over; once per request.
    fn learn(&mut self, scene: &Scene<'_>) {
        if let Some(mut chain) = self.chain.take() {
            plan::learn(&self.choice, self.choice.decode_pod(), &mut chain, scene);
        }
    }
}
