//! From a complete body to the first leg: read, resolve, choose and charge in one step, send.

use super::decode::DecodeLeg;
use super::plan::{Circumstances, Plan, pods};
use super::state::{Choice, Prefilling, Prepared, State};
use super::{Attempt, BodyEdit, Call, Effect, Flow};
use crate::eject::{Rules, Subject};
use crate::engine::{Dispatch, Legs, Number};
use crate::fleet::{FleetPod, ModelFleet};
use crate::ledger::Amounts;
use crate::meters::{Count, Meter};
use crate::rate::{Admission, RateLimit};
use crate::reply::Fault;
use crate::request::{Scan, patch, scan};
use crate::select::{LISTED, Refusal};
use crate::worker::Scene;
use pd_wire::knobs::{Choice as _, Knobs, excerpt};
use pd_wire::names;
use std::rc::Rc;
use std::sync::Arc;

/// Most choices made because another request had the trial of the pods chosen.
const MAX_CHOICES: u32 = 4;
/// How much later than our own deadline the host may give up on a call, in ms.
const HOST_GRACE_MS: u64 = 1000;

impl Flow {
    /// Serves a complete body, or says why not.
    pub(super) fn arrive(
        &mut self,
        body: &[u8],
        attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if attempt.failure.is_some() {
            // Engines use the id as a key: an attempt never reuses one.
            self.request_id = scene.worker.ids.request_id();
        }
        if !scene.worker.fleet.ready() {
            scene.worker.fleet.refresh(scene.store);
        }
        if !scene.worker.fleet.ready() {
            return self.wait(attempt.since, scene, effects);
        }
        // Whatever stops another try, it is the failed prefill leg that the client hears of.
        let failed = attempt.fault();
        match self.serve(body, attempt, scene, effects) {
            Ok(state) => state,
            Err(fault) => self.fail(failed.as_ref().unwrap_or(&fault), scene, effects),
        }
    }

    /// Waits for the first snapshot, a bounded time.
    pub(super) fn wait(
        &self,
        since: u64,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        scene.worker.fleet.refresh(scene.store);
        if scene.worker.fleet.ready() {
            effects.push(Effect::ReadBody);
        } else if scene.now_ms >= since.saturating_add(scene.config.knobs.snapshot_wait_ms) {
            return self.fail(&Fault::NoSnapshot, scene, effects);
        }
        let look_at = scene.now_ms.saturating_add(super::POLL_MS);
        State::Awaiting { since, look_at }
    }

