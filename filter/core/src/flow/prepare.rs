//! Before any leg is sent: the prefill pod is asked where it is found, unless that is known. What
//! fails here may be tried with another pair, since no engine has seen the request.

use super::state::{Prepared, Preparing, State};
use super::{Call, Effect, Event, Flow, POLL_MS};
use crate::engine::trtllm::ContextWorker;
use crate::engine::trtllm::workers::{LOOK_UP_MS, LookedUp, MAX_INFO};
use crate::reply::PrefillFailure;
use crate::worker::Scene;
use std::rc::Rc;

/// Where a context worker tells of itself.
const PATH: &str = "/server_info";
/// How much later than our own deadline the host may give up on a call, in ms.
const HOST_GRACE_MS: u64 = 1000;

impl Flow {
    /// Sends the legs if it is known where the prefill pod is, else sees to that first.
    pub(super) fn prepare(
        &self,
        prepared: Prepared,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let now_ms = scene.now_ms;
        let workers = &mut scene.worker.context_workers;
        let pod = prepared.choice.prefill_pod();
        let (asks, deadline) = match pod.map(|pod| workers.look_up(pod, now_ms)) {
            Some(LookedUp::At(worker)) => {
                return self.send_together(prepared, Some(&worker), scene, effects);
            }
            Some(LookedUp::Failed(failure, detail)) => {
                return self.unprepared(prepared, (failure, detail), scene, effects);
            }
            Some(LookedUp::Ask) => {
                effects.push(Effect::Call(self.look_up_call(&prepared)));
                (true, now_ms.saturating_add(LOOK_UP_MS))
            }
            Some(LookedUp::Wait) | None => (false, now_ms.saturating_add(POLL_MS)),
        };
        State::Preparing(Preparing {
            prepared,
            asks,
            deadline,
        })
    }

    fn look_up_call(&self, prepared: &Prepared) -> Call {
        let mut headers = self.leg_headers(&self.request_id);
        headers.retain(|(name, _)| *name != "content-type");
        Call {
            method: "GET",
            address: prepared.call.address.clone(),
            path: PATH.to_owned(),
            headers,
            body: Vec::new(),
            timeout_ms: LOOK_UP_MS.saturating_add(HOST_GRACE_MS),
        }
    }

    /// A look-up is awaited, this request's own or another one's.
    pub(super) fn preparing(
        &self,
        leg: Preparing,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let is_due = scene.now_ms >= leg.deadline;
        match event {
            Event::Gone { .. } => {
                Self::unasked(&leg, scene);
                self.client_gone(scene, effects)
            }
            Event::ResponseHeaders { proxy_details, .. } => {
                Self::unasked(&leg, scene);
                let pod = leg.prepared.choice.prefill_pod();
                self.proxy_gave_up(pod, proxy_details, scene, effects);
                State::Ended
            }
            Event::Due if is_due && !leg.asks => self.prepare(leg.prepared, scene, effects),
            Event::CallReply { .. } | Event::CallFailed | Event::CallLost(_) if leg.asks => {
                self.looked_up(leg, event, scene, effects)
            }
            Event::Due if is_due => self.looked_up(leg, event, scene, effects),
            _ => State::Preparing(leg),
        }
    }

    /// Nobody waits for the look-up any more.
    fn unasked(leg: &Preparing, scene: &mut Scene<'_>) {
        if let (true, Some(pod)) = (leg.asks, leg.prepared.choice.prefill_pod()) {
            scene.worker.context_workers.forget(pod.key);
        }
        Self::leave_retry(&leg.prepared.attempt, scene);
        Self::release(&leg.prepared.choice, scene);
    }

    /// The own look-up has ended, or its time has.
    fn looked_up(
        &self,
        leg: Preparing,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let choice = &leg.prepared.choice;
        self.judge_prefill(choice, leg.deadline, &event, scene, effects);
        let name = choice.prefill_pod().map_or("", |pod| pod.name.as_str());
        let result = match event {
            Event::CallReply { status: 200, body } if body.len() <= MAX_INFO => {
                let worker = ContextWorker::read(body).map(Rc::new);
                worker.map_err(|why| {
                    let detail = format!("prefill pod {name} cannot be used: {why}");
                    (PrefillFailure::Setup, detail)
                })
            }
            Event::CallReply { status, .. } => {
                let detail = format!("prefill pod {name} answered {status} to GET {PATH}");
                Err((PrefillFailure::Setup, detail))
            }
            Event::Due => {
                let detail =
                    format!("prefill pod {name} did not answer GET {PATH} within {LOOK_UP_MS} ms");
                Err((PrefillFailure::Timeout, detail))
            }
            _ => {
                let detail = format!("prefill pod {name} cannot be reached");
                Err((PrefillFailure::Transport, detail))
            }
        };
        let workers = &mut scene.worker.context_workers;
        if let Some(pod) = choice.prefill_pod() {
            match &result {
                Ok(worker) => workers.found(pod, Rc::clone(worker), scene.now_ms),
                Err(why) => workers.failed(pod, why.clone(), scene.now_ms),
            }
        }
        match result {
            Ok(worker) => self.send_together(leg.prepared, Some(&worker), scene, effects),
            Err(why) => self.unprepared(leg.prepared, why, scene, effects),
        }
    }

    /// The prefill pod cannot be found: another pair may be tried.
    fn unprepared(
        &self,
        prepared: Prepared,
        why: (PrefillFailure, String),
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        Self::leave_retry(&prepared.attempt, scene);
        self.try_again(&prepared.choice, prepared.attempt, why, scene, effects)
    }
}
