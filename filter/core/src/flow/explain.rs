//! How a request would be served now, without serving it.
//!
//! The same reading, the same settings and the same choice as those of a real request; nothing is
//! charged, counted or learnt.

use super::Head;
use super::plan::{Circumstances, Plan, pods};
use crate::eject::Rules;
use crate::fleet::ModelFleet;
use crate::ledger::Pick;
use crate::reply::Fault;
use crate::request::scan;
use crate::select::{Decision, Scored, Target};
use crate::worker::Scene;
use pd_wire::control::{Explained, ExplainedTarget, ScoredPod};
use pd_wire::knobs::{Choice as _, excerpt};

/// Explains the choice of pods for a request.
///
/// # Errors
/// What the client would get in its place.
pub fn explain(head: &Head, body: &[u8], scene: &mut Scene<'_>) -> Result<Explained, Fault> {
    scene.worker.fleet.refresh(scene.store);
    if !scene.worker.fleet.ready() {
        return Err(Fault::NoSnapshot);
    }
    let scan = scan(head.endpoint, body)?;
    let fleet = scene.worker.find_model(&scan.model, scene.store);
    let fleet = fleet.ok_or_else(|| Fault::Model(excerpt(&scan.model)))?;
    let plan = Plan::new(body, &scan, fleet, head, scene)?;
    let totals = scene.worker.ledger.totals(scene.store, plan.fleet.slot);
    let loads = totals.aligned(&plan.fleet.pods);
    let tie = scene.worker.ids.word();
    let rules = Rules::from(&*plan.knobs);
    let ejected = scene.worker.eject.view(&plan.fleet, &rules, scene.now_ms);
    let banded = plan.band(scene.now_ms);
    let given = Circumstances {
        loads: &loads,
        excluded_rolesets: &[],
        banded_roleset: banded.and_then(|ask| scene.worker.serve.roleset_for(&ask)),
        ejected: ejected.as_ref(),
        may_try: false,
        tie,
        now_ms: scene.now_ms,
    };
    let (decision, _) = plan
        .decide(&given, usize::MAX)
        .map_err(|refusal| plan.fault(&refusal))?;
    let pick = plan.pick(&decision);
    let pick = pick.map_err(|refusal| plan.fault(&refusal))?;
    Ok(told(&plan, &decision, &pick))
}

fn told(plan: &Plan, decision: &Decision, pick: &Pick) -> Explained {
    let facts = &decision.explanation;
    let config = plan.fleet.config.and_then(|at| {
        let at = usize::try_from(at).ok()?;
        plan.fleet.configs.get(at)
    });
    let profile = config.and_then(|config| config.named_profile(plan.pod_profile.as_deref()));
    Explained {
        model: plan.fleet.name.to_string(),
        strategy: plan.strategy.name().to_owned(),
        strategy_source: plan.source.name().to_owned(),
        profile: profile.map(|(name, _)| name.to_owned()),
        requests_per_second: plan.requests_per_second,
        prompt_tokens: facts.prompt_tokens,
        reason: facts.reason.name().to_owned(),
        target: target(&plan.fleet, &decision.target),
        match_percent: facts.match_percent,
        prefill_imbalance: facts.prefill_imbalance,
        decode_imbalance: facts.decode_imbalance.map(|check| check.name().to_owned()),
        skipped: facts.skipped,
        ineligible: facts.ineligible,
        prefill: scores(plan, &facts.prefill),
        decode: scores(plan, &facts.decode),
        prefill_tokens: pick.prefill.map_or(0, |charge| charge.tokens),
        decode_tokens: pick.decode.map_or(0, |charge| charge.tokens),
    }
}

fn target(fleet: &ModelFleet, target: &Target) -> ExplainedTarget {
    let (prefill, decode) = pods(target);
    let (kind, roleset) = match target {
        Target::Pair(pair) => ("pair", fleet.rolesets.get(usize::from(pair.roleset))),
        Target::Combined(_) => ("combined", None),
        Target::OneLeg(_) => ("one-leg", None),
    };
    ExplainedTarget {
        kind: kind.to_owned(),
        prefill: prefill.map(|pod| name(fleet, pod)),
        decode: name(fleet, decode),
        roleset: roleset.map(|set| format!("{}/{}", set.namespace, set.name)),
    }
}

fn scores(plan: &Plan, scored: &[Scored]) -> Vec<ScoredPod> {
    let of = |scored: &Scored| ScoredPod {
        pod: name(&plan.fleet, scored.pod),
        score: scored.score,
        match_percent: plan.match_percent.get(usize::from(scored.pod)).copied(),
    };
    scored.iter().map(of).collect()
}

fn name(fleet: &ModelFleet, pod: u16) -> String {
    let pod = fleet.pod(pod);
    pod.map_or_else(String::new, |pod| format!("{}/{}", pod.namespace, pod.name))
}
