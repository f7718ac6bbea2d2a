//! What one run of load showed.

use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Results of one target in one repeat. Times of requests are in µs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Measured {
    /// Requests sent and answered.
    pub(crate) requests: u64,
    /// Time it took, s.
    pub(crate) seconds: f64,
    /// Requests a second.
    pub(crate) rps: f64,
    /// From the start of the (first) request to the end of the answer.
    pub(crate) total: Quantiles,
    /// To the first byte of the answer's body.
    pub(crate) first_byte: Quantiles,
    /// CPU time of the Envoy process per request, µs.
    pub(crate) envoy_cpu_us: f64,
    /// CPU time of this client per request, µs.
    pub(crate) client_cpu_us: f64,
    /// Resident memory of the Envoy process, MB of 2^20 bytes.
    pub(crate) rss_before_mb: f64,
    /// The same after the run.
    pub(crate) rss_after_mb: f64,
    /// Requests that failed, those of the warm-up included.
    pub(crate) errors: u64,
    /// The first few of their reasons.
    pub(crate) reasons: Vec<String>,
}

/// Median and 99th percentile, µs.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Quantiles {
    /// Median.
    pub(crate) p50: f64,
    /// 99th percentile.
    pub(crate) p99: f64,
}

/// Times of requests, to three digits, up to two minutes.
pub(crate) struct Times(Histogram<u64>);

// === impl Times ===

impl Times {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Histogram::new_with_max(120_000_000_000, 3)?))
    }

    pub(crate) fn record(&mut self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(nanoseconds);
    }

    pub(crate) fn clear(&mut self) {
        self.0.reset();
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn quantiles(&self) -> Quantiles {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1000.0;
        Quantiles {
            p50: at(0.5),
            p99: at(0.99),
        }
    }
}
