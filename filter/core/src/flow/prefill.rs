//! While the prefill leg is out, with its client and without.

use super::decode::DecodeLeg;
use super::plan::learn;
use super::state::{Choice, Freeing, Prefilling, State};
use super::{BodyEdit, Call, Effect, Event, Flow};
use crate::engine::usage::prompt_tokens;
use crate::engine::vllm::{self, HandOver};
use crate::fleet::FleetPod;
use crate::meters::{Count, Meter};
use crate::reply::{Fault, PrefillFailure, prefill_passthrough};
use crate::worker::Scene;

/// How long an orphan outlives its call's timeout, and a freeing call may take, in ms.
const ORPHAN_GRACE_MS: u64 = 5000;

impl Flow {
    /// The prefill leg is out and the client waits.
    pub(super) fn prefilling(
        &mut self,
        leg: Prefilling,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        self.judge_prefill(&leg, &event, scene, effects);
        match event {
            Event::CallReply { status: 200, body } => self.prefilled(leg, body, scene, effects),
            Event::CallReply { status, body } => {
                self.prefill_failed(leg, PrefillFailure::Status(status), body, scene, effects)
            }
            Event::CallFailed | Event::CallLost(_) => {
                self.prefill_failed(leg, PrefillFailure::Transport, &[], scene, effects)
            }
            Event::Due if scene.now_ms >= leg.deadline => self.prefill_late(leg, scene, effects),
            Event::Gone { .. } => self.abandoned(leg, scene, effects),
            _ => State::Prefilling(leg),
        }
    }

