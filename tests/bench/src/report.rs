//! Tables for people, JSON for machines.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::args::Matrix;
use crate::matrix::{Cell, Pair, Runs};
use crate::measured::Measured;
use crate::spread::Spread;

/// Everything a comparison showed.
#[derive(Serialize)]
pub(crate) struct Report {
    baseline: &'static str,
    contender: &'static str,
    repeats: u32,
    window_ms: u128,
    slice_ms: u64,
    warm_up_ms: u128,
    /// Of the machine, over the minute before.
    load_average: f64,
    cells: Vec<CellReport>,
}

#[derive(Serialize)]
struct CellReport {
    #[serde(flatten)]
    cell: Cell,
    baseline: Summary,
    contender: Summary,
    /// Contender / baseline, paired within a repeat.
    rps_ratio: Spread,
    cpu_ratio: Spread,
    baseline_runs: Vec<Measured>,
    contender_runs: Vec<Measured>,
}

/// Repeats of one target, summed up. Times in µs, memory in MB.
#[derive(Serialize)]
struct Summary {
    rps: Spread,
    total_p50: Spread,
    total_p99: Spread,
    first_byte_p50: Spread,
    first_byte_p99: Spread,
    envoy_cpu_us: Spread,
    client_cpu_us: Spread,
    rss_before_mb: Spread,
    rss_after_mb: Spread,
}

// === impl Report ===

impl Report {
    pub(crate) fn new(pair: &Pair, matrix: &Matrix, load_average: f64, all: &[Runs]) -> Self {
        Self {
            baseline: pair.baseline.name,
            contender: pair.contender.name,
            repeats: matrix.repeats(),
            window_ms: matrix.window().as_millis(),
            slice_ms: matrix.slice_ms,
            warm_up_ms: matrix.warm_up().as_millis(),
            load_average,
            cells: all.iter().map(CellReport::new).collect(),
        }
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        fs::write(path, serde_json::to_vec_pretty(self)?)
            .with_context(|| path.display().to_string())
    }

    /// Throughput and cost, latency, memory: a table each.
    pub(crate) fn markdown(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.tables(&mut out);
        out
    }

    fn tables(&self, out: &mut String) -> std::fmt::Result {
        let (a, b) = (self.baseline, self.contender);
        writeln!(
            out,
            "Medians of {} paired repeats (least–greatest) of {} ms for each target, taken in turns of {} ms. Ratios are {b}/{a} within a repeat. Load average before: {}.\n",
            self.repeats, self.window_ms, self.slice_ms, self.load_average
        )?;
        writeln!(
            out,
            "| body | stream | conc. | {a} req/s | {b} req/s | ratio | {a} Envoy CPU µs | {b} Envoy CPU µs | ratio |"
        )?;
        writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
        for c in &self.cells {
            writeln!(
                out,
                "| {} | {} | {} | **{}** | {} | {} | **{}** |",
                c.cell,
                whole(&c.baseline.rps),
                whole(&c.contender.rps),
                ratio(&c.rps_ratio),
                whole(&c.baseline.envoy_cpu_us),
                whole(&c.contender.envoy_cpu_us),
                ratio(&c.cpu_ratio),
            )?;
        }
        writeln!(
            out,
            "\n| body | stream | conc. | {a} total ms: p50 / p99 | {b} total ms | {a} first byte ms: p50 / p99 | {b} first byte ms | {a} RSS MB before → after | {b} RSS MB before → after |"
        )?;
        writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
        for c in &self.cells {
            let two = |p50: &Spread, p99: &Spread| {
                format!("{} / {}", milliseconds(p50), milliseconds(p99))
            };
            let first = |s: &Summary| two(&s.first_byte_p50, &s.first_byte_p99);
            let total = |s: &Summary| two(&s.total_p50, &s.total_p99);
            let memory = |s: &Summary| {
                format!(
                    "{:.0} → {:.0}",
                    s.rss_before_mb.median, s.rss_after_mb.median
                )
            };
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} |",
                c.cell,
                total(&c.baseline),
                total(&c.contender),
                first(&c.baseline),
                first(&c.contender),
                memory(&c.baseline),
                memory(&c.contender),
            )?;
        }
        Ok(())
    }
}

// === impl CellReport, Summary, Cell ===

impl CellReport {
    fn new(runs: &Runs) -> Self {
        let paired = |of: fn(&Measured) -> f64| {
            let pairs = runs.baseline.iter().zip(&runs.contender);
            Spread::of(pairs.map(move |(a, b)| of(b) / of(a)))
        };
        Self {
            cell: runs.cell,
            baseline: Summary::new(&runs.baseline),
            contender: Summary::new(&runs.contender),
            rps_ratio: paired(|m| m.rps),
            cpu_ratio: paired(|m| m.envoy_cpu_us),
            baseline_runs: runs.baseline.clone(),
            contender_runs: runs.contender.clone(),
        }
    }
}

impl Summary {
    fn new(runs: &[Measured]) -> Self {
        let of = |value: fn(&Measured) -> f64| Spread::of(runs.iter().map(value));
        Self {
            rps: of(|m| m.rps),
            total_p50: of(|m| m.total.p50),
            total_p99: of(|m| m.total.p99),
            first_byte_p50: of(|m| m.first_byte.p50),
            first_byte_p99: of(|m| m.first_byte.p99),
            envoy_cpu_us: of(|m| m.envoy_cpu_us),
            client_cpu_us: of(|m| m.client_cpu_us),
            rss_before_mb: of(|m| m.rss_before_mb),
            rss_after_mb: of(|m| m.rss_after_mb),
        }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stream = if self.stream { "yes" } else { "no" };
        write!(
            f,
            "{} | {stream} | {}",
            size(self.body_bytes),
            self.concurrency
        )
    }
}

/// One line about one pair of runs, on standard error.
pub(crate) fn progress(repeat: u32, cell: &Cell, pair: &Pair, a: &Measured, b: &Measured) {
    eprintln!(
        "repeat {}: {cell}: {} {:.0} req/s {:.0} µs, {} {:.0} req/s {:.0} µs",
        repeat.saturating_add(1),
        pair.baseline.name,
        a.rps,
        a.envoy_cpu_us,
        pair.contender.name,
        b.rps,
        b.envoy_cpu_us,
    );
}

/// What went wrong in a cell.
pub(crate) fn reasons(runs: &Runs, pair: &Pair) -> String {
    let mut out = format!("requests failed at {}", runs.cell);
    for (target, runs) in [
        (&pair.baseline, &runs.baseline),
        (&pair.contender, &runs.contender),
    ] {
        for run in runs.iter().filter(|run| run.errors > 0) {
            let reasons = run.reasons.join("\n  ");
            let _ = write!(
                out,
                "\n{}: {} failed:\n  {reasons}",
                target.name, run.errors
            );
        }
    }
    out
}

/// Bytes in the unit that leaves a whole number.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KB", b >> 10),
        b => format!("{b} B"),
    }
}

fn whole(s: &Spread) -> String {
    format!("{:.0} ({:.0}–{:.0})", s.median, s.min, s.max)
}

fn milliseconds(s: &Spread) -> String {
    let [median, min, max] = [s.median, s.min, s.max].map(|microseconds| microseconds / 1000.0);
    format!("{median:.2} ({min:.2}–{max:.2})")
}

fn ratio(s: &Spread) -> String {
    format!("{:.2} ({:.2}–{:.2})", s.median, s.min, s.max)
}
