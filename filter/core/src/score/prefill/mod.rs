//! Prefill policies: how attractive a pod is for computing a prompt.
//!
//! Before a policy runs, pods with far more requests than their peers are left out
//! ([`Crowd::is_outlier`]).

mod least_request;
mod prefix_cache;

pub use pd_wire::knobs::PrefillPolicy as Policy;

/// What one prefill pod has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Outstanding prefill requests.
    pub requests: f64,
    /// Part of the prompt the pod holds in its prefix cache, 0 to 100.
    pub match_percent: f64,
}

/// What is known about all candidates and the request together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Batch {
    /// Most outstanding requests of any candidate, at least 1.
    pub max_requests: f64,
}

/// Score of one pod.
#[must_use]
pub fn score(policy: Policy, load: &Load, batch: &Batch) -> f64 {
    match policy {
        Policy::PrefixCache => prefix_cache::score(load, batch),
        _ => least_request::score(load),
    }
}

/// True when the policy reads the prefix index.
#[must_use]
pub fn reads_prefix_index(policy: Policy) -> bool {
    matches!(policy, Policy::PrefixCache)
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
