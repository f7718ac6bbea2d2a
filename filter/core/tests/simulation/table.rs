//! Figures of several runs, one row per contender.

use crate::world::Outcome;

/// Times to first token of one contender, all seeds together and each alone.
pub(crate) struct Row {
    name: &'static str,
    /// 99th percentile of each seed, in ms.
    pub(crate) p99: Vec<f64>,
    mean: Vec<f64>,
    p50: Vec<f64>,
    cached: Vec<f64>,
}

// === impl Row ===

impl Row {
    pub(crate) fn new(name: &'static str, outcomes: Vec<Outcome>) -> Self {
        let mut row = Self {
            name,
            p99: Vec::new(),
            mean: Vec::new(),
            p50: Vec::new(),
            cached: Vec::new(),
        };
        for mut outcome in outcomes {
            outcome.ttft_ms.sort_by(f64::total_cmp);
            let sorted = &outcome.ttft_ms;
            row.p50.push(quantile(sorted, 0.5));
            row.p99.push(quantile(sorted, 0.99));
            row.mean.push(mean(sorted));
            row.cached.push(outcome.cached_percent);
        }
        row
    }

    /// Asserts that the 99th percentile is below `ratio` times the other's on average, and below
    /// it with every seed.
    pub(crate) fn assert_beats(&self, other: &Self, ratio: f64) {
        for (ours, theirs) in self.p99.iter().zip(&other.p99) {
            assert!(
                ours < theirs,
                "{}: p99 {ours:.0} ms, {}: {theirs:.0} ms",
                self.name,
                other.name
            );
        }
        let (ours, theirs) = (mean(&self.p99), mean(&other.p99));
        assert!(
            ours < ratio * theirs,
            "{}: p99 {ours:.0} ms is not below {ratio} of {}: {theirs:.0} ms",
            self.name,
            other.name
        );
    }
}

/// Prints the rows, means over the seeds.
pub(crate) fn print(title: &str, rows: &[&Row]) {
    println!(
        "\n{title}\n{:<28} {:>9} {:>9} {:>9} {:>8}",
        "time to first token, ms", "p50", "mean", "p99", "cached"
    );
    for row in rows {
        println!(
            "{:<28} {:>9.0} {:>9.0} {:>9.0} {:>7.0}%  p99 by seed {:.0?}",
            row.name,
            mean(&row.p50),
            mean(&row.mean),
            mean(&row.p99),
            mean(&row.cached),
            row.p99
        );
    }
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
