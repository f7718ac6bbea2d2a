//! While the prefill leg is out, with its client and without.

use super::decode::DecodeLeg;
use super::plan::learn;
use super::state::{Choice, Decoding, Freeing, Orphan, Prefilling, State};
use super::{Attempt, BodyEdit, Call, Effect, Event, Flow};
use crate::engine::{HandOver, KvReference, Legs};
use crate::fleet::FleetPod;
use crate::ledger::ChargeId;
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
        self.judge_prefill(&leg.choice, leg.call.deadline, &event, scene, effects);
        match event {
            Event::CallReply { status: 200, body } => self.prefilled(leg, body, scene, effects),
            Event::CallReply { status, body } => {
                self.prefill_failed(leg, PrefillFailure::Status(status), body, scene, effects)
            }
            Event::CallFailed | Event::CallLost(_) => {
                self.prefill_failed(leg, PrefillFailure::Transport, &[], scene, effects)
            }
            Event::Due if scene.now_ms >= leg.call.deadline => {
                self.prefill_late(leg, scene, effects)
            }
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
        Self::leave_retry(&leg.attempt, scene);
        let handed_over = leg.legs.hand_over(body, leg.choice.prefill_pod());
        self.judge_answer(&leg.choice, &handed_over, scene, effects);
        let (edit, kv) = match handed_over {
            HandOver::Members(members) => {
                let kv = KvReference {
                    members,
                    prompt_ids: leg.legs.prompt_ids(body).map(<[u8]>::to_vec),
                };
                (
                    leg.legs.decode_edit(&leg.lead, self.head.endpoint, &kv),
                    Some(kv),
                )
            }
            HandOver::Nothing => (BodyEdit::Keep, None),
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
        scene.worker.ledger.prefill_done(leg.choice.charge);
        if let Some(chain) = &leg.call.chain {
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
            legs: Some(leg.legs),
            kv,
            prefilled: true,
            chain: leg.call.chain.filter(|_| decode_learns),
        };
        self.send_decode(leg.choice, decode, scene, effects)
    }

    /// Nothing came in time. The call may still be answered: an orphan takes it over, with the
    /// charges, which follow the work.
    fn prefill_late(
        &mut self,
        leg: Prefilling,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg.attempt, scene);
        let detail = format!("no answer within {} ms", leg.call.timeout_ms);
        let mut attempt = Attempt {
            since: leg.attempt.since,
            tried: leg.attempt.tried.clone(),
            tokens_before: leg.attempt.tokens_before,
            failure: Some((PrefillFailure::Timeout, detail)),
        };
        attempt
            .tried
            .extend(leg.choice.prefill_pod().map(|pod| pod.key));
        self.count_failure(PrefillFailure::Timeout, effects);
        let orphan = self.orphan(leg.into_orphan(true), scene);
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
        Self::leave_retry(&leg.attempt, scene);
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
    fn leave_retry(attempt: &Attempt, scene: &mut Scene<'_>) {
        if attempt.failure.is_some() {
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
        Self::leave_retry(&leg.attempt, scene);
        self.client_gone(scene, effects);
        self.outlive(leg.into_orphan(false), scene)
    }

    /// This flow itself goes on as an orphan, if there is room.
    pub(super) fn outlive(&self, orphan: Orphan, scene: &mut Scene<'_>) -> State {
        match self.orphan(orphan, scene) {
            Some(orphan) => orphan.state,
            None => State::Ended,
        }
    }

    /// A flow that waits for the leg's end alone; `None` when there are too many, and then the
    /// charges are given back at once.
    fn orphan(&self, mut leg: Orphan, scene: &mut Scene<'_>) -> Option<Self> {
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
        leg: Orphan,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !leg.judged {
            self.judge_prefill(&leg.choice, leg.deadline, &event, scene, effects);
        }
        match event {
            Event::CallReply { status: 200, body } => {
                let handed_over = leg.legs.hand_over(body, leg.choice.prefill_pod());
                if !leg.judged {
                    self.judge_answer(&leg.choice, &handed_over, scene, effects);
                }
                scene.worker.ledger.prefill_done(leg.choice.charge);
                if let (HandOver::Members(members), Some(pod)) =
                    (handed_over, leg.choice.decode_pod())
                {
                    let kv = KvReference {
                        members,
                        prompt_ids: leg.legs.prompt_ids(body).map(<[u8]>::to_vec),
                    };
                    if let Some(call) = self.freeing_call(&leg.legs, &kv, pod, &leg.choice, scene) {
                        effects.push(Effect::Call(call));
                        return Self::freeing_state(leg.choice.charge, scene);
                    }
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

    /// Asks a decode pod to have the prefill pod free its KV; `None` where no request does that.
    fn freeing_call(
        &self,
        legs: &Legs,
        kv: &KvReference,
        pod: &FleetPod,
        choice: &Choice,
        scene: &mut Scene<'_>,
    ) -> Option<Call> {
        let body = legs.release_body(&choice.fleet.name, kv, self.head.endpoint)?;
        let id = scene.worker.ids.request_id();
        Some(Call {
            method: "POST",
            address: pod.address.clone(),
            path: self.head.path.clone(),
            headers: self.leg_headers(&id),
            body,
            timeout_ms: ORPHAN_GRACE_MS,
        })
    }

    /// The charges stay until the freeing call is answered.
    fn freeing_state(charge: ChargeId, scene: &Scene<'_>) -> State {
        State::Freeing(Freeing {
            charge,
            deadline: scene.now_ms.saturating_add(2 * ORPHAN_GRACE_MS),
        })
    }

    /// The decode leg never reached an engine, and its request is over: has the KV freed through
    /// `pod`, as an orphan. Nothing is freed twice or while it is read, since no engine was told of
    /// it.
    pub(super) fn free_unsent(
        &self,
        leg: &Decoding,
        pod: Option<&FleetPod>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let choice = &leg.choice;
        let call = match (&leg.legs, &leg.kv, pod) {
            (Some(legs), Some(kv), Some(pod)) if Self::orphan_allowed(scene) => {
                self.freeing_call(legs, kv, pod, choice, scene)
            }
            _ => None,
        };
        let Some(call) = call else {
            Self::release(choice, scene);
            return State::Ended;
        };
        scene.worker.orphans = scene.worker.orphans.saturating_add(1);
        effects.push(Effect::Call(call));
        Self::freeing_state(choice.charge, scene)
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
        charge: ChargeId,
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

// === impl Prefilling ===

impl Prefilling {
    /// The same leg when nobody waits for it any more.
    fn into_orphan(self, judged: bool) -> Orphan {
        Orphan {
            choice: self.choice,
            legs: self.legs,
            deadline: self.call.deadline,
            judged,
        }
    }
}
