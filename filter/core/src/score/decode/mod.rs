//! Decode policies: how attractive a pod is for generating tokens.
//!
//! A pod whose engine does not say how many requests it runs would look idle. When at least one
//! sibling's does, such a pod gets [`cold_start`] instead of a policy's score; when none does, the
//! policy runs on what is charged here.

mod conductor;
mod least_request;
mod load_balancing;
mod token_load;

pub use pd_wire::knobs::DecodePolicy as Policy;

/// Free cache of a pod whose cache is full, in percent: keeps it a legal divisor.
const FULL: f64 = 0.1;

/// What one decode pod has to do. Missing numbers are absent, never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// A fresh sample of the pod says how many requests it runs.
    pub sampled: bool,
    /// Requests running on the pod: the larger of what it reports and what is charged to it.
    pub running: f64,
    /// Requests charged to the pod whose decode leg is not sent yet.
    pub pending: f64,
    /// Generated tokens per second.
    pub throughput: Option<f64>,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Prompt tokens of the outstanding requests, those of other gateways included.
    pub tokens: f64,
    /// Sum of the ages of the outstanding requests, in seconds.
    pub age_s: f64,
}

impl Load {
    /// Running and pending requests.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.running + self.pending
    }

    /// Free KV cache in whole percent, rounded half away from zero; 100 when unknown, 0.1 when
    /// nothing is free.
    #[must_use]
    pub fn free_percent(&self) -> f64 {
        let free = libm::round(100.0 - 100.0 * self.kv_usage.unwrap_or(0.0));
        if free <= 0.0 { FULL } else { free }
    }
}

/// Largest values over all candidates, sampled or not; each at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    max_requests: f64,
    max_throughput: f64,
    max_free: f64,
    any_sampled: bool,
    mean_rate: f64,
}

impl Batch {
    /// Measures the candidates. `mean_rate` is the tokens per second and request of a pod that
    /// shows none itself, see [`mean_rate`].
    #[must_use]
    pub fn measure<'a>(loads: impl Iterator<Item = &'a Load>, mean_rate: f64) -> Self {
        let none = Self {
            max_requests: 1.0,
            max_throughput: 1.0,
            max_free: 1.0,
            any_sampled: false,
            mean_rate,
        };
        loads.fold(none, |batch, load| Self {
            max_requests: batch.max_requests.max(load.requests()),
            max_throughput: batch.max_throughput.max(load.throughput.unwrap_or(0.0)),
            max_free: batch.max_free.max(load.free_percent()),
            any_sampled: batch.any_sampled || load.sampled,
            ..batch
        })
    }
}

/// Weights of the policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of the request term of `load_balancing`.
    pub running: f64,
    /// Of the throughput term of `load_balancing`.
    pub throughput: f64,
    /// `token_load` estimates the output of outstanding requests.
    pub output_growth: bool,
}

/// Mean tokens per second and request of the pods that have any; what `token_load` assumes of
/// the others.
#[must_use]
pub fn mean_rate<'a>(loads: impl Iterator<Item = &'a Load>) -> f64 {
    token_load::mean_rate(loads)
}

/// Score of one pod, by the cold-start rule or the policy.
#[must_use]
pub fn score(policy: Policy, load: &Load, batch: &Batch, weights: &Weights) -> f64 {
    match policy {
        // The ledger knows all that this policy asks, sampled or not.
        Policy::TokenLoad => token_load::score(load, batch, weights),
        _ if batch.any_sampled && !load.sampled => cold_start(load),
        Policy::LoadBalancing => load_balancing::score(load, batch, weights),
        Policy::LeastRequest => least_request::score(load),
        Policy::Conductor => conductor::score(load),
    }
}

/// Score of a pod that is not sampled among ones that are: `1.0 + requests charged to it`.
///
/// A pod that just started has pending requests only, which is AIBrix's formula; counting the
/// running ones too keeps a pod whose metrics page broke from attracting everything.
#[must_use]
pub fn cold_start(load: &Load) -> f64 {
    1.0 + load.requests()
}
