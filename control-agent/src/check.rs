//! `pd-agent check`: what the agent would make of a pods file, as a table.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pd_wire::topology::Role;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::args::CheckOptions;
use crate::pods::file;
use crate::pods::settings::{Reading, Record};
use crate::scrape::engine::Engine;

/// Most connection attempts at the same time.
const CONCURRENCY: usize = 64;
const HEAD: [&str; 8] = [
    "POD",
    "MODEL",
    "ROLE",
    "ROLESET",
    "ENGINE",
    "ADDRESS",
    "READY",
    "REACHABLE",
];

/// What was found: a table and the warnings.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<[String; 8]>,
    warnings: Vec<String>,
}

impl Report {
    /// True when there is nothing to warn of.
    pub fn is_clean(&self) -> bool {
        self.warnings.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = HEAD.map(str::to_owned);
        let lines = || std::iter::once(&head).chain(&self.rows);
        let mut widths = [0; 8];
        for line in lines() {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for line in lines() {
            let cells: Vec<_> = line
                .iter()
                .zip(widths)
                .map(|(cell, width)| format!("{cell:width$}"))
                .collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        writeln!(
            f,
            "{} pods, {} warnings",
            self.rows.len(),
            self.warnings.len()
        )
    }
}

/// Reads the file and tries to connect to every pod.
pub async fn check(options: &CheckOptions) -> anyhow::Result<Report> {
    let shown = options.pods_file.display();
    let (index, fleet) = file::read(&options.pods_file)
        .and_then(|text| file::load(&text))
        .with_context(|| format!("pods file {shown}"))?;
    let reached = reach(
        index.entries().filter_map(|(_, e)| record(&e.reading)),
        options.timeout,
    );
    let reached = reached.await;

    let mut report = Report {
        rows: Vec::new(),
        warnings: fleet.warnings,
    };
    for (name, entry) in index.entries() {
        let mut row = std::array::from_fn(|_| "-".to_owned());
        let [pod, model, role, roleset, engine, address, ready, reachable] = &mut row;
        *pod = name.to_string();
        match &entry.reading {
            Reading::Foreign => *role = "(no model label)".to_owned(),
            Reading::Worker { reason } => *role = format!("({reason})"),
            Reading::Unreachable { model: served, .. } => *model = served.clone(),
            Reading::Serving {
                model: served,
                record,
            } => {
                *model = served.clone();
                *role = match record.pod.role {
                    Role::Prefill => "prefill",
                    Role::Decode => "decode",
                    Role::Standard => "standard",
                }
                .to_owned();
                if let Some(name) = &record.pod.roleset {
                    roleset.clone_from(name);
                }
                engine.clone_from(&record.pod.engine);
                address.clone_from(&record.pod.address);
                *ready = yes(record.pod.ready && !record.pod.draining);
                let answer = reached
                    .get(&record.pod.address)
                    .is_some_and(|reached| *reached);
                *reachable = yes(answer);
                if !answer {
                    let text = format!("pod {name}: nothing accepts connections at {address}");
                    report.warnings.push(text);
                }
                if Engine::of(&record.pod.engine).is_none() {
                    let engine = &record.pod.engine;
                    let text = format!("pod {name}: engine {engine:?} is not scraped");
                    report.warnings.push(text);
                }
            }
        }
        report.rows.push(row);
    }
    Ok(report)
}

fn record(reading: &Reading) -> Option<&Record> {
    match reading {
        Reading::Serving { record, .. } => Some(record),
        _ => None,
    }
}

fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

async fn reach(
    records: impl Iterator<Item = &Record>,
    timeout: Duration,
) -> BTreeMap<String, bool> {
    let places = Arc::new(Semaphore::new(CONCURRENCY));
    let mut attempts = JoinSet::new();
    for record in records {
        let (address, places) = (record.pod.address.clone(), places.clone());
        attempts.spawn(async move {
            let _place = places.acquire().await;
            let connect = tokio::time::timeout(timeout, TcpStream::connect(&address)).await;
            (address, matches!(connect, Ok(Ok(_))))
        });
    }
    let mut reached = BTreeMap::new();
    while let Some(attempt) = attempts.join_next().await {
        reached.extend(attempt);
    }
    reached
}
