//! Reading the engines' metric pages: who is due, at most how many at once, and what is known.
//!
//! Each ready pod has its own due time. After a success it is due one interval later, after a
//! failure after a growing wait; both with jitter, so that pods do not come due together. The
//! interval is the configured one unless the pods times the budget ask for a longer one.

pub mod board;
pub mod engine;
pub mod rates;
pub mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode};
use pd_wire::samples::PodSample;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use board::{Board, Sampled};
use engine::{Engine, Reading};
use rates::Counter;

use crate::backoff::{Backoff, fraction, random_word};
use crate::http::{Client, ExchangeError};
use crate::metrics::Metrics;
use crate::runtime::Stop;
use crate::snapshot::{Fleet, Member, MemberKey};

/// Largest metrics page, in bytes; vLLM's are about 100 KiB.
const MAX_PAGE: usize = 8 << 20;
/// Longest wait after repeated failures.
const MOST_WAIT: Duration = Duration::from_secs(5);
/// Idle connections are given up before uvicorn closes them (5 s).
const IDLE: Duration = Duration::from_secs(4);
/// Most engine names remembered as reported.
const MAX_REPORTED: usize = 64;

/// How engines are scraped.
#[derive(Clone, Debug)]
pub struct Schedule {
    /// Time between two scrapes of a pod, if the budget allows.
    pub refresh: Duration,
    /// Most scrapes per second over all pods.
    pub budget: u32,
    /// Longest time for one scrape.
    pub timeout: Duration,
    /// Most scrapes at the same time.
    pub concurrency: usize,
}

impl Schedule {
    /// Time between two scrapes of one pod when `pods` are scraped.
    pub fn interval(&self, pods: usize) -> Duration {
        let pods = u32::try_from(pods).unwrap_or(u32::MAX);
        let least = Duration::from_secs(1).saturating_mul(pods) / self.budget.max(1);
        self.refresh.max(least)
    }
}

/// Number of a fleet's pods that are scraped.
pub fn scraped(fleet: &Fleet) -> usize {
    fleet
        .members
        .iter()
        .filter(|member| member.ready && Engine::of(&member.engine).is_some())
        .count()
}

/// Scrapes the pods of the current fleet onto the board until `stop`.
pub async fn run(
    schedule: Schedule,
    mut fleets: watch::Receiver<Option<Arc<Fleet>>>,
    board: Arc<Board>,
    metrics: Arc<Metrics>,
    mut stop: Stop,
) -> anyhow::Result<()> {
    let client = Client::new(IDLE);
    let mut scraper = Scraper::new(schedule, board, metrics);
    let mut jobs: JoinSet<Done> = JoinSet::new();
    loop {
        let free = jobs.len() < scraper.schedule.concurrency;
        let due = scraper.queue.first().map(|(at, _)| *at).filter(|_| free);
        let due_at = due.unwrap_or_else(Instant::now);
        tokio::select! {
            () = stop.requested() => return Ok(()),
            changed = fleets.changed() => {
                changed?;
                let fleet = fleets.borrow_and_update().clone();
                if let Some(fleet) = fleet {
                    scraper.follow(&fleet, Instant::now());
                }
            }
            Some(done) = jobs.join_next(), if !jobs.is_empty() => {
                scraper.finish(done?, Instant::now());
            }
            () = tokio::time::sleep_until(due_at), if due.is_some() => {
                if let Some((key, member, engine)) = scraper.start() {
                    let (client, timeout) = (client.clone(), scraper.schedule.timeout);
                    jobs.spawn(async move {
                        let begun = Instant::now();
                        let page = fetch(&client, &member, engine, timeout).await;
                        Done { key, begun, page }
                    });
                }
            }
        }
    }
}

/// Why a scrape gave no sample.
#[derive(Debug, thiserror::Error)]
enum ScrapeError {
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("no metric of the engine on the page")]
    Foreign,
    #[error("not a valid address")]
    Address,
}

impl ScrapeError {
    fn kind(&self) -> &'static str {
        match self {
            Self::Exchange(error) => error.kind(),
            Self::Status(_) => "status",
            Self::Foreign => "page",
            Self::Address => "address",
        }
    }
}

async fn fetch(
    client: &Client,
    member: &Member,
    engine: Engine,
    timeout: Duration,
) -> Result<Reading, ScrapeError> {
    let request = Request::get(format!("http://{}{}", member.metrics, engine.path()))
        .header(hyper::header::ACCEPT, "text/plain")
        .body(Full::new(Bytes::new()))
        .map_err(|_| ScrapeError::Address)?;
    let (status, page) = client.exchange(request, MAX_PAGE, timeout).await?;
    if status != StatusCode::OK {
        return Err(ScrapeError::Status(status));
    }
    engine
        .read(&String::from_utf8_lossy(&page))
        .ok_or(ScrapeError::Foreign)
}

struct Done {
    key: MemberKey,
    begun: Instant,
    page: Result<Reading, ScrapeError>,
}

/// One pod that is scraped.
struct Target {
    member: Member,
    engine: Engine,
    /// When it is due; `None` while a scrape runs.
    due: Option<Instant>,
    backoff: Backoff,
    failing: bool,
    generation: Counter,
    finished: Counter,
}

