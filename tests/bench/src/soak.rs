//! Memory under many small requests: resident set and linear memory, beside plain Envoy's.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use pd_wire::control::Status;
use serde::Serialize;

use crate::args;
use crate::load::{Load, Session, Until};
use crate::matrix::Pair;
use crate::prompt::{Counter, Prompt};
use crate::response::Response;
use crate::target::Target;

/// Body sizes, each streamed and not.
const SIZES: [usize; 5] = [200, 1 << 10, 2 << 10, 4 << 10, 8 << 10];
const CONCURRENCY: usize = 32;
/// Rows of the table after the first.
const STEPS: u64 = 10;
/// Requests of the filter must have ended this long after their answers.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at the status.
const IDLE_PAUSE: Duration = Duration::from_millis(100);
const CONTROL_LIMIT: Duration = Duration::from_secs(5);

/// Memory after some requests.
#[derive(Debug, Serialize)]
struct Row {
    requests: u64,
    floor_rss_mb: f64,
    ours_rss_mb: f64,
    /// What each worker VM accounts for of the difference.
    above_floor_mb_per_worker: f64,
    /// Linear memory of each VM, in pages of 64 KiB.
    memory_pages: Vec<u32>,
}

/// Sends the requests through both, a step of each in turn, and prints a row after each step.
///
/// # Errors
/// When a request failed or memory went over the limit.
pub(crate) fn run(soak: &args::Soak) -> Result<()> {
    let pair = soak.servers.targets()?;
    let counter = Counter::new();
    let mut prompts = Vec::new();
    for size in SIZES {
        for stream in [false, true] {
            prompts.push(Prompt::new(&soak.model, size, stream, "pd-bench")?);
        }
    }
    println!(
        "| requests | plain Envoy RSS MB | ours RSS MB | above, per worker MB | linear memory of each VM, pages |"
    );
    println!("|---|---|---|---|---|");
    let mut rows = vec![row(soak, &pair, 0)?];
    let mut sent = 0;
    for step in 1..=STEPS {
        let upto = soak.requests * step / STEPS;
        for target in [&pair.baseline, &pair.contender] {
            through(target, &prompts, &counter, upto - sent)?;
        }
        sent = upto;
        rows.push(row(soak, &pair, sent)?);
    }
    if let Some(path) = &soak.json {
        fs::write(path, serde_json::to_vec_pretty(&rows)?)
            .with_context(|| path.display().to_string())?;
    }
    let most = rows.iter().map(|row| row.above_floor_mb_per_worker);
    let most = most.fold(f64::MIN, f64::max);
    println!(
        "\nAt most {most:.1} MB per worker above plain Envoy (limit {:.0} MB).",
        soak.limit_mb
    );
    ensure!(most <= soak.limit_mb, "memory is over the limit");
    Ok(())
}

fn through(target: &Target, prompts: &[Prompt], counter: &Counter, count: u64) -> Result<()> {
    let mut session = Session::open(Load {
        target,
        prompts,
        counter,
        concurrency: CONCURRENCY,
    })?;
    session.slice(Until::Count(count))?;
    let measured = session.finish()?;
    ensure!(
        measured.errors == 0,
        "{}: {} of {count} requests failed:\n  {}",
        target.name,
        measured.errors,
        measured.reasons.join("\n  ")
    );
    Ok(())
}

fn row(soak: &args::Soak, pair: &Pair, requests: u64) -> Result<Row> {
    let status = idle_status(soak.control_url)?;
    let floor = pair.baseline.process.resident_mb()?;
    let ours = pair.contender.process.resident_mb()?;
    let row = Row {
        requests,
        floor_rss_mb: floor,
        ours_rss_mb: ours,
        above_floor_mb_per_worker: (ours - floor) / f64::from(soak.workers.max(1)),
        memory_pages: status.vms.iter().map(|vm| vm.memory_pages).collect(),
    };
    println!(
        "| {} | {:.1} | {:.1} | {:.1} | {:?} |",
        row.requests,
        row.floor_rss_mb,
        row.ours_rss_mb,
        row.above_floor_mb_per_worker,
        row.memory_pages,
    );
    Ok(row)
}

/// The status once no request is alive: VMs publish theirs from time to time.
fn idle_status(control: SocketAddr) -> Result<Status> {
    let deadline = Instant::now() + IDLE_LIMIT;
    loop {
        let status = status(control)?;
        if status.live_flows == 0 {
            return Ok(status);
        }
        ensure!(
            Instant::now() < deadline,
            "{} requests are alive {IDLE_LIMIT:?} after the last answer",
            status.live_flows
        );
        thread::sleep(IDLE_PAUSE);
    }
}

/// The filter's own view, from its control endpoint.
fn status(control: SocketAddr) -> Result<Status> {
    let mut stream = TcpStream::connect_timeout(&control, CONTROL_LIMIT)
        .with_context(|| format!("connecting to the control endpoint {control}"))?;
    stream.set_read_timeout(Some(CONTROL_LIMIT))?;
    stream.write_all(b"GET /pd/v1/status HTTP/1.1\r\nhost: pd-bench\r\n\r\n")?;
    let mut response = Response::default();
    let mut buffer = vec![0; 16 << 10];
    while !response.is_complete() {
        let count = stream.read(&mut buffer).context("reading the status")?;
        ensure!(count > 0, "the control endpoint closed the connection");
        response.push(buffer.get(..count).unwrap_or_default())?;
    }
    ensure!(
        response.status() == 200,
        "the control endpoint answered {}",
        response.status()
    );
    serde_json::from_slice(response.body()).context("the status is not as expected")
}
