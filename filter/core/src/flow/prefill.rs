//! While the prefill leg is out and the decode leg waits for it.

use super::decode::DecodeLeg;
use super::plan::learn;
use super::state::{Choice, Orphan, PrefillCall, Prefilling, State};
use super::{Attempt, BodyEdit, Effect, Event, Flow};
use crate::engine::usage::prompt_tokens;
use crate::engine::{HandOver, KvReference};
use crate::fleet::FleetPod;
use crate::meters::{Count, Meter};
use crate::reply::{Fault, PrefillFailure, prefill_passthrough};
use crate::worker::Scene;

/// The `stage` of a failure of which the client has seen nothing.
pub(super) const BEFORE_RESPONSE: &str = "before_response";

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
            Event::ResponseHeaders { proxy_details, .. } => {
                let pod = leg.choice.prefill_pod();
                self.proxy_gave_up(pod, proxy_details, scene, effects);
                Self::leave_retry(&leg.attempt, scene);
                self.outlive(leg.into_orphan(true), scene)
            }
            Event::Gone { .. } => self.abandoned(leg, scene, effects),
            _ => State::Prefilling(leg),
        }
    }

    /// The prompt is computed: the decode leg may go, with what the engine handed over.
    fn prefilled(
        &self,
        mut leg: Prefilling,
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
        self.prefill_succeeded(&leg.choice, &mut leg.call, body, scene, effects);
        // With the KV it gets the prefix, so a later turn may need no remote prefill.
        let decode_learns = leg.choice.knobs.local_prefill_max_tokens > 0;
        let decode = DecodeLeg {
            body: edit,
            legs: Some(leg.legs),
            takes_kv: kv.is_some(),
            kv,
            prefill: None,
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
        self.count_failure(PrefillFailure::Timeout, BEFORE_RESPONSE, effects);
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
        leg: Prefilling,
        failure: PrefillFailure,
        body: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&leg.attempt, scene);
        if !failure.is_retriable() {
            return self.prefill_refused(leg, failure, body, scene, effects);
        }
        let pod = leg.choice.prefill_pod();
        let name = pod.map_or("", |pod| pod.name.as_str());
        let detail = match failure {
            PrefillFailure::Status(status) => format!("prefill pod {name} answered {status}"),
            _ => format!("prefill pod {name} cannot be reached"),
        };
        self.try_again(&leg.choice, leg.attempt, (failure, detail), scene, effects)
    }

    /// Gives the charges back and has the body read again for another pair.
    pub(super) fn try_again(
        &self,
        choice: &Choice,
        mut attempt: Attempt,
        failed: (PrefillFailure, String),
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::release(choice, scene);
        self.count_failure(failed.0, BEFORE_RESPONSE, effects);
        attempt
            .tried
            .extend(choice.prefill_pod().map(|pod| pod.key));
        attempt.failure = Some(failed);
        effects.push(Effect::ReadBody);
        State::Rereading(attempt)
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
        self.count_failure(failure, BEFORE_RESPONSE, effects);
        self.tell_failure(failure, body, &leg.choice, scene, effects)
    }

    /// The client's answer to a prefill leg that failed for good: the engine's own where it gave
    /// one.
    pub(super) fn tell_failure(
        &self,
        failure: PrefillFailure,
        body: &[u8],
        choice: &Choice,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if let PrefillFailure::Status(status @ 400..=599) = failure {
            let reply = prefill_passthrough(status, body, &self.request_id);
            return self.answer(reply, "pd_prefill_failure", scene, effects);
        }
        let pod = choice.prefill_pod().map_or("", |pod| pod.name.as_str());
        let detail = match failure {
            PrefillFailure::Status(status) => format!("prefill pod {pod} answered {status}"),
            PrefillFailure::Timeout => format!("prefill pod {pod} did not answer in time"),
            PrefillFailure::BadResponse => {
                format!("the answer of prefill pod {pod} is no JSON object")
            }
            PrefillFailure::Transport | PrefillFailure::Setup => {
                format!("prefill pod {pod} cannot be reached")
            }
        };
        self.fail(&Fault::Prefill { failure, detail }, scene, effects)
    }

    /// The prompt is computed: what that teaches, and that its tokens no longer wait.
    pub(super) fn prefill_succeeded(
        &self,
        choice: &Choice,
        call: &mut PrefillCall,
        body: &[u8],
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let estimates = &mut scene.worker.estimates;
        if estimates.are_wanted()
            && let Some(tokens) = prompt_tokens(body)
        {
            let (fleet, bytes) = (&choice.fleet, call.learns_from);
            estimates.learn(scene.store, fleet.slot, &fleet.name, bytes, tokens);
        }
        scene.worker.ledger.prefill_done(choice.charge);
        if let Some(chain) = &mut call.chain {
            learn(choice, choice.prefill_pod(), chain, scene);
        }
        effects.push(Effect::Count(
            Count::new(Meter::PrefillSuccess, self.model.clone())
                .word("status", "pd-prefill-request-success")
                .code(200),
        ));
    }

    /// A leg that was a retry no longer counts against the retry budget.
    pub(super) fn leave_retry(attempt: &Attempt, scene: &mut Scene<'_>) {
        if attempt.failure.is_some() {
            scene.worker.retrying = scene.worker.retrying.saturating_sub(1);
        }
    }

    /// `stage` is what the client had of the answer.
    pub(super) fn count_failure(
        &self,
        failure: PrefillFailure,
        stage: &'static str,
        effects: &mut Vec<Effect>,
    ) {
        let code = match failure {
            PrefillFailure::Status(status) => status,
            PrefillFailure::Timeout => 504,
            PrefillFailure::Setup => 503,
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
                .word("stage", stage),
        ));
    }

    /// The proxy answered a request that waits for its prefill pod: its own patience was shorter
    /// than the settings allow the pod.
    pub(super) fn proxy_gave_up(
        &self,
        pod: Option<&FleetPod>,
        proxy_details: Option<&str>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        Self::warn_of_the_proxy(proxy_details, effects);
        let name = pod.map_or("", |pod| pod.name.as_str());
        let fault = Fault::Prefill {
            failure: PrefillFailure::Timeout,
            detail: format!("prefill pod {name} did not answer in the time Envoy allows it"),
        };
        self.rewrite(&fault, scene, effects);
    }

    /// Says what to change when the proxy ends a wait.
    pub(super) fn warn_of_the_proxy(proxy_details: Option<&str>, effects: &mut Vec<Effect>) {
        effects.push(Effect::Warn(format!(
            "Envoy did not let it wait ({}): give the route that waiting requests take an \
             idle_timeout above snapshotWait and prefillRequestTimeout, with what \
             prefillTimeoutPerKiloToken adds to it, the latter once more for every retry",
            proxy_details.unwrap_or_default()
        )));
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