    /// The prompt is computed: the decode leg may go, with what the engine handed over.
    fn prefilled(
        &self,
        leg: Prefilling,
        body: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg, scene);
        let handed_over = hand_over(&leg, body);
        self.judge_answer(&leg, &handed_over, scene, effects);
        let (edit, members) = match handed_over {
            HandOver::Members(members) => {
                (BodyEdit::Prefix(leg.lead.with(&members)), Some(members))
            }
            HandOver::Unusable(reason) => {
                effects.push(Effect::Count(
                    Count::new(Meter::HandOverUnusable, self.model.clone())
                        .word("class", reason.label()),
                ));
                effects.push(Effect::Warn(format!(
                    "the decode pod computes the prompt: {reason}"
                )));
                (BodyEdit::Keep, None)
            }
            HandOver::NotAnObject => {
                return self.prefill_refused(
                    leg,
                    PrefillFailure::BadResponse,
                    body,
                    scene,
                    effects,
                );
            }
        };
        let estimates = &mut scene.worker.estimates;
        if estimates.are_wanted()
            && let Some(tokens) = prompt_tokens(body)
        {
            let (fleet, bytes) = (&leg.choice.fleet, leg.learns_from);
            estimates.learn(scene.store, fleet.slot, &fleet.name, bytes, tokens);
        }
        scene.worker.ledger.prefill_done(leg.choice.charge);
        if let Some(chain) = &leg.chain {
            learn(&leg.choice, leg.choice.prefill_pod(), chain, scene);
        }
        effects.push(Effect::Count(
            Count::new(Meter::PrefillSuccess, self.model.clone())
                .word("status", "pd-prefill-request-success")
                .code(200),
        ));
        // With the KV it gets the prefix, so a later turn may need no remote prefill.
        let decode_learns = leg.choice.knobs.local_prefill_max_tokens > 0;
        let decode = DecodeLeg {
            body: edit,
            members,
            prefilled: true,
            chain: leg.chain.filter(|_| decode_learns),
        };
        self.send_decode(leg.choice, decode, scene, effects)
    }

    /// Nothing came in time. The call may still be answered: an orphan takes it over, with the
    /// charges, which follow the work.
    fn prefill_late(
        &mut self,
        mut leg: Prefilling,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg, scene);
        let detail = format!("no answer within {} ms", leg.timeout_ms);
        let mut attempt = super::Attempt {
            since: leg.attempt.since,
            tried: leg.attempt.tried.clone(),
            tokens_before: leg.attempt.tokens_before,
            failure: Some((PrefillFailure::Timeout, detail)),
        };
        attempt
            .tried
            .extend(leg.choice.prefill_pod().map(|pod| pod.key));
        self.count_failure(PrefillFailure::Timeout, effects);
        leg.judged = true;
        let orphan = self.orphan(leg, scene);
        match orphan {
            Some(orphan) => effects.push(Effect::Orphan(Box::new(orphan))),
            None => effects.push(Effect::Warn("too many orphaned prefill legs".to_owned())),
        }
        effects.push(Effect::ReadBody);
        State::Rereading(attempt)
    }

    /// The leg failed for good: its charges go back, another pair may be tried.
    fn prefill_failed(
        &mut self,
        mut leg: Prefilling,
        failure: PrefillFailure,
        body: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg, scene);
        if !failure.is_retriable() {
            return self.prefill_refused(leg, failure, body, scene, effects);
        }
        Self::release(&leg.choice, scene);
        self.count_failure(failure, effects);
        let pod = leg.choice.prefill_pod();
        let name = pod.map_or_else(String::new, |pod| pod.name.clone());
        let detail = match failure {
            PrefillFailure::Status(status) => format!("prefill pod {name} answered {status}"),
            _ => format!("prefill pod {name} cannot be reached"),
        };
        leg.attempt.tried.extend(pod.map(|pod| pod.key));
        leg.attempt.failure = Some((failure, detail));
        effects.push(Effect::ReadBody);
        State::Rereading(leg.attempt)
    }

    /// The engine refused the request itself: its own answer goes to the client.
    fn prefill_refused(
        &self,
        leg: Prefilling,
        failure: PrefillFailure,
        body: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::release(&leg.choice, scene);
        self.count_failure(failure, effects);
        if let PrefillFailure::Status(status @ 400..=599) = failure {
            let reply = prefill_passthrough(status, body, &self.request_id);
            return self.answer(reply, "pd_prefill_failure", scene, effects);
        }
        let detail = match failure {
            PrefillFailure::Status(status) => format!("the prefill engine answered {status}"),
            _ => "the prefill engine's answer is no JSON object".to_owned(),
        };
        self.fail(&Fault::Prefill { failure, detail }, scene, effects)
    }

    /// A leg that was a retry no longer counts against the retry budget.
    fn leave_retry(leg: &Prefilling, scene: &mut Scene<'_>) {
        if leg.attempt.failure.is_some() {
            scene.worker.retrying = scene.worker.retrying.saturating_sub(1);
        }
    }

    fn count_failure(&self, failure: PrefillFailure, effects: &mut Vec<Effect>) {
        let code = match failure {
            PrefillFailure::Status(status) => status,
            PrefillFailure::Timeout => 504,
            PrefillFailure::Transport | PrefillFailure::BadResponse => 502,
        };
        effects.push(Effect::Count(
            Count::new(Meter::PrefillFail, self.model.clone())
                .word("status", failure.class())
                .code(code),
        ));
        effects.push(Effect::Count(
            Count::new(Meter::PrefillFailure, self.model.clone())
                .word("class", failure.class())
                .word("stage", "before_response"),
        ));
    }

    /// The client left while the leg is out: the work goes on without it.
    fn abandoned(
        &mut self,
        leg: Prefilling,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg, scene);
        self.client_gone(scene, effects);
        match self.orphan(leg, scene) {
            Some(orphan) => orphan.state,
            None => State::Ended,
        }
    }

    /// A flow that waits for the leg's end alone; `None` when there are too many, and then the
    /// charges are given back at once.
    fn orphan(&self, mut leg: Prefilling, scene: &mut Scene<'_>) -> Option<Self> {
        if !Self::orphan_allowed(scene) {
            Self::release(&leg.choice, scene);
            return None;
        }
        scene.worker.orphans = scene.worker.orphans.saturating_add(1);
        leg.deadline = leg.deadline.saturating_add(ORPHAN_GRACE_MS);
        Some(Self {
            head: std::rc::Rc::clone(&self.head),
            request_id: self.request_id.clone(),
            model: self.model.clone(),
            state: State::Orphaned(leg),
        })
    }

    /// The prefill leg is out and nobody waits for it.
    pub(super) fn orphaned(
        &self,
        leg: Prefilling,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !leg.judged {
            self.judge_prefill(&leg, &event, scene, effects);
        }
        match event {
            Event::CallReply { status: 200, body } => {
                let handed_over = hand_over(&leg, body);
                if !leg.judged {
                    self.judge_answer(&leg, &handed_over, scene, effects);
                }
                scene.worker.ledger.prefill_done(leg.choice.charge);
                if let (HandOver::Members(members), Some(pod)) =
                    (handed_over, leg.choice.decode_pod())
                {
                    return self.free(&leg.choice, pod, &members, scene, effects);
                }
                self.laid_to_rest(leg.choice.charge, "nothing_held", scene, effects)
            }
            Event::CallReply { .. } | Event::CallFailed | Event::CallLost(_) => {
                self.laid_to_rest(leg.choice.charge, "prefill_failed", scene, effects)
            }
            Event::Due if scene.now_ms >= leg.deadline => {
                self.laid_to_rest(leg.choice.charge, "no_answer", scene, effects)
            }
            _ => State::Orphaned(leg),
        }
    }

    /// Asks a decode pod to have the prefill pod free what `members` names; the charges stay
    /// until it is answered.
    pub(super) fn free(
        &self,
        choice: &Choice,
        pod: &FleetPod,
        members: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let id = scene.worker.ids.request_id();
        effects.push(Effect::Call(Call {
            address: pod.address.clone(),
            path: self.head.path.clone(),
            headers: self.leg_headers(&id),
            body: vllm::release_body(&choice.fleet.name, members, self.head.endpoint),
            timeout_ms: ORPHAN_GRACE_MS,
        }));
        State::Freeing(Freeing {
            charge: choice.charge,
            deadline: scene.now_ms.saturating_add(2 * ORPHAN_GRACE_MS),
        })
    }

    /// The decode leg never reached an engine, and its request is over: has the KV freed through
    /// `pod`, as an orphan. Nothing is freed twice or while it is read, since no engine was told of
    /// it.
    pub(super) fn free_unsent(
        &self,
        choice: &Choice,
        pod: Option<&FleetPod>,
        members: Option<&[u8]>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let (Some(pod), Some(members), true) = (pod, members, Self::orphan_allowed(scene)) else {
            Self::release(choice, scene);
            return State::Ended;
        };
        scene.worker.orphans = scene.worker.orphans.saturating_add(1);
        self.free(choice, pod, members, scene, effects)
    }

    /// May one more flow outlive its client's stream?
    pub(super) fn orphan_allowed(scene: &Scene<'_>) -> bool {
        let limit = usize::try_from(scene.config.knobs.max_orphans).unwrap_or(usize::MAX);
        scene.worker.orphans < limit
    }

    /// The call that frees an orphan's KV is out. Its refusal is what was asked for.
    pub(super) fn freeing(
        &self,
        leg: Freeing,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match event {
            Event::CallReply { .. } => self.laid_to_rest(leg.charge, "freed", scene, effects),
            Event::CallFailed | Event::CallLost(_) => {
                self.laid_to_rest(leg.charge, "not_freed", scene, effects)
            }
            Event::Due if scene.now_ms >= leg.deadline => {
                self.laid_to_rest(leg.charge, "not_freed", scene, effects)
            }
            _ => State::Freeing(leg),
        }
    }

    fn laid_to_rest(
        &self,
        charge: crate::ledger::ChargeId,
        result: &'static str,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        scene.worker.ledger.release(charge);
        scene.worker.orphans = scene.worker.orphans.saturating_sub(1);
        let count = Count::new(Meter::Orphan, self.model.clone()).word("result", result);
        effects.push(Effect::Count(count));
        State::Ended
    }
}

/// What the prefill engine's answer lets the decode leg carry.
fn hand_over(leg: &Prefilling, body: &[u8]) -> HandOver {
    let address = leg
        .choice
        .prefill_pod()
        .map_or("", |pod| pod.address.as_str());
    vllm::hand_over(body, leg.connector, host(address))
}

/// The IP of an `ip:port`, without the brackets of IPv6.
pub(super) fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}
