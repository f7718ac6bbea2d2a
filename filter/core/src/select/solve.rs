//! Steps 3 and 4: scores, and the best pod of each roleset.

use super::explain::Scored;
use super::problem::{self, DecodeCandidate, Problem};
use super::tie::{self, Level};
use super::{Explanation, Query};
use crate::score::prefill::Crowd;
use crate::score::{Largest, decode, prefill};

/// Best pod of each roleset on one side, and the divisor of that side's scores.
pub(super) struct Side {
    /// All scored pods, with their rolesets.
    pub(super) scored: Vec<Candidate>,
    /// Best pod per roleset, in the order of the rolesets.
    pub(super) best: Vec<Candidate>,
    /// Largest score, losers included.
    pub(super) largest: Largest,
}

/// A scored pod and its roleset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    /// The roleset.
    pub(super) roleset: u16,
    /// Pod and score.
    pub(super) scored: Scored,
}

impl Side {
    fn new(largest: Largest, capacity: usize) -> Self {
        Self {
            scored: Vec::with_capacity(capacity),
            best: Vec::new(),
            largest,
        }
    }

    /// Takes a pod whose score is a number, and counts one whose score is none.
    fn judge(
        &mut self,
        query: &Query<'_>,
        roleset: u16,
        scored: Scored,
        explanation: &mut Explanation,
    ) {
        if scored.score.is_finite() {
            self.take(query, roleset, scored);
        } else {
            explanation.ineligible = explanation.ineligible.saturating_add(1);
        }
    }

    /// Takes a pod; candidates of one roleset come one after the other.
    fn take(&mut self, query: &Query<'_>, roleset: u16, scored: Scored) {
        self.largest.take(scored.score);
        let candidate = Candidate { roleset, scored };
        self.scored.push(candidate);
        match self.best.last_mut().filter(|best| best.roleset == roleset) {
            None => self.best.push(candidate),
            Some(best) => {
                if beats(query, &scored, &best.scored) {
                    *best = candidate;
                }
            }
        }
    }

    /// The scores for the explanation.
    pub(super) fn listed(self, query: &Query<'_>) -> Vec<Scored> {
        self.scored
            .into_iter()
            .take(query.listed)
            .map(|candidate| candidate.scored)
            .collect()
    }
}

/// The pod with the lowest score.
pub(super) fn lowest(query: &Query<'_>, scored: &[Scored]) -> Option<u16> {
    let best = scored
        .iter()
        .reduce(|best, new| if beats(query, new, best) { new } else { best });
    best.map(|best| best.pod)
}

/// Lower score, or the tie.
pub(super) fn beats(query: &Query<'_>, new: &Scored, old: &Scored) -> bool {
    let tied = new.score == old.score && tie::wins(query, Level::Pod, new.pod, old.pod);
    new.score < old.score || tied
}

/// Step 3: outliers are skipped, the others scored.
pub(super) fn prefill(query: &Query<'_>, problem: &Problem, explanation: &mut Explanation) -> Side {
    let counts = problem
        .prefill
        .iter()
        .map(|candidate| candidate.load.requests);
    let crowd = Crowd::measure(counts, query.settings.std_factor);
    let batch = problem::prefill_batch(query, crowd.max_requests());
    let weights = problem::prefill_weights(query.settings);
    let policy = query.settings.prefill_policy;
    let mut side = Side::new(Largest::prefill(), problem.prefill.len());
    for candidate in &problem.prefill {
        if crowd.is_outlier(candidate.load.requests) {
            explanation.skipped = explanation.skipped.saturating_add(1);
            continue;
        }
        let score = prefill::score(policy, &candidate.load, &batch, &weights);
        let pod = candidate.pod;
        side.judge(query, candidate.roleset, Scored { pod, score }, explanation);
    }
    side
}

/// Step 4: all decode candidates are scored.
pub(super) fn decode(
    query: &Query<'_>,
    candidates: &[DecodeCandidate],
    mean_rate: f64,
    explanation: &mut Explanation,
) -> Side {
    let batch = decode::Batch::measure(
        candidates.iter().map(|candidate| &candidate.load),
        mean_rate,
    );
    let weights = problem::decode_weights(query.settings);
    let policy = query.settings.decode_policy;
    let mut side = Side::new(Largest::decode(), candidates.len());
    for candidate in candidates {
        let score = decode::score(policy, &candidate.load, &batch, &weights);
        let pod = candidate.pod;
        side.judge(query, candidate.roleset, Scored { pod, score }, explanation);
    }
    side
}
