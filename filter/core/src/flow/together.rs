//! Legs that are out at the same time: the client's own request is at its pod while the prefill
//! call is out.
//!
//! The client hears of a failed prefill by its own status as long as nothing of the answer has
//! reached it, else by a cut. What is left of the work when the client's request is over is
//! aborted where engines take aborts, else awaited.

use super::abort::{Order, Reason};
use super::decode::DecodeLeg;
use super::prefill::BEFORE_RESPONSE;
use super::state::{Decoding, Orphan, Prepared, State};
use super::{Effect, Event, Flow};
use crate::engine::HandOver;
use crate::engine::trtllm::ContextWorker;
use crate::fleet::FleetPod;
use crate::meters::{Count, Meter};
use crate::reply::PrefillFailure;
use crate::worker::Scene;

/// What of a request is still at work when its client's part is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing but the reply of a prefill leg, which is about to come.
    Reply,
    /// The prefill leg, if it is out.
    Prefill(Reason),
    /// The decode leg, and the prefill leg if it is out.
    Both(Reason),
}

impl Flow {
    /// Sends both legs. The call goes first: when it cannot leave, neither does the request.
    pub(super) fn send_together(
        &self,
        mut prepared: Prepared,
        looked_up: Option<&ContextWorker>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&prepared.attempt, scene);
        let members = prepared.legs.decode_members(looked_up);
        let call = prepared.prefill_call(scene.now_ms);
        let decode_learns = prepared.choice.knobs.local_prefill_max_tokens > 0;
        let leg = DecodeLeg {
            body: prepared.lead.edit(&members, None),
            legs: Some(prepared.legs),
            takes_kv: true,
            kv: None,
            chain: call.chain.as_ref().filter(|_| decode_learns).cloned(),
            prefill: Some(call),
            prefilled: false,
        };
        effects.push(Effect::Call(prepared.call));
        self.send_decode(prepared.choice, leg, scene, effects)
    }

    /// The prefill call has ended, or its time has, while the request is at its pod.
    pub(super) fn prefill_verdict(
        &self,
        mut leg: Decoding,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let (Some(mut call), Some(legs)) = (leg.prefill.take(), &leg.legs) else {
            return State::Decoding(leg);
        };
        let (failure, body) = match event {
            Event::CallReply { status: 200, body } => {
                let answer = legs.hand_over(body, leg.choice.prefill_pod());
                self.judge_answer(&leg.choice, &answer, scene, effects);
                leg.watch.prefilled(scene.now_ms);
                if answer == HandOver::NotAnObject {
                    // Nothing of it is needed: the engines have the KV between them.
                    scene.worker.ledger.prefill_done(leg.choice.charge);
                    self.count_failure(PrefillFailure::BadResponse, leg.stage(), effects);
                } else {
                    self.prefill_succeeded(&leg.choice, &mut call, body, scene, effects);
                }
                return State::Decoding(leg);
            }
            Event::CallReply { status, body } => (PrefillFailure::Status(status), body),
            Event::CallFailed | Event::CallLost(_) => (PrefillFailure::Transport, &[][..]),
            _ => (PrefillFailure::Timeout, &[][..]),
        };
        self.judge_together(&leg.choice, &event, scene, effects);
        self.count_failure(failure, leg.stage(), effects);
        if !matches!(failure, PrefillFailure::Status(400..=499)) {
            effects.push(Effect::Count(Count::new(
                Meter::PairFailure,
                self.model.clone(),
            )));
        }
        if leg.started() {
            effects.push(Effect::Cut);
            self.ended("pd_prefill_failure", 502, scene, effects);
        } else {
            self.tell_failure(failure, body, &leg.choice, scene, effects);
        }
        if failure == PrefillFailure::Timeout {
            leg.prefill = Some(call);
        }
        self.part(leg, Work::Both(Reason::Prefill(failure)), scene, effects)
    }

    /// The client's request is over: has what is left of the work ended, and the charges given
    /// back with it.
    pub(super) fn part(
        &self,
        leg: Decoding,
        work: Work,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let choice = &leg.choice;
        let address = |pod: &FleetPod| pod.address.clone();
        let prefill = choice.prefill_pod().filter(|_| leg.prefill.is_some());
        let (reason, decode) = match work {
            Work::Reply => (None, None),
            Work::Prefill(reason) => (Some(reason), None),
            Work::Both(reason) => (Some(reason), choice.decode_pod()),
        };
        let pods: Vec<String> = decode.into_iter().chain(prefill).map(address).collect();
        let awaitable = leg.prefill.is_some() && choice.knobs.decode_abort_timeout_ms == 0;
        if let Some(reason) = reason
            && choice.prefill.is_some()
            && choice.engine().aborts()
            && !pods.is_empty()
            && !awaitable
        {
            let order = Order {
                rid: choice.rid.clone(),
                pods,
                reason,
                // An engine that has not answered may not know yet what it was sent a moment ago.
                twice: leg.prefill.is_some()
                    || (leg.status.is_none() && matches!(reason, Reason::Prefill(_))),
                charge: Some(choice.charge),
            };
            return self.abort(choice, order, scene, effects);
        }
        match (leg.prefill, leg.legs) {
            (Some(call), Some(legs)) => {
                let orphan = Orphan {
                    choice: leg.choice,
                    legs,
                    deadline: call.deadline,
                    // It fails when the other leg does.
                    judged: true,
                };
                self.outlive(orphan, scene)
            }
            _ => {
                Self::release(choice, scene);
                State::Ended
            }
        }
    }
}

// === impl Decoding ===

impl Decoding {
    /// The prefill leg is out for too long.
    pub(super) fn prefill_late(&self, now_ms: u64) -> bool {
        self.prefill
            .as_ref()
            .is_some_and(|call| now_ms >= call.deadline)
    }

    /// What the client had of the answer, as metrics say it.
    fn stage(&self) -> &'static str {
        if self.started() {
            "after_response"
        } else {
            BEFORE_RESPONSE
        }
    }
}