    fn serve(
        &mut self,
        body: &[u8],
        mut attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<State, Fault> {
        let scan = scan(self.head.endpoint, body)?;
        let fleet = scene.worker.find_model(&scan.model, scene.store);
        let fleet = fleet.ok_or_else(|| Fault::Model(excerpt(&scan.model)))?;
        self.model = Some(Rc::clone(&fleet.name));
        let mut plan = Plan::new(body, &scan, fleet, &self.head, scene)?;
        let turn = plan.recall_session(&self.head, &mut attempt, scene, effects);
        let admission = admit(&plan, &attempt, scene)?;
        let choice = self.choose(&plan, &attempt, scene).inspect_err(|_| {
            if let Some(admission) = admission {
                scene.worker.rate.give_back(admission);
            }
        })?;
        if let Some(turn) = turn.filter(|_| choice.prefill.is_some()) {
            plan.remember_session(turn, scene);
        }
        effects.push(Effect::Note(note(&choice)));
        if choice.prefill.is_none() {
            let leg = DecodeLeg {
                body: BodyEdit::Keep,
                legs: None,
                takes_kv: false,
                kv: None,
                prefill: None,
                prefilled: false,
                chain: plan.answer_chain(),
            };
            return Ok(self.send_decode(choice, leg, scene, effects));
        }
        self.send_pair(body, &scan, choice, plan, attempt, scene, effects)
    }

    /// Chooses pods and charges them, in one step. When they are on trial with another request,
    /// chooses again.
    fn choose(
        &self,
        plan: &Plan,
        attempt: &Attempt,
        scene: &mut Scene<'_>,
    ) -> Result<Choice, Fault> {
        let rules = Rules::from(&*plan.knobs);
        let banded = banded_roleset(plan, attempt, scene);
        for _ in 1..MAX_CHOICES {
            let (choice, trials) = self.choose_once(plan, attempt, &rules, banded, scene)?;
            let slot = plan.fleet.slot;
            let eject = &mut scene.worker.eject;
            if eject.admit(scene.store, slot, &trials, &rules, scene.now_ms) {
                return Ok(choice);
            }
            Self::release(&choice, scene);
        }
        Ok(self.choose_once(plan, attempt, &rules, banded, scene)?.0)
    }

    /// Chooses pods and charges them; also says whose trial that would be.
    fn choose_once(
        &self,
        plan: &Plan,
        attempt: &Attempt,
        rules: &Rules,
        banded_roleset: Option<u16>,
        scene: &mut Scene<'_>,
    ) -> Result<(Choice, Vec<Subject>), Fault> {
        let knobs = &plan.knobs;
        let excluded = excluded(attempt, &plan.fleet, knobs, scene);
        let tie = scene.worker.ids.word();
        let explained = self.head.explain && knobs.allow_explain;
        let listed = if explained { LISTED } else { 0 };
        let fleet = &plan.fleet;
        let now_ms = scene.now_ms;
        let ejected = scene.worker.eject.view(fleet, rules, now_ms);
        let mut loads: Vec<Amounts> = Vec::new();
        let charged = scene
            .worker
            .ledger
            .charge(scene.store, fleet.slot, now_ms, |totals| {
                totals.aligned_into(&fleet.pods, &mut loads);
                let given = Circumstances {
                    loads: &loads,
                    excluded_rolesets: &excluded,
                    banded_roleset,
                    ejected: ejected.as_ref(),
                    may_try: attempt.failure.is_none(),
                    tie,
                    now_ms,
                };
                let (decision, trials) = plan.decide(&given, listed)?;
                let pick = plan.pick(&decision)?;
                Ok((pick, (decision, trials)))
            });
        let charged = charged.map_err(|refusal: Refusal| plan.fault(&refusal))?;
        let (decision, trials) = charged.decision;
        let (prefill, decode) = pods(&decision.target);
        let choice = Choice {
            decision: explained.then(|| decision.explanation.render(fleet)),
            fleet: Rc::clone(fleet),
            prefill,
            decode,
            charge: charged.id,
            streams: plan.streams,
            rid: None,
            chosen_at_ms: now_ms,
            auto_profile: plan.auto_profile.clone(),
            strategy: plan.strategy,
            knobs: Arc::clone(knobs),
        };
        Ok((choice, trials))
    }

    /// Makes the legs of a chosen pair and sends those that can go.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of one arrival, used up here"
    )]
    fn send_pair(
        &self,
        body: &[u8],
        scan: &Scan,
        mut choice: Choice,
        plan: Plan,
        attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<State, Fault> {
        let knobs = &plan.knobs;
        let prepared = self.legs(&plan, &choice, scene).and_then(|legs| {
            let edits = legs.prefill_edits(self.head.endpoint, scan);
            let edits = edits.map_err(|error| plan.no_pod(error.to_string()))?;
            Ok((legs, patch::build(body, scan, &edits)))
        });
        let (legs, prefill_body) = prepared.inspect_err(|_| Self::release(&choice, scene))?;
        choice.rid = legs.rid().map(Rc::from);
        let per_kilo = knobs.prefill_timeout_per_kilo_token_ms;
        let growth = per_kilo.saturating_mul(plan.prompt_tokens) / 1000;
        let timeout_ms = knobs.prefill_request_timeout_ms.saturating_add(growth);
        let address = choice.prefill_pod().map(|pod| pod.address.clone());
        let ids_member = legs.ids_member(self.head.endpoint);
        let prepared = Prepared {
            lead: patch::Lead::of(body, scan).replacing(scan, ids_member),
            call: Call {
                method: "POST",
                address: address.unwrap_or_default(),
                path: self.head.path.clone(),
                headers: self.leg_headers(&self.request_id),
                body: prefill_body,
                timeout_ms: timeout_ms.saturating_add(HOST_GRACE_MS),
            },
            choice,
            legs,
            chain: plan.chain,
            learns_from: plan.learns_from,
            timeout_ms,
            attempt,
        };
        if prepared.attempt.failure.is_some() {
            scene.worker.retrying = scene.worker.retrying.saturating_add(1);
            effects.push(Effect::Count(Count::new(
                Meter::PrefillRetry,
                self.model.clone(),
            )));
        }
        Ok(match prepared.legs.dispatch() {
            Dispatch::Sequential => Self::send_prefill(prepared, scene, effects),
            Dispatch::Together => self.send_together(prepared, None, scene, effects),
            Dispatch::AfterLookUp => self.prepare(prepared, scene, effects),
        })
    }

    /// Sends the prefill leg alone.
    fn send_prefill(mut prepared: Prepared, scene: &Scene<'_>, effects: &mut Vec<Effect>) -> State {
        let call = prepared.prefill_call(scene.now_ms);
        effects.push(Effect::Call(prepared.call));
        State::Prefilling(Prefilling {
            choice: prepared.choice,
            legs: prepared.legs,
            lead: prepared.lead,
            call,
            attempt: prepared.attempt,
        })
    }

    /// The legs of this attempt with the chosen pair.
    fn legs(&self, plan: &Plan, choice: &Choice, scene: &mut Scene<'_>) -> Result<Legs, Fault> {
        let pod = choice
            .prefill_pod()
            .ok_or_else(|| plan.no_pod("the prefill pod left the snapshot".to_owned()))?;
        let draw = |number| match number {
            Number::Word => scene.worker.ids.word(),
            Number::DisaggId => {
                let machine = scene.config.knobs.trt_machine_id;
                scene.worker.disagg_id(scene.store, machine, scene.now_ms)
            }
        };
        Legs::new(&plan.engine, pod, &plan.knobs, &self.request_id, draw)
            .ok_or_else(|| plan.no_pod("pods of its engine are not paired".to_owned()))
    }

    /// Headers of a request of our own.
    pub(super) fn leg_headers(&self, request_id: &str) -> Vec<(&'static str, String)> {
        let mut headers = vec![
            ("content-type", "application/json".to_owned()),
            (names::HEADER_REQUEST_ID, request_id.to_owned()),
        ];
        headers.extend(self.head.forwarded.iter().cloned());
        headers
    }
}

