//! Step 5: the best pair. `score = prefill / max prefill + decode / max decode`; lowest wins.

use super::problem::Problem;
use super::solve::{self, Candidate, Side};
use super::tie::{self, Level};
use super::{
    Decision, Explanation, Pair, Query, Reason, Refusal, Target, combined, fast_path, gate,
    one_leg, problem,
};
use crate::score::{self, decode};

/// Steps 0 to 5.
pub(super) fn choose(query: &Query<'_>) -> Result<Decision, Refusal> {
    let mut problem = match gate::pairs(query) {
        Ok(problem) => problem,
        Err(shortage) => return one_leg::instead_of_pair(query, shortage),
    };
    if query.settings.bucketing
        && let Some((pod, scored)) = combined::under_load(query, &problem)
    {
        return Ok(one_leg::decided(
            query,
            Target::Combined(pod),
            Reason::UnderLoad,
            scored,
        ));
    }
    let mut explanation = Explanation {
        prompt_tokens: query.prompt_tokens,
        ..Explanation::default()
    };
    // Of all decode pods, those that step 1 leaves out included.
    let mean_rate = match query.settings.decode_policy {
        decode::Policy::TokenLoad => decode::mean_rate(problem.decode.iter().map(|pod| &pod.load)),
        _ => 0.0,
    };
    for step in [fast_path::prefill, fast_path::decode] {
        narrow(query, step, &mut problem, &mut explanation);
    }
    let (pair, mut explanation) = solve_banded(query, &problem, mean_rate, &explanation)
        .map_or_else(|| solve(query, &problem, mean_rate, explanation), Ok)?;
    let local_max = query.settings.local_prefill_max_tokens;
    if local_max > 0 && problem::uncached_tokens(query, pair.decode) <= local_max {
        explanation.reason = Reason::LocalPrefill;
        explanation.match_percent = Some(problem::cached_percent(query, pair.decode));
        return Ok(Decision {
            target: Target::OneLeg(pair.decode),
            explanation,
        });
    }
    let policy = query.settings.prefill_policy;
    explanation.match_percent = problem::match_percent(query, policy, pair.prefill);
    Ok(Decision {
        target: Target::Pair(pair),
        explanation,
    })
}

/// Step 2b: steps 3 to 5 on the banded roleset alone. `None` when there is none, or it has no
/// candidates left, or no pair comes of them: a band advises and never refuses.
fn solve_banded(
    query: &Query<'_>,
    problem: &Problem,
    mean_rate: f64,
    explanation: &Explanation,
) -> Option<(Pair, Explanation)> {
    let banded = problem.only(query.banded_roleset?);
    if banded.prefill.is_empty() || banded.decode.is_empty() {
        return None;
    }
    let explanation = Explanation {
        banded: banded.prefill.len() < problem.prefill.len(),
        ..explanation.clone()
    };
    solve(query, &banded, mean_rate, explanation).ok()
}

/// Steps 3 to 5.
fn solve(
    query: &Query<'_>,
    problem: &Problem,
    mean_rate: f64,
    mut explanation: Explanation,
) -> Result<(Pair, Explanation), Refusal> {
    let prefill = solve::prefill(query, problem, &mut explanation);
    let decode = solve::decode(query, &problem.decode, mean_rate, &mut explanation);
    let Some(pair) = best(query, &prefill, &decode) else {
        return Err(Refusal::NoScore {
            ineligible: explanation.ineligible,
        });
    };
    explanation.prefill = prefill.listed(query);
    explanation.decode = decode.listed(query);
    Ok((pair, explanation))
}

/// A fast path, unless all pairs it leaves are ejected.
fn narrow(
    query: &Query<'_>,
    step: fn(&Query<'_>, &mut Problem, &mut Explanation),
    problem: &mut Problem,
    explanation: &mut Explanation,
) {
    if query.blocked_pairs.is_empty() {
        return step(query, problem, explanation);
    }
    let (mut left, mut why) = (problem.clone(), explanation.clone());
    step(query, &mut left, &mut why);
    if left.has_pair(query) {
        (*problem, *explanation) = (left, why);
    }
}

/// Best pair over all rolesets that have a scored pod on both sides.
fn best(query: &Query<'_>, prefill: &Side, decode: &Side) -> Option<Pair> {
    let mut best: Option<(f64, Pair)> = None;
    // Both sides are in the order of the rolesets.
    let mut rights = decode.best.iter().peekable();
    for left in &prefill.best {
        while rights
            .next_if(|right| right.roleset < left.roleset)
            .is_some()
        {}
        let Some(right) = rights.peek().filter(|right| right.roleset == left.roleset) else {
            continue;
        };
        let Some((score, pair)) = pair_of(query, prefill, decode, left, right) else {
            continue;
        };
        let better = best.is_none_or(|(least, held)| {
            let tied = score == least && tie::wins(query, Level::Pair, pair.prefill, held.prefill);
            score < least || tied
        });
        if better {
            best = Some((score, pair));
        }
    }
    best.map(|(_, pair)| pair)
}

/// Score of a roleset's pair: its best pods, or, when these two are ejected together, the best
/// pods that are not.
fn pair_of(
    query: &Query<'_>,
    prefill: &Side,
    decode: &Side,
    left: &Candidate,
    right: &Candidate,
) -> Option<(f64, Pair)> {
    let score = |left: &Candidate, right: &Candidate| {
        let (left, right) = (left.scored.score, right.scored.score);
        score::pair(left, prefill.largest, right, decode.largest)
    };
    let pair = |left: &Candidate, right: &Candidate| Pair {
        prefill: left.scored.pod,
        decode: right.scored.pod,
        roleset: left.roleset,
    };
    let blocked = |left: &Candidate, right: &Candidate| {
        query
            .blocked_pairs
            .contains(&(left.scored.pod, right.scored.pod))
    };
    if !blocked(left, right) {
        return Some((score(left, right), pair(left, right)));
    }
    let of_roleset = |side: &'_ Side| -> Vec<Candidate> {
        side.scored
            .iter()
            .filter(|pod| pod.roleset == left.roleset)
            .copied()
            .collect()
    };
    let (lefts, rights) = (of_roleset(prefill), of_roleset(decode));
    let mut best: Option<(f64, Candidate, Candidate)> = None;
    for left in &lefts {
        for right in rights.iter().filter(|right| !blocked(left, right)) {
            let score = score(left, right);
            let better = best.is_none_or(|(least, held, other)| {
                let tied = score == least
                    && (solve::beats(query, &left.scored, &held.scored)
                        || (left == &held && solve::beats(query, &right.scored, &other.scored)));
                score < least || tied
            });
            if better {
                best = Some((score, *left, *right));
            }
        }
    }
    best.map(|(score, left, right)| (score, pair(&left, &right)))
}
