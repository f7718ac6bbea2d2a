//! The single way out: charges given back once, one ending counted.

use super::state::{Choice, State};
use super::{Effect, Flow};
use crate::meters::{Count, Meter};
use crate::reply::{Fault, Reply};
use crate::worker::Scene;
use pd_wire::names;

impl Flow {
    /// Ends with a fault of ours; nothing is charged any more.
    pub(super) fn fail(
        &self,
        fault: &Fault,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let reply = fault.reply(Some(&self.request_id));
        self.answer(reply, fault.label(), scene, effects)
    }

    /// Ends with a local answer.
    pub(super) fn answer(
        &self,
        reply: Reply,
        label: &'static str,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let status = reply.status;
        effects.push(Effect::Reply(self.addressed(reply)));
        self.ended(label, status, scene, effects)
    }

    /// Ends with a fault of ours in place of the proxy's own answer.
    pub(super) fn rewrite(
        &self,
        fault: &Fault,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let reply = fault.reply(Some(&self.request_id));
        effects.push(Effect::Rewrite(self.addressed(reply)));
        self.ended(fault.label(), fault.status(), scene, effects)
    }

    /// With the id the client gave its request.
    fn addressed(&self, mut reply: Reply) -> Reply {
        if let Some(id) = &self.head.client_request_id {
            reply.headers.push((names::HEADER_REQUEST_ID, id.clone()));
        }
        reply
    }

    /// Ends because the client's stream is over and no work is left.
    pub(super) fn client_gone(&self, scene: &mut Scene<'_>, effects: &mut Vec<Effect>) -> State {
        self.ended("client_gone", 499, scene, effects)
    }

    /// Counts the client's ending; for the work see [`Flow::release`].
    pub(super) fn ended(
        &self,
        label: &'static str,
        status: u16,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        scene.worker.in_flight = scene.worker.in_flight.saturating_sub(1);
        let meter = if status < 400 {
            Meter::RequestSuccess
        } else {
            Meter::RequestFail
        };
        let count = Count::new(meter, self.model.clone())
            .word("status", label)
            .code(status);
        effects.push(Effect::Count(count));
        State::Ended
    }

    /// Gives back everything a choice has charged; once, whatever is called again.
    pub(super) fn release(choice: &Choice, scene: &mut Scene<'_>) {
        let knobs = &choice.knobs;
        let limited = knobs.max_prefill_per_pod > 0 || knobs.max_decode_per_pod > 0;
        let ledger = &mut scene.worker.ledger;
        // With limits, another VM may be about to turn a request away; and of a VM that falls idle,
        // no next charge would tell.
        if ledger.release(choice.charge) && (limited || ledger.live_charges() == 0) {
            ledger.publish(scene.store);
        }
    }
}

impl Fault {
    /// Value of the `status` label of the fail counter.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Body(_)
            | Self::NoBody
            | Self::Encoding(_)
            | Self::Path
            | Self::Strategy(_)
            | Self::Filter(_) => "bad_request",
            Self::Model(_) => "model_not_found",
            Self::NoSnapshot => "not_ready",
            Self::NoPod { .. } | Self::Policy(_) => "pd-filter-prefill-decode-pods-fail",
            Self::Capacity(_) => "at_capacity",
            Self::Rate { .. } => "rate_limited",
            Self::Prefill { .. } => "pd_prefill_failure",
            Self::DecodeUnreachable(_) | Self::DecodeHandOver => "pd_decode_failure",
            Self::DecodeTimeout { .. } => "pd_decode_watchdog",
            Self::Misconfigured => "gateway_misconfigured",
        }
    }
}
