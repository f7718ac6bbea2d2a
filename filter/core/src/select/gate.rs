//! Which rolesets may serve the request at all.

use super::problem::{self, DecodeCandidate, PrefillCandidate, Problem};
use super::{Query, Refusal};
use pd_wire::topology::Role;

/// Candidates of every complete roleset.
///
/// # Errors
/// [`Refusal`] when no roleset is left.
pub(super) fn pairs(query: &Query<'_>) -> Result<Problem, Refusal> {
    let mut problem = Problem::default();
    for (roleset, pods) in (0_u16..).zip(&query.fleet.rolesets) {
        if query.excluded_rolesets.contains(&roleset) {
            continue;
        }
        let (prefill, decode) = (problem.prefill.len(), problem.decode.len());
        for &pod in pods.prefill.iter().filter(|pod| usable(query, **pod)) {
            let load = problem::prefill_load(query, pod);
            problem
                .prefill
                .push(PrefillCandidate { pod, roleset, load });
        }
        for &pod in pods.decode.iter().filter(|pod| usable(query, **pod)) {
            problem.decode.push(DecodeCandidate {
                pod,
                roleset,
                load: problem::decode_load(query, pod),
                drain_rate: problem::sample(query, pod)
                    .and_then(|sample| problem::reported(sample.drain_rate)),
            });
        }
        if problem.prefill.len() == prefill || problem.decode.len() == decode {
            problem.prefill.truncate(prefill);
            problem.decode.truncate(decode);
        }
    }
    if problem.prefill.is_empty() {
        Err(no_pair(query))
    } else {
        Ok(problem)
    }
}

/// The pod may be chosen for this request.
pub(super) fn usable(query: &Query<'_>, pod: u16) -> bool {
    query
        .fleet
        .pods
        .get(usize::from(pod))
        .is_some_and(|pod| pod.usable)
        && (query.allowed)(pod)
}

/// Why no roleset is left.
fn no_pair(query: &Query<'_>) -> Refusal {
    if !query.excluded_rolesets.is_empty() {
        return Refusal::Exhausted;
    }
    let count = |role: Role| {
        let pods = (0_u16..).zip(&query.fleet.pods);
        let count = pods
            .filter(|(pod, facts)| facts.role == role && usable(query, *pod))
            .count();
        u32::try_from(count).unwrap_or(u32::MAX)
    };
    match (count(Role::Prefill), count(Role::Decode)) {
        (0, 0) => Refusal::NoPods,
        (0, decode) => Refusal::NoPrefill { decode },
        (prefill, 0) => Refusal::NoDecode { prefill },
        (prefill, decode) => Refusal::NoPair { prefill, decode },
    }
}
