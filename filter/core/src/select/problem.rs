//! Turns pods into numbers: what the policies need of each candidate.

use super::{Query, Settings};
use crate::ledger::Amounts;
use crate::score::prefill::PrefixUse;
use crate::score::{decode, overflow, prefill};
use pd_wire::samples::PodSample;

/// Candidates of steps 1 to 5.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Problem {
    /// Prefill candidates.
    pub(super) prefill: Vec<PrefillCandidate>,
    /// Decode candidates.
    pub(super) decode: Vec<DecodeCandidate>,
}

/// One prefill candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PrefillCandidate {
    /// The pod.
    pub(super) pod: u16,
    /// Its roleset.
    pub(super) roleset: u16,
    /// Its numbers.
    pub(super) load: prefill::Load,
}

/// One decode candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DecodeCandidate {
    /// The pod.
    pub(super) pod: u16,
    /// Its roleset.
    pub(super) roleset: u16,
    /// Its numbers.
    pub(super) load: decode::Load,
    /// Requests it finishes per second.
    pub(super) drain_rate: Option<f64>,
}

// === impl Problem ===

impl Problem {
    /// The candidates of one roleset.
    pub(super) fn only(&self, roleset: u16) -> Self {
        let of_roleset = |pod: &&PrefillCandidate| pod.roleset == roleset;
        let prefill = self.prefill.iter().filter(of_roleset).copied().collect();
        let of_roleset = |pod: &&DecodeCandidate| pod.roleset == roleset;
        let decode = self.decode.iter().filter(of_roleset).copied().collect();
        Self { prefill, decode }
    }

    /// Drops the candidates whose roleset has none left on the other side.
    pub(super) fn align(&mut self) {
        let Self { prefill, decode } = self;
        decode.retain(|pod| prefill.iter().any(|other| other.roleset == pod.roleset));
        prefill.retain(|pod| decode.iter().any(|other| other.roleset == pod.roleset));
    }

    /// True when some two candidates of a roleset may meet.
    pub(super) fn has_pair(&self, query: &Query<'_>) -> bool {
        self.prefill.iter().any(|left| {
            self.decode.iter().any(|right| {
                left.roleset == right.roleset
                    && !query.blocked_pairs.contains(&(left.pod, right.pod))
            })
        })
    }
}

// === impl PrefillCandidate ===

impl PrefillCandidate {
    /// The numbers of a pod.
    pub(super) fn of(query: &Query<'_>, pod: u16, roleset: u16) -> Self {
        let charged = amounts(query, pod);
        let policy = query.settings.prefill_policy;
        let load = prefill::Load {
            requests: f64::from(charged.prefill_requests),
            match_percent: f64::from(match_percent(query, policy, pod).unwrap_or(0)),
            active_tokens: float(charged.active_tokens),
            kv_tokens: float(charged.kv_tokens),
            prefill_ms: sample(query, pod).and_then(|sample| positive(sample.prefill_ms)),
        };
        Self { pod, roleset, load }
    }
}

// === impl DecodeCandidate ===

impl DecodeCandidate {
    /// The numbers of a pod.
    pub(super) fn of(query: &Query<'_>, pod: u16, roleset: u16) -> Self {
        let charged = amounts(query, pod);
        let own = f64::from(charged.decode_running);
        let mut load = decode::Load {
            running: own,
            pending: f64::from(charged.decode_pending),
            tokens: float(charged.decode_tokens),
            age_s: float(charged.decode_age_ms(query.now_ms)) / 1000.0,
            ..decode::Load::default()
        };
        let Some(sample) = sample(query, pod) else {
            return Self {
                pod,
                roleset,
                load,
                drain_rate: None,
            };
        };
        let known = |value| reported(value).unwrap_or(0.0);
        load.sampled = reported(sample.running).is_some();
        load.running = (own + known(sample.remote_running)).max(known(sample.running));
        load.throughput = reported(sample.generation_throughput);
        load.kv_usage = reported(sample.kv_usage);
        load.tokens += known(sample.remote_decode_tokens);
        Self {
            pod,
            roleset,
            load,
            drain_rate: reported(sample.drain_rate),
        }
    }
}

/// Charges of a pod.
pub(super) fn amounts(query: &Query<'_>, pod: u16) -> Amounts {
    query
        .loads
        .get(usize::from(pod))
        .copied()
        .unwrap_or_default()
}

/// Requests running and pending on a decode, combined or standard pod.
pub(super) fn requests(query: &Query<'_>, pod: u16) -> f64 {
    DecodeCandidate::of(query, pod, 0).load.requests()
}

/// Time to drain the pod's queue, in seconds.
pub(super) fn queue_s(query: &Query<'_>, pod: u16) -> Option<f64> {
    let sample = sample(query, pod)?;
    overflow::queue_s(reported(sample.waiting), reported(sample.drain_rate))
}

/// The pod's sample, unless it is stale.
fn sample<'a>(query: &Query<'a>, pod: u16) -> Option<&'a PodSample> {
    let (sample, taken_at_ms) = query.fleet.sample(pod)?;
    let age_ms = query.now_ms.saturating_sub(taken_at_ms);
    (age_ms <= query.settings.stale_after_ms).then_some(sample)
}

/// A number an engine may report: anything else is treated as missing.
fn reported(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value >= 0.0)
}

/// A number that means nothing when it is 0.
fn positive(value: Option<f64>) -> Option<f64> {
    reported(value).filter(|value| *value > 0.0)
}

/// Match of the pod as a prefill policy counts it, in percent; `None` when it does not.
pub(super) fn match_percent(query: &Query<'_>, policy: prefill::Policy, pod: u16) -> Option<u8> {
    let percent = cached_percent(query, pod);
    match prefill::prefix_use(policy) {
        PrefixUse::None => None,
        PrefixUse::All => Some(percent),
        PrefixUse::AboveMinimum if f64::from(percent) < query.settings.min_match_pct => Some(0),
        PrefixUse::AboveMinimum => Some(percent),
    }
}

/// Part of the prompt in the pod's prefix cache, in percent.
pub(super) fn cached_percent(query: &Query<'_>, pod: u16) -> u8 {
    query
        .match_percent
        .get(usize::from(pod))
        .copied()
        .unwrap_or(0)
        .min(100)
}

/// Prompt tokens that the pod would have to compute, rounded up.
pub(super) fn uncached_tokens(query: &Query<'_>, pod: u16) -> u64 {
    let missing = u64::from(100_u8.saturating_sub(cached_percent(query, pod)));
    query.prompt_tokens.saturating_mul(missing).div_ceil(100)
}

/// Token counts and times are far below 2^53, where every whole number has its float.
#[allow(clippy::cast_precision_loss)]
fn float(value: u64) -> f64 {
    value as f64
}

/// Weights of the prefill policies.
pub(super) fn prefill_weights(settings: &Settings) -> prefill::Weights {
    prefill::Weights {
        kv: settings.kv_weight,
        hybrid_factor: settings.hybrid_factor,
    }
}

/// Facts about the request and the candidates together.
pub(super) fn prefill_batch(query: &Query<'_>, max_requests: f64) -> prefill::Batch {
    prefill::Batch {
        max_requests,
        text_bytes: float(query.text_bytes),
    }
}

/// Weights of the decode policies.
pub(super) fn decode_weights(settings: &Settings) -> decode::Weights {
    decode::Weights {
        running: settings.weight_running,
        throughput: settings.weight_throughput,
        output_growth: settings.output_growth,
    }
}
