//! One pod for the whole request: what stands in for a pair, what cannot hand KV over, and the
//! strategies without phases.

use super::combined::{self, Absent};
use super::explain::{Reason, Scored};
use super::gate::{self, Found, Shortage};
use super::problem::{self, DecodeCandidate};
use super::tie;
use super::{Decision, Explanation, Query, Refusal, Strategy, Target, solve};
use crate::score::decode;
use crate::score::prefill::{self, Crowd};
use pd_wire::knobs::PrefillFallback;
use pd_wire::topology::Role;

/// Who serves when no pair can.
///
/// With bucketing off the same holds: a combined pod stands in when no roleset is complete and
/// when all pairs are full. Whether it may replace a *prefill pod that cannot serve* is
/// `prefillFallback`'s decision.
pub(super) fn instead_of_pair(query: &Query<'_>, shortage: Shortage) -> Result<Decision, Refusal> {
    let (prefill, decode) = (
        gate::count(query, Role::Prefill),
        gate::count(query, Role::Decode),
    );
    let tried = !query.excluded_rolesets.is_empty();
    let (reason, refusal) = match shortage {
        Shortage::Capacity => (Reason::Capacity, Refusal::AtCapacity),
        Shortage::Length => {
            let prompt_tokens = query.prompt_tokens;
            (Reason::Length, Refusal::OutsideBuckets { prompt_tokens })
        }
        Shortage::NoRoleset if tried => (Reason::Fallback, Refusal::Exhausted),
        Shortage::NoRoleset => match (prefill, decode) {
            (0, 0) => (Reason::NoPair, Refusal::NoPods),
            (0, decode) => (Reason::Fallback, Refusal::NoPrefill { decode }),
            (prefill, 0) => (Reason::NoPair, Refusal::NoDecode { prefill }),
            (prefill, decode) => (Reason::NoPair, Refusal::NoPair { prefill, decode }),
        },
    };
    let fallback = query.settings.prefill_fallback;
    if reason == Reason::Fallback && fallback == PrefillFallback::Strict {
        return Err(refusal);
    }
    let absent = match combined::least_loaded(query) {
        Ok((pod, scored)) => return Ok(decided(query, Target::Combined(pod), reason, scored)),
        Err(absent) => absent,
    };
    if shortage == Shortage::NoRoleset && fallback == PrefillFallback::Decode && decode > 0 {
        return on_decode_pod(query, Reason::Fallback);
    }
    Err(if absent == Absent::Full {
        Refusal::AtCapacity
    } else {
        refusal
    })
}

/// A request on a `pd` path whose KV cannot be handed over.
pub(super) fn without_hand_over(query: &Query<'_>) -> Result<Decision, Refusal> {
    match combined::least_loaded(query) {
        Ok((pod, scored)) => Ok(decided(
            query,
            Target::Combined(pod),
            Reason::OneLeg,
            scored,
        )),
        Err(absent) => on_decode_pod(query, Reason::OneLeg).map_err(|refusal| match absent {
            Absent::Full => Refusal::AtCapacity,
            Absent::None => refusal,
        }),
    }
}

/// A strategy without phases: standard pods, else decode pods, never a prefill pod.
pub(super) fn plain(query: &Query<'_>, strategy: Strategy) -> Result<Decision, Refusal> {
    let usable = |role| gate::with_role(query, role).filter(|pod| gate::usable(query, *pod));
    let mut pods: Vec<u16> = usable(Role::Standard).collect();
    if pods.is_empty() {
        pods = usable(Role::Decode).collect();
        let any = !pods.is_empty();
        pods.retain(|pod| gate::has_decode_room(query, *pod));
        if pods.is_empty() {
            return Err(if any {
                Refusal::AtCapacity
            } else {
                Refusal::NoPods
            });
        }
    }
    let (reason, scored) = match strategy {
        Strategy::Affinity { pod: Some(pod), .. } if pods.contains(&pod) => {
            (Reason::Affinity, vec![Scored { pod, score: 0.0 }])
        }
        Strategy::Affinity { key: Some(key), .. } => {
            // Rendezvous hashing: when a pod goes, only its own sessions move.
            let draw = |pod: &u16| {
                let facts = query.fleet.pod(*pod);
                (facts.map(|facts| tie::draw(key, facts.key)), *pod)
            };
            let home = pods.into_iter().min_by_key(draw);
            (
                Reason::Affinity,
                home.map(|pod| Scored { pod, score: 0.0 })
                    .into_iter()
                    .collect(),
            )
        }
        Strategy::Random => (Reason::Strategy, score_all(&pods, |_| 0.0)),
        Strategy::PrefixCache => (Reason::Strategy, by_prefix(query, &pods)),
        Strategy::LeastRequest | Strategy::Affinity { .. } => (
            Reason::Strategy,
            score_all(&pods, |pod| problem::requests(query, pod)),
        ),
    };
    let pod = solve::lowest(query, &scored).ok_or(Refusal::NoPods)?;
    let mut decision = decided(query, Target::OneLeg(pod), reason, scored);
    if strategy == Strategy::PrefixCache {
        decision.explanation.match_percent =
            problem::match_percent(query, prefill::Policy::PrefixCache, pod);
    }
    Ok(decision)
}