/// The roleset that adaptive buckets prefer. Each request's length is noted once, however often
/// it is tried.
fn banded_roleset(plan: &Plan, attempt: &Attempt, scene: &mut Scene<'_>) -> Option<u16> {
    let ask = plan.band(scene.now_ms)?;
    if attempt.failure.is_none() {
        scene.worker.serve.record(&ask);
    }
    scene.worker.serve.roleset_for(&ask)
}

/// Counts a request whose profile limits them; another attempt is no other request.
fn admit(
    plan: &Plan,
    attempt: &Attempt,
    scene: &mut Scene<'_>,
) -> Result<Option<Admission>, Fault> {
    let per_second = plan.requests_per_second;
    if per_second == 0 || attempt.failure.is_some() {
        return Ok(None);
    }
    let limit = RateLimit {
        per_second,
        replicas: scene.worker.fleet.replicas(),
    };
    let counted = scene
        .worker
        .rate
        .admit(scene.store, plan.fleet.slot, limit, scene.now_ms);
    counted.map(Some).map_err(|refused| Fault::Rate {
        model: plan.fleet.name.to_string(),
        per_second,
        retry_after_s: refused.retry_after_s,
    })
}

/// Rolesets a retry may not use: those tried, or all of them when no further try is allowed.
fn excluded(attempt: &Attempt, fleet: &ModelFleet, knobs: &Knobs, scene: &Scene<'_>) -> Vec<u16> {
    if attempt.failure.is_none() {
        return Vec::new();
    }
    let tries = u64::try_from(attempt.tried.len()).unwrap_or(u64::MAX);
    let allowed =
        tries <= knobs.prefill_retries && scene.worker.retry_allowed(knobs.retry_budget_percent);
    let was_tried = |position: &u16| {
        fleet
            .pod(*position)
            .is_some_and(|pod| attempt.tried.contains(&pod.key))
    };
    (0u16..)
        .zip(fleet.rolesets.iter())
        .filter(|(_, set)| !allowed || set.prefill.iter().any(was_tried))
        .map(|(position, _)| position)
        .collect()
}

/// The facts of a choice for the access log.
fn note(choice: &Choice) -> String {
    fn name(pod: Option<&FleetPod>) -> &str {
        pod.map_or("-", |pod| pod.name.as_str())
    }
    [
        "strategy=",
        choice.strategy.name(),
        " prefill=",
        name(choice.prefill_pod()),
        " decode=",
        name(choice.decode_pod()),
    ]
    .concat()
}
