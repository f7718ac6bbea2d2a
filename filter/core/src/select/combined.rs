//! Combined pods: standard pods whose profile takes overflow.

use super::explain::Scored;
use super::gate::{self, Found};
use super::problem::{self, Problem};
use super::{Query, solve};
use crate::score::overflow;
use pd_wire::topology::Role;

/// Why no combined pod can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// The model has none for this request.
    None,
    /// All are full.
    Full,
}

/// The combined pod with the fewest requests, and the scores.
///
/// # Errors
/// [`Absent`] when there is none.
pub(super) fn least_loaded(query: &Query<'_>) -> Result<(u16, Vec<Scored>), Absent> {
    let (pods, found) = candidates(query);
    let scored: Vec<Scored> = pods
        .into_iter()
        .map(|pod| Scored {
            pod,
            score: problem::requests(query, pod),
        })
        .collect();
    let absent = if found.fitting {
        Absent::Full
    } else {
        Absent::None
    };
    solve::lowest(query, &scored)
        .map(|pod| (pod, scored))
        .ok_or(absent)
}

/// The idlest combined pod, when one is idle while a candidate of the pairs is congested.
pub(super) fn under_load(query: &Query<'_>, problem: &Problem) -> Option<(u16, Vec<Scored>)> {
    let (pods, _) = candidates(query);
    let scored: Vec<Scored> = pods
        .into_iter()
        .filter_map(|pod| {
            let score = problem::queue_s(query, pod).filter(|queue| overflow::is_idle(*queue))?;
            Some(Scored { pod, score })
        })
        .collect();
    let idlest = solve::lowest(query, &scored)?;
    let prefill = problem.prefill.iter().map(|candidate| candidate.pod);
    let mut pairs = prefill.chain(problem.decode.iter().map(|candidate| candidate.pod));
    let congested = |pod| problem::queue_s(query, pod).is_some_and(overflow::is_congested);
    pairs.any(congested).then_some((idlest, scored))
}

fn candidates(query: &Query<'_>) -> (Vec<u16>, Found) {
    let mut found = Found::default();
    let combined = |pod: &u16| gate::profile(query, *pod).is_some_and(|profile| profile.combined);
    let pods = gate::with_role(query, Role::Standard)
        .filter(combined)
        .filter(|pod| found.admits(query, *pod, gate::has_decode_room))
        .collect();
    (pods, found)
}
