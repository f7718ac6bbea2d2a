//! Choosing with ejections in mind: a trial first, then those in service, then everybody.
//!
//! A trial is not left to chance: an idle pod need not be anybody's first choice, and as long as
//! it waits for its trial it counts as lost. So the first request that may, goes.

use super::{Subject, View};
use crate::select::{Decision, Query, Refusal, Target, select};

/// Chooses as [`select`] does, among those that `view` leaves. Also says whose trial the request
/// would be; `may_try` is false for requests that should not risk one.
///
/// # Errors
/// As [`select`] without any ejection: an ejection alone never turns a request away. Pods in
/// service that are full are an answer too.
pub fn choose(
    query: &Query<'_>,
    view: Option<&View>,
    may_try: bool,
) -> Result<(Decision, Vec<Subject>), Refusal> {
    let Some(view) = view else {
        return select(query).map(|decision| (decision, Vec::new()));
    };
    let in_service = |pod| (query.allowed)(pod) && view.allows(pod);
    let among = Query {
        allowed: &in_service,
        blocked_pairs: view.blocked_pairs(),
        ..*query
    };
    let trials = |decision: &Decision| match decision.target {
        Target::Pair(pair) => view.trials(Some(pair.prefill), pair.decode),
        Target::Combined(pod) | Target::OneLeg(pod) => view.trials(None, pod),
    };
    if may_try && let Some(due) = view.due_for(query.fleet, query.shape) {
        let favoured = |pod| in_service(pod) && due.favours(query.fleet, pod);
        let decision = select(&Query {
            allowed: &favoured,
            ..among
        });
        if let Ok(decision) = decision {
            let trials = trials(&decision);
            if !trials.is_empty() {
                return Ok((decision, trials));
            }
        }
    }
    let decision = match select(&among) {
        Err(refusal) if !refusal.at_capacity() => select(query),
        decision => decision,
    }?;
    let trials = trials(&decision);
    Ok((decision, trials))
}

#[cfg(test)]
mod tests;
