//! Step 0: which pods may serve the request at all.
//!
//! A pod must be usable and allowed; with bucketing on, its length range must include the prompt;
//! and it must have room. A roleset takes part only with pods of both kinds.

use super::problem::{self, DecodeCandidate, PrefillCandidate, Problem};
use super::{Query, Settings};
use pd_wire::profile::Profile;
use pd_wire::topology::Role;

/// Why no roleset can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// No roleset is complete, or all were tried.
    NoRoleset,
    /// All complete rolesets are for other prompt lengths.
    Length,
    /// All rolesets that take the prompt's length are full.
    Capacity,
}

/// Candidates of all rolesets that can serve.
///
/// # Errors
/// [`Shortage`] when there is none.
pub(super) fn pairs(query: &Query<'_>) -> Result<Problem, Shortage> {
    let mut problem = Problem::default();
    let mut shortage = Shortage::NoRoleset;
    for (roleset, pods) in (0_u16..).zip(query.fleet.rolesets.iter()) {
        if query.excluded_rolesets.contains(&roleset) {
            continue;
        }
        let (prefill, decode) = (problem.prefill.len(), problem.decode.len());
        let (mut left, mut right) = (Found::default(), Found::default());
        for &pod in &pods.prefill {
            if left.admits(query, pod, has_prefill_room) {
                problem
                    .prefill
                    .push(PrefillCandidate::of(query, pod, roleset));
            }
        }
        for &pod in &pods.decode {
            if right.admits(query, pod, has_decode_room) {
                problem
                    .decode
                    .push(DecodeCandidate::of(query, pod, roleset));
            }
        }
        if left.with_room && right.with_room {
            continue;
        }
        problem.prefill.truncate(prefill);
        problem.decode.truncate(decode);
        if left.fitting && right.fitting {
            shortage = Shortage::Capacity;
        } else if left.any && right.any && shortage == Shortage::NoRoleset {
            shortage = Shortage::Length;
        }
    }
    if !problem.prefill.is_empty() {
        return Ok(problem);
    }
    // What was tried already did fit the prompt.
    let tried = shortage == Shortage::Length && !query.excluded_rolesets.is_empty();
    Err(if tried { Shortage::NoRoleset } else { shortage })
}

/// How far the pods of one kind came.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Some may be used.
    pub(super) any: bool,
    /// Some of them take the prompt's length.
    pub(super) fitting: bool,
    /// Some of those have room.
    pub(super) with_room: bool,
}

impl Found {
    /// True when the pod passes all three tests.
    pub(super) fn admits(
        &mut self,
        query: &Query<'_>,
        pod: u16,
        has_room: impl Fn(&Query<'_>, u16) -> bool,
    ) -> bool {
        if !usable(query, pod) {
            return false;
        }
        self.any = true;
        if !fits(query, pod) {
            return false;
        }
        self.fitting = true;
        let room = has_room(query, pod);
        self.with_room |= room;
        room
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

/// The pod takes prompts of this length. A pod without a profile takes all.
fn fits(query: &Query<'_>, pod: u16) -> bool {
    !query.settings.bucketing
        || profile(query, pod).is_none_or(|profile| profile.takes(query.prompt_tokens))
}

/// The profile of the pod that the request's profile name selects.
pub(super) fn profile<'a>(query: &Query<'a>, pod: u16) -> Option<&'a Profile> {
    query.fleet.profile(pod, query.profile)
}

/// The prefill pod is below its capacity.
fn has_prefill_room(query: &Query<'_>, pod: u16) -> bool {
    let Settings {
        max_prefill_per_pod: max,
        ..
    } = *query.settings;
    max == 0 || problem::amounts(query, pod).prefill_requests < max
}

/// The decode or combined pod is below its capacity.
pub(super) fn has_decode_room(query: &Query<'_>, pod: u16) -> bool {
    let Settings {
        max_decode_per_pod: max,
        ..
    } = *query.settings;
    max == 0 || problem::requests(query, pod) < f64::from(max)
}

/// Pods with this role, by position.
pub(super) fn with_role(query: &Query<'_>, role: Role) -> impl Iterator<Item = u16> {
    let pods = (0_u16..).zip(query.fleet.pods.iter());
    pods.filter(move |(_, pod)| pod.role == role)
        .map(|(pod, _)| pod)
}

/// Usable pods with this role.
pub(super) fn count(query: &Query<'_>, role: Role) -> u32 {
    let pods = with_role(query, role)
        .filter(|pod| usable(query, *pod))
        .count();
    u32::try_from(pods).unwrap_or(u32::MAX)
}
