//! Prefill policies: how attractive a pod is for computing a prompt.
//!
//! Before a policy runs, pods with far more requests than their peers are left out
//! ([`Crowd::is_outlier`]).

mod conductor;
mod hybrid_cache_load;
mod least_request;
mod prefix_cache;
mod token_load;

pub use pd_wire::knobs::PrefillPolicy as Policy;

/// What one prefill pod has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Outstanding prefill requests.
    pub requests: f64,
    /// Part of the prompt the pod holds in its prefix cache, 0 to 100.
    pub match_percent: f64,
    /// Prompt tokens being computed.
    pub active_tokens: f64,
    /// Prompt tokens whose KV is still held for a decode pod.
    pub kv_tokens: f64,
    /// Mean prefill time of a request, in ms; absent when unknown.
    pub prefill_ms: Option<f64>,
}

/// What is known about all candidates and the request together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    /// Most outstanding requests of any candidate, at least 1.
    pub max_requests: f64,
    /// Length of the prompt's text, in bytes.
    pub text_bytes: f64,
}

/// Weights of the policies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Of resident KV tokens relative to tokens being computed.
    pub kv: f64,
    /// Discount of `hybrid_cache_load` for a full match, 0 to 1.
    pub hybrid_factor: f64,
}

/// Score of one pod.
#[must_use]
pub fn score(policy: Policy, load: &Load, batch: &Batch, weights: &Weights) -> f64 {
    match policy {
        Policy::PrefixCache => prefix_cache::score(load, batch),
        Policy::LeastRequest => least_request::score(load),
        Policy::Conductor => conductor::score(load, batch),
        Policy::TokenLoad => token_load::score(load, weights),
        Policy::HybridCacheLoad => hybrid_cache_load::score(load, weights),
    }
}

/// How a policy reads the prefix index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixUse {
    /// Not at all.
    None,
    /// Every match counts.
    All,
    /// Matches below the configured minimum count as none.
    AboveMinimum,
}

/// How the policy reads the prefix index.
#[must_use]
pub fn prefix_use(policy: Policy) -> PrefixUse {
    match policy {
        Policy::LeastRequest | Policy::TokenLoad => PrefixUse::None,
        Policy::Conductor => PrefixUse::All,
        Policy::PrefixCache | Policy::HybridCacheLoad => PrefixUse::AboveMinimum,
    }
}

/// Request counts of all candidates, as far as the outlier rule needs them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crowd {
    limit: f64,
    max: f64,
}

impl Crowd {
    /// Measures the candidates. `factor` is the number of sample standard deviations above the
    /// mean that a pod may have.
    #[must_use]
    pub fn measure(requests: impl Iterator<Item = f64>, factor: f64) -> Self {
        // Sums of whole numbers are exact, so the limit does not depend on the order of the pods.
        let (mut count, mut sum, mut squares, mut max) = (0.0, 0.0, 0.0, 0.0_f64);
        for value in requests {
            count += 1.0;
            sum += value;
            squares += value * value;
            max = max.max(value);
        }
        if count < 2.0 {
            return Self {
                limit: f64::INFINITY,
                max,
            };
        }
        let variance = (count * squares - sum * sum) / (count * (count - 1.0));
        let deviation = libm::sqrt(variance.max(0.0));
        Self {
            limit: sum / count + factor * deviation,
            max,
        }
    }

    /// More requests than mean + factor · sample standard deviation (strictly). Never true for
    /// the least loaded pod as long as the factor is not negative.
    #[must_use]
    pub fn is_outlier(&self, requests: f64) -> bool {
        requests > self.limit
    }

    /// Most requests of any candidate, at least 1: the divisor of relative counts.
    #[must_use]
    pub fn max_requests(&self) -> f64 {
        self.max.max(1.0)
    }
}
