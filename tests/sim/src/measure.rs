//! Prometheus text exposition of counters, gauges and histograms, cheap enough for every request.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of values at most a bound, with their sum.
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last counts what exceeds them all.
    counts: Box<[AtomicU64]>,
    /// Sum in millionths for small values, so that it can be an integer.
    sum: AtomicU64,
    scale: f64,
}

/// A page in the text format being written.
pub(crate) struct Page {
    text: String,
    labels: String,
}

// === impl Histogram ===

impl Histogram {
    /// A histogram of values that need a resolution of 1/`scale`.
    pub(crate) fn new(bounds: &'static [f64], scale: f64) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            scale,
        }
    }

    /// Adds a value.
    pub(crate) fn observe(&self, value: f64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get(at) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let units = (value * self.scale).round().max(0.0) as u64;
        self.sum.fetch_add(units, Ordering::Relaxed);
    }

    /// Forgets all values.
    pub(crate) fn reset(&self) {
        for count in &self.counts {
            count.store(0, Ordering::Relaxed);
        }
        self.sum.store(0, Ordering::Relaxed);
    }
}

// === impl Page ===

impl Page {
    /// A page whose samples all carry `labels`, written `name="value",...`.
    pub(crate) fn new(labels: String) -> Self {
        Self {
            text: String::with_capacity(32 << 10),
            labels,
        }
    }

    /// The finished text.
    pub(crate) fn finish(self) -> String {
        self.text
    }

    /// Opens a family. Counters are named with their `_total`.
    pub(crate) fn family(&mut self, name: &str, kind: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "# HELP {name} Simulated.\n# TYPE {name} {kind}");
    }

    /// A sample with more labels before the common ones (`reason="x",` or nothing).
    pub(crate) fn sample(&mut self, name: &str, more: &str, value: f64) {
        let labels = &self.labels;
        let _ = writeln!(self.text, "{name}{{{more}{labels}}} {value:?}");
    }

    /// A family of one gauge.
    pub(crate) fn gauge(&mut self, name: &str, value: f64) {
        self.family(name, "gauge");
        self.sample(name, "", value);
    }

    /// A family of one counter.
    pub(crate) fn counter(&mut self, name: &str, value: u64) {
        self.family(name, "counter");
        self.sample(name, "", value as f64);
    }

    /// A family of one histogram.
    pub(crate) fn histogram(&mut self, name: &str, histogram: &Histogram) {
        self.histogram_of(name, "", histogram);
    }

    /// A family of one histogram with more labels before the common ones.
    pub(crate) fn histogram_of(&mut self, name: &str, more: &str, histogram: &Histogram) {
        self.family(name, "histogram");
        let mut total = 0u64;
        let bucket = format!("{name}_bucket");
        let bounds = histogram.bounds.iter().map(|b| format!("{b:?}"));
        let bounds = bounds.chain(std::iter::once("+Inf".to_owned()));
        for (bound, count) in bounds.zip(&histogram.counts) {
            total = total.saturating_add(count.load(Ordering::Relaxed));
            self.sample(&bucket, &format!("le=\"{bound}\",{more}"), total as f64);
        }
        let sum = histogram.sum.load(Ordering::Relaxed) as f64 / histogram.scale;
        self.sample(&format!("{name}_count"), more, total as f64);
        self.sample(&format!("{name}_sum"), more, sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_bounds_inclusive() {
        let histogram = Histogram::new(&[0.5, 1.0], 1e6);
        for value in [0.25, 0.5, 0.75, 3.0] {
            histogram.observe(value);
        }
        let mut page = Page::new("engine=\"0\"".to_owned());
        page.histogram("h", &histogram);
        let text = page.finish();
        for line in [
            "h_bucket{le=\"0.5\",engine=\"0\"} 2.0",
            "h_bucket{le=\"1.0\",engine=\"0\"} 3.0",
            "h_bucket{le=\"+Inf\",engine=\"0\"} 4.0",
            "h_count{engine=\"0\"} 4.0",
            "h_sum{engine=\"0\"} 4.5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} not in\n{text}");
        }
    }
}
