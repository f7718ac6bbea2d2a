//! Telling pods to drop a request that nobody waits for (`/abort_request`).
//!
//! An abort outlives its client's stream. Pods are told one after another; after the last of a
//! round that is not the final one, the next round follows by a delay, since a pod may not have
//! known the request at the first. What the request charged is given back at the end.

use super::state::{Choice, State};
use super::timers::Awaited;
use super::{Call, Effect, Event, Flow};
use crate::ledger::ChargeId;
use crate::meters::{Count, Meter};
use crate::reply::PrefillFailure;
use crate::worker::Scene;
use std::collections::VecDeque;
use std::rc::Rc;

/// Where engines take aborts.
const PATH: &str = "/abort_request";
/// How much later than our own deadline the host may give up on a call, in ms.
const HOST_GRACE_MS: u64 = 1000;

/// Why a request is aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// Its prefill leg failed while the decode leg was out.
    Prefill(PrefillFailure),
    /// Its decode leg reached a limit.
    Watchdog(Awaited),
    /// Its decode leg failed while the prefill leg was out.
    Decode,
    /// The client left.
    ClientGone,
}

/// What to abort.
#[derive(Debug)]
pub(super) struct Order {
    /// Name of the request at its engines; `None` when it has none.
    pub(super) rid: Option<Rc<str>>,
    /// `ip:port` of the pods to tell, always of the snapshot.
    pub(super) pods: Vec<String>,
    pub(super) reason: Reason,
    /// Tell them again after the delay.
    pub(super) twice: bool,
    /// What is given back when they were told.
    pub(super) charge: Option<ChargeId>,
}

/// Pods are being told.
#[derive(Debug)]
pub(super) struct Aborting {
    rid: Rc<str>,
    reason: Reason,
    charge: Option<ChargeId>,
    /// Pods still to be told in this round, the one that is being told first.
    left: VecDeque<String>,
    /// Pods of the next round.
    again: VecDeque<String>,
    timeout_ms: u64,
    delay_ms: u64,
    /// A call is out; else the next round is awaited.
    calling: bool,
    pub(super) deadline: u64,
}

// === impl Reason ===

impl Reason {
    /// Value of the `prefill_failure_class` label.
    fn label(self) -> &'static str {
        match self {
            Self::Prefill(failure) => failure.class(),
            Self::Watchdog(Awaited::Start | Awaited::End) => "watchdog_first_response",
            Self::Watchdog(Awaited::Next) => "watchdog_stream_idle",
            Self::Decode => "decode_failure",
            Self::ClientGone => "canceled",
        }
    }
}

// === impl Flow ===

impl Flow {
    /// Has pods drop the request of `choice`, or says why that cannot be. The client's ending is
    /// the caller's to count.
    pub(super) fn abort(
        &self,
        choice: &Choice,
        order: Order,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let knobs = &choice.knobs;
        let skipped = if order.rid.is_none() {
            Some("skipped_no_rid")
        } else if order.pods.is_empty() {
            Some("skipped_no_target")
        } else if knobs.decode_abort_timeout_ms == 0 {
            Some("skipped_disabled")
        } else if !Self::orphan_allowed(scene) {
            Some("skipped_limit")
        } else {
            None
        };
        let (Some(rid), None) = (order.rid, skipped) else {
            if order.charge.is_some() {
                Self::release(choice, scene);
            }
            effects.push(self.count_abort(order.reason, skipped.unwrap_or("skipped_no_rid")));
            return State::Ended;
        };
        scene.worker.orphans = scene.worker.orphans.saturating_add(1);
        let delay_ms = knobs.decode_abort_retry_delay_ms;
        let left = VecDeque::from(order.pods);
        let aborting = Aborting {
            rid,
            reason: order.reason,
            charge: order.charge,
            again: if order.twice && delay_ms > 0 {
                left.clone()
            } else {
                VecDeque::new()
            },
            left,
            timeout_ms: knobs.decode_abort_timeout_ms,
            delay_ms,
            calling: false,
            deadline: scene.now_ms,
        };
        self.tell_next(aborting, scene, effects)
    }

    /// Pods are being told.
    pub(super) fn aborting(
        &self,
        mut leg: Aborting,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let is_due = scene.now_ms >= leg.deadline;
        let result = match event {
            Event::CallReply { status: 200, .. } if leg.calling => "ok",
            Event::CallReply { .. } | Event::CallFailed | Event::CallLost(_) if leg.calling => {
                "error"
            }
            Event::Due if is_due && leg.calling => "error",
            Event::Due if is_due => return self.tell_next(leg, scene, effects),
            _ => return State::Aborting(leg),
        };
        effects.push(self.count_abort(leg.reason, result));
        leg.calling = false;
        leg.left.pop_front();
        if leg.left.is_empty() && !leg.again.is_empty() {
            leg.left = std::mem::take(&mut leg.again);
            leg.deadline = scene.now_ms.saturating_add(leg.delay_ms);
            return State::Aborting(leg);
        }
        self.tell_next(leg, scene, effects)
    }

    /// Tells the next pod, or ends.
    fn tell_next(
        &self,
        mut leg: Aborting,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Some(pod) = leg.left.front() else {
            if let Some(charge) = leg.charge {
                scene.worker.ledger.release(charge);
            }
            scene.worker.orphans = scene.worker.orphans.saturating_sub(1);
            return State::Ended;
        };
        let id = scene.worker.ids.request_id();
        effects.push(Effect::Call(Call {
            method: "POST",
            address: pod.clone(),
            path: PATH.to_owned(),
            headers: self.leg_headers(&id),
            body: serde_json::json!({"rid": &*leg.rid})
                .to_string()
                .into_bytes(),
            timeout_ms: leg.timeout_ms.saturating_add(HOST_GRACE_MS),
        }));
        leg.calling = true;
        leg.deadline = scene.now_ms.saturating_add(leg.timeout_ms);
        State::Aborting(leg)
    }

    fn count_abort(&self, reason: Reason, result: &'static str) -> Effect {
        Effect::Count(
            Count::new(Meter::Abort, self.model.clone())
                .word("prefill_failure_class", reason.label())
                .word("result", result),
        )
    }
}
