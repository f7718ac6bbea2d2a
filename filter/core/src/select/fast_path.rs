//! Steps 1 and 2: when the load is far out of balance, the least loaded pod is taken outright.
//!
//! Each side is judged alone. A hit narrows both sides to the roleset of the pod it found, so
//! both steps can fire for one request. Scoring runs on what is left.

use super::explain::DecodeImbalance;
use super::problem::{DecodeCandidate, Problem};
use super::tie::{self, Level};
use super::{Explanation, Query};
use pd_wire::knobs::DecodePolicy;

/// Drain rates below this count as this, in requests per second.
const MIN_DRAIN_RATE: f64 = 0.1;

/// Step 1: request counts of the prefill pods differ by more than the spread.
pub(super) fn prefill(query: &Query<'_>, problem: &mut Problem, explanation: &mut Explanation) {
    let loads = || {
        problem
            .prefill
            .iter()
            .map(|candidate| (candidate.pod, candidate.load.requests))
    };
    let Some(range) = Range::of(query, loads()) else {
        return;
    };
    if range.max - range.min > query.settings.prefill_spread {
        problem
            .prefill
            .retain(|candidate| candidate.pod == range.least);
        problem.align();
        explanation.prefill_imbalance = true;
    }
}

/// Step 2: the first of three checks that fires takes a decode pod. Skipped under `token_load`,
/// which replaces all three numbers.
pub(super) fn decode(query: &Query<'_>, problem: &mut Problem, explanation: &mut Explanation) {
    if query.settings.decode_policy == DecodePolicy::TokenLoad {
        return;
    }
    let candidates = &problem.decode;
    let hit = requests(query, candidates)
        .map(|pod| (pod, DecodeImbalance::Requests))
        .or_else(|| throughput(query, candidates).map(|pod| (pod, DecodeImbalance::Throughput)))
        .or_else(|| drain(query, candidates).map(|pod| (pod, DecodeImbalance::Drain)));
    if let Some((pod, check)) = hit {
        problem.decode.retain(|candidate| candidate.pod == pod);
        problem.align();
        explanation.decode_imbalance = Some(check);
    }
}

/// Request counts of the sampled pods differ by the spread or more: the least loaded one. Pods
/// that are not look idle and would draw everything.
fn requests(query: &Query<'_>, candidates: &[DecodeCandidate]) -> Option<u16> {
    let sampled = candidates.iter().filter(|candidate| candidate.load.sampled);
    let range = Range::of(query, sampled.map(|c| (c.pod, c.load.requests())))?;
    (range.max - range.min >= query.settings.decode_spread).then_some(range.least)
}

/// Throughputs differ by more than the spread: the pod with the lowest one.
fn throughput(query: &Query<'_>, candidates: &[DecodeCandidate]) -> Option<u16> {
    let known = candidates
        .iter()
        .filter_map(|c| Some((c.pod, c.load.throughput?)));
    let range = Range::of(query, known)?;
    (range.max - range.min > query.settings.throughput_spread).then_some(range.least)
}

/// All pods report a positive drain rate, and the times to drain `requests / rate` have a larger
/// ratio than the threshold: the pod that drains first. An idle pod switches the check off.
fn drain(query: &Query<'_>, candidates: &[DecodeCandidate]) -> Option<u16> {
    let rate = |candidate: &DecodeCandidate| candidate.drain_rate.filter(|rate| *rate > 0.0);
    if candidates.iter().any(|candidate| rate(candidate).is_none()) {
        return None;
    }
    let times = candidates.iter().filter_map(|c| {
        let rate = rate(c)?.max(MIN_DRAIN_RATE);
        Some((c.pod, c.load.requests() / rate))
    });
    let range = Range::of(query, times)?;
    let unbalanced = range.min > 0.0 && range.max / range.min > query.settings.drain_ratio;
    unbalanced.then_some(range.least)
}

/// Smallest and largest value, and the pod with the smallest one.
struct Range {
    min: f64,
    max: f64,
    least: u16,
}

impl Range {
    fn of(query: &Query<'_>, mut values: impl Iterator<Item = (u16, f64)>) -> Option<Self> {
        let (least, value) = values.next()?;
        let mut range = Self {
            min: value,
            max: value,
            least,
        };
        for (pod, value) in values {
            range.max = range.max.max(value);
            let tied = value == range.min && tie::wins(query, Level::Pod, pod, range.least);
            if value < range.min || tied {
                (range.min, range.least) = (value, pod);
            }
        }
        Some(range)
    }
}