fn score_all(pods: &[u16], score: impl Fn(u16) -> f64) -> Vec<Scored> {
    pods.iter()
        .map(|&pod| Scored {
            pod,
            score: score(pod),
        })
        .collect()
}

/// Prefix match first, requests second, far busier pods left out: the formula of step 3.
fn by_prefix(query: &Query<'_>, pods: &[u16]) -> Vec<Scored> {
    let requests = score_all(pods, |pod| problem::requests(query, pod));
    let crowd = Crowd::measure(
        requests.iter().map(|pod| pod.score),
        query.settings.std_factor,
    );
    let batch = problem::prefill_batch(query, crowd.max_requests());
    let weights = problem::prefill_weights(query.settings);
    let inside = requests
        .into_iter()
        .filter(|pod| !crowd.is_outlier(pod.score));
    inside
        .map(
            |Scored {
                 pod,
                 score: requests,
             }| {
                let policy = prefill::Policy::PrefixCache;
                let match_percent =
                    f64::from(problem::match_percent(query, policy, pod).unwrap_or(0));
                let load = prefill::Load {
                    requests,
                    match_percent,
                    ..prefill::Load::default()
                };
                Scored {
                    pod,
                    score: prefill::score(policy, &load, &batch, &weights),
                }
            },
        )
        .collect()
}

/// The best decode pod by the decode policy.
fn on_decode_pod(query: &Query<'_>, reason: Reason) -> Result<Decision, Refusal> {
    let mut found = Found::default();
    // One group for all: rolesets do not matter for a single leg.
    let candidates: Vec<DecodeCandidate> = gate::with_role(query, Role::Decode)
        .filter(|pod| found.admits(query, *pod, gate::has_decode_room))
        .map(|pod| DecodeCandidate::of(query, pod, 0))
        .collect();
    if candidates.is_empty() {
        return Err(if found.fitting {
            Refusal::AtCapacity
        } else if found.any {
            Refusal::OutsideBuckets {
                prompt_tokens: query.prompt_tokens,
            }
        } else {
            Refusal::NoPods
        });
    }
    let mut explanation = explained(query, reason);
    let mean_rate = decode::mean_rate(candidates.iter().map(|candidate| &candidate.load));
    let side = solve::decode(query, &candidates, mean_rate, &mut explanation);
    let best = side.best.first().map(|best| best.scored.pod);
    let pod = best.ok_or(Refusal::NoScore {
        ineligible: explanation.ineligible,
    })?;
    explanation.decode = side.listed(query);
    Ok(Decision {
        target: Target::OneLeg(pod),
        explanation,
    })
}

fn explained(query: &Query<'_>, reason: Reason) -> Explanation {
    Explanation {
        reason,
        prompt_tokens: query.prompt_tokens,
        ..Explanation::default()
    }
}

/// A decision for one pod.
pub(super) fn decided(
    query: &Query<'_>,
    target: Target,
    reason: Reason,
    mut scored: Vec<Scored>,
) -> Decision {
    scored.truncate(query.listed);
    let explanation = Explanation {
        decode: scored,
        ..explained(query, reason)
    };
    Decision {
        target,
        explanation,
    }
}