struct Scraper {
    schedule: Schedule,
    board: Arc<Board>,
    metrics: Arc<Metrics>,
    targets: BTreeMap<MemberKey, Target>,
    queue: BTreeSet<(Instant, MemberKey)>,
    reported_engines: BTreeSet<String>,
}

impl Scraper {
    fn new(schedule: Schedule, board: Arc<Board>, metrics: Arc<Metrics>) -> Self {
        Self {
            schedule,
            board,
            metrics,
            targets: BTreeMap::new(),
            queue: BTreeSet::new(),
            reported_engines: BTreeSet::new(),
        }
    }

    fn interval(&self) -> Duration {
        self.schedule.interval(self.targets.len())
    }

    /// Takes over a changed fleet: pods that stay keep their counters.
    fn follow(&mut self, fleet: &Fleet, now: Instant) {
        let mut wanted = BTreeMap::new();
        for member in &fleet.members {
            match Engine::of(&member.engine) {
                Some(engine) if member.ready => {
                    wanted.insert(&member.key, (member, engine));
                }
                Some(_) => {}
                None => self.report_engine(&member.engine),
            }
        }
        self.targets.retain(|key, _| wanted.contains_key(key));
        let targets = &self.targets;
        self.queue.retain(|(_, key)| targets.contains_key(key));
        let interval = self.schedule.interval(wanted.len());
        for (key, (member, engine)) in wanted {
            if let Some(target) = self.targets.get_mut(key) {
                if target.engine != engine {
                    // Another engine's counters have nothing to do with these.
                    target.generation = Counter::new(engine.throughput_window());
                    target.finished = Counter::new(rates::DRAIN);
                }
                target.member = member.clone();
                target.engine = engine;
                continue;
            }
            // Spread over one interval, so that a new fleet does not come due at once.
            let due = now + interval.mul_f64(fraction(random_word()));
            self.queue.insert((due, key.clone()));
            let backoff = Backoff::new(interval, MOST_WAIT.max(interval));
            self.targets.insert(
                key.clone(),
                Target::new(member.clone(), engine, due, backoff),
            );
        }
        let keys: BTreeSet<&MemberKey> = fleet.members.iter().map(|member| &member.key).collect();
        self.board.retain(|key| keys.contains(key));
        self.metrics.scrape_plan(self.targets.len(), interval);
    }

    fn report_engine(&mut self, engine: &str) {
        if self.reported_engines.len() < MAX_REPORTED
            && self.reported_engines.insert(engine.to_owned())
        {
            tracing::warn!(
                engine,
                "pods of this engine are not scraped: its metrics are unknown"
            );
        }
    }

    /// Takes the pod that is due first.
    fn start(&mut self) -> Option<(MemberKey, Member, Engine)> {
        let (_, key) = self.queue.pop_first()?;
        let target = self.targets.get_mut(&key)?;
        target.due = None;
        Some((key, target.member.clone(), target.engine))
    }

    fn finish(&mut self, done: Done, now: Instant) {
        let Done { key, begun, page } = done;
        let interval = self.interval();
        self.metrics.scraped(
            page.as_ref().map(|_| ()).map_err(ScrapeError::kind),
            now.saturating_duration_since(begun),
        );
        // The pod left while it was scraped.
        let Some(target) = self.targets.get_mut(&key) else {
            return;
        };
        let due = match page {
            Ok(reading) => {
                target.backoff.reset();
                if std::mem::take(&mut target.failing) {
                    tracing::info!(pod = %target.member.metrics, "scraped again");
                }
                let load = target.load(now, &reading);
                self.board.put(key.clone(), Sampled { at: now, load });
                // Counted from the start, so that the answer's time does not lengthen it.
                begun + interval.mul_f64(0.9 + 0.2 * fraction(random_word()))
            }
            Err(error) => {
                if !std::mem::replace(&mut target.failing, true) {
                    let Member { key, metrics, .. } = &target.member;
                    tracing::warn!(namespace = key.namespace, pod = key.name, address = %metrics, %error, "scrape failed");
                }
                now + target.backoff.wait(random_word())
            }
        };
        let due = due.max(now);
        // A pod that left and came back while it was scraped is queued already.
        if let Some(queued) = target.due.replace(due) {
            self.queue.remove(&(queued, key.clone()));
        }
        self.queue.insert((due, key));
    }
}

impl Target {
    fn new(member: Member, engine: Engine, due: Instant, backoff: Backoff) -> Self {
        Self {
            member,
            engine,
            due: Some(due),
            backoff,
            failing: false,
            generation: Counter::new(engine.throughput_window()),
            finished: Counter::new(rates::DRAIN),
        }
    }

    fn load(&mut self, now: Instant, reading: &Reading) -> PodSample {
        let prefill_ms = match (reading.prefill_seconds, reading.prefills) {
            (Some(seconds), Some(count)) if count > 0.0 => Some(seconds * 1000.0 / count),
            _ => None,
        };
        PodSample {
            running: reading.running,
            waiting: reading.waiting,
            kv_usage: reading.kv_usage,
            generation_throughput: match reading.generation_tokens {
                Some(tokens) => self.generation.record(now, tokens),
                None => reading.generation_throughput,
            },
            drain_rate: reading
                .finished
                .and_then(|count| self.finished.record(now, count)),
            prefill_ms,
            ..PodSample::default()
        }
    }
}
