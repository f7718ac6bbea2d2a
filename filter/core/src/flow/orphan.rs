//! Prefill legs that nobody waits for, and the calls that have their KV freed. What is charged
//! stays charged until the work ends.

use super::state::{Choice, Decoding, Freeing, Orphan, State};
use super::{Call, Effect, Event, Flow};
use crate::engine::{HandOver, KvReference, Legs};
use crate::fleet::FleetPod;
use crate::ledger::ChargeId;
use crate::meters::{Count, Meter};
use crate::worker::Scene;

/// How long an orphan outlives its call's timeout, and a freeing call may take, in ms.
const ORPHAN_GRACE_MS: u64 = 5000;

impl Flow {
    /// This flow itself goes on as an orphan, if there is room.
    pub(super) fn outlive(&self, orphan: Orphan, scene: &mut Scene<'_>) -> State {
        match self.orphan(orphan, scene) {
            Some(orphan) => orphan.state,
            None => State::Ended,
        }
    }

    /// A flow that waits for the leg's end alone; `None` when there are too many, and then the
    /// charges are given back at once.
    pub(super) fn orphan(&self, mut leg: Orphan, scene: &mut Scene<'_>) -> Option<Self> {
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

    /// No decode engine reads the KV that was to be handed over, and the client's part is over: has
    /// it freed through `pod`, as an orphan. Only a pod of the same roleset is known to reach the
    /// prefill pod.
    pub(super) fn free(
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

    /// The call that frees an orphan's KV is out. Of vLLM its refusal is what was asked for.
    pub(super) fn freeing(
        &self,
        leg: Freeing,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match event {
            Event::CallReply { status, .. } => {
                // A refusal of the body, or the one token that was asked for. What was turned away
                // before its body was looked at has freed nothing.
                let result = match status {
                    200..=299 | 400 | 422 => "freed",
                    _ => "not_freed",
                };
                self.laid_to_rest(leg.charge, result, scene, effects)
            }
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
