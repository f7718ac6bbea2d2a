//! Turns pods into numbers: what the policies need of each candidate.

use super::{Query, Settings};
use crate::ledger::Amounts;
use crate::score::{decode, prefill};
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

/// Charges of a pod.
pub(super) fn amounts(query: &Query<'_>, pod: u16) -> Amounts {
    query
        .loads
        .get(usize::from(pod))
        .copied()
        .unwrap_or_default()
}

/// The pod's sample, unless it is stale.
pub(super) fn sample<'a>(query: &Query<'a>, pod: u16) -> Option<&'a PodSample> {
    let (sample, taken_at_ms) = query.fleet.pods.get(usize::from(pod))?.sample.as_ref()?;
    let age_ms = query.now_ms.saturating_sub(*taken_at_ms);
    (age_ms <= query.settings.stale_after_ms).then_some(sample)
}

/// A number an engine may report: anything else is treated as missing.
pub(super) fn reported(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value >= 0.0)
}

/// Match of the pod as the scores count it, in percent.
pub(super) fn match_percent(query: &Query<'_>, pod: u16) -> u8 {
    let percent = raw_match_percent(query, pod);
    if f64::from(percent) < query.settings.min_match_pct {
        0
    } else {
        percent
    }
}

/// Match of the pod, in percent.
pub(super) fn raw_match_percent(query: &Query<'_>, pod: u16) -> u8 {
    query
        .match_percent
        .get(usize::from(pod))
        .copied()
        .unwrap_or(0)
        .min(100)
}

/// Numbers of a prefill pod.
pub(super) fn prefill_load(query: &Query<'_>, pod: u16) -> prefill::Load {
    prefill::Load {
        requests: f64::from(amounts(query, pod).prefill_requests),
        match_percent: f64::from(match_percent(query, pod)),
    }
}

/// Numbers of a decode pod.
pub(super) fn decode_load(query: &Query<'_>, pod: u16) -> decode::Load {
    let charged = amounts(query, pod);
    let own = f64::from(charged.decode_running);
    let pending = f64::from(charged.decode_pending);
    let Some(sample) = sample(query, pod) else {
        return decode::Load {
            running: own,
            pending,
            ..decode::Load::default()
        };
    };
    let charged_running = own + reported(sample.remote_running).unwrap_or(0.0);
    decode::Load {
        sampled: true,
        running: charged_running.max(reported(sample.running).unwrap_or(0.0)),
        pending,
        throughput: reported(sample.generation_throughput),
        kv_usage: reported(sample.kv_usage),
    }
}

/// Weights of the decode policies.
pub(super) fn decode_weights(settings: &Settings) -> decode::Weights {
    decode::Weights {
        running: settings.weight_running,
        throughput: settings.weight_throughput,
    }
}

// === impl Problem ===

impl Problem {
    /// Drops the candidates whose roleset has none left on the other side.
    pub(super) fn align(&mut self) {
        let Self { prefill, decode } = self;
        decode.retain(|pod| prefill.iter().any(|other| other.roleset == pod.roleset));
        prefill.retain(|pod| decode.iter().any(|other| other.roleset == pod.roleset));
    }
}
