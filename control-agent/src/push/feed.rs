//! The task that feeds one Envoy.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use pd_wire::control::PushReply;
use pd_wire::topology::MAX_MESSAGE;
use tokio::sync::watch;
use tokio::time::Instant;

use super::session::Session;
use super::tokenizers::TokenizerFeed;
use super::{Kind, Target};
use crate::backoff::{Backoff, random_word};
use crate::http::ExchangeError;
use crate::metrics::Metrics;
use crate::runtime::Stop;
use crate::scrape::{self, Board, Schedule};
use crate::snapshot::{Fleet, message};
use crate::tokenizers;

/// Samples are pushed at least this often: their refusal tells of a restarted Envoy.
const PROBE: Duration = Duration::from_secs(1);
/// Waits after failures.
const LEAST_WAIT: Duration = Duration::from_millis(100);
const MOST_WAIT: Duration = Duration::from_secs(5);
/// An Envoy that is not there costs nothing to try and wants its snapshot soon when it is back.
const MOST_CONNECT_WAIT: Duration = Duration::from_secs(1);
/// Pushes in a row that may follow 409s before it counts as a failure.
const ATTEMPTS: usize = 4;
/// After this long without a clash two agents are reported again.
const QUIET: Duration = Duration::from_secs(60);

/// Why a round of pushes failed.
#[derive(Debug, thiserror::Error)]
enum FeedError {
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("status {status}: {error}")]
    Refused { status: StatusCode, error: String },
    #[error("the message has {0} bytes, more than the {MAX_MESSAGE} a filter takes")]
    TooLong(usize),
    #[error("the message cannot be written: {0}")]
    Encoding(#[from] serde_json::Error),
    #[error("another agent feeds this Envoy")]
    Contested,
    #[error("refused again and again because of what the Envoy holds")]
    Unsettled,
}

/// All one feeding task needs.
pub struct Feed {
    /// The Envoy.
    pub target: Arc<Target>,
    /// Id of this agent.
    pub agent: String,
    /// First epoch, usually the wall clock's seconds.
    pub epoch: u64,
    /// How often engines are scraped: samples are pushed as often.
    pub schedule: Schedule,
    /// Gateways that share the rate limits.
    pub replicas: u32,
    /// Newest samples.
    pub board: Arc<Board>,
    /// Tokenizers to push.
    pub tokenizers: tokenizers::Receiver,
    /// Metrics.
    pub metrics: Arc<Metrics>,
}

impl Feed {
    /// Keeps the Envoy's snapshot the newest until `stop`; a push under way is finished.
    pub async fn run(
        self,
        mut fleets: watch::Receiver<Option<Arc<Fleet>>>,
        mut stop: Stop,
    ) -> anyhow::Result<()> {
        let session = Session::new(self.agent.clone(), self.epoch);
        let (agent, current) = (self.agent.clone(), self.tokenizers.clone());
        let tokenizers = TokenizerFeed::new(agent, self.epoch, current);
        let mut feeder = Feeder {
            feed: self,
            session,
            tokenizers,
            backoff: Backoff::new(LEAST_WAIT, MOST_WAIT),
            contest: Backoff::new(LEAST_WAIT, MOST_WAIT),
            failure: None,
            clash: None,
        };
        let mut next = Instant::now();
        let mut waiting = false;
        loop {
            tokio::select! {
                () = stop.requested() => return Ok(()),
                // While an Envoy fails, a changed fleet waits like everything else.
                changed = fleets.changed(), if !waiting => changed?,
                () = tokio::time::sleep_until(next) => {}
            }
            let fleet = fleets.borrow_and_update().clone();
            let wait = match fleet {
                Some(fleet) => feeder.round(&fleet).await,
                None => Ok(PROBE),
            };
            waiting = wait.is_err();
            next = Instant::now() + wait.unwrap_or_else(|wait| wait);
        }
    }
}

struct Feeder {
    feed: Feed,
    session: Session,
    tokenizers: TokenizerFeed,
    backoff: Backoff,
    /// Waits between two agents that alternate; a success in between does not end those.
    contest: Backoff,
    /// Last failure that was logged and still holds.
    failure: Option<String>,
    /// Other agent that was last reported, and when it was last met.
    clash: Option<(String, Instant)>,
}

impl Feeder {
    /// Pushes what the Envoy lacks. The time until the next round is an error's after a failure.
    async fn round(&mut self, fleet: &Arc<Fleet>) -> Result<Duration, Duration> {
        let begun = Instant::now();
        match self.push_all(fleet).await {
            Ok(()) => {
                self.backoff.reset();
                if self.failure.take().is_some() {
                    tracing::info!(envoy = self.feed.target.name(), "envoy takes pushes again");
                }
                let (target, metrics) = (&self.feed.target, &self.feed.metrics);
                self.tokenizers.round(target, metrics).await;
                let interval = self
                    .feed
                    .schedule
                    .interval(scrape::scraped(fleet))
                    .min(PROBE);
                Ok(interval.saturating_sub(begun.elapsed()))
            }
            Err(error) => {
                self.session.lost();
                let text = error.to_string();
                if self.failure.as_ref() != Some(&text) {
                    tracing::warn!(envoy = self.feed.target.name(), error = text, "push failed");
                    self.failure = Some(text);
                }
                let word = random_word();
                Err(match error {
                    FeedError::Contested => self.contest.wait(word),
                    FeedError::Exchange(ExchangeError::Connect(_)) => {
                        self.backoff.wait(word).min(MOST_CONNECT_WAIT)
                    }
                    _ => self.backoff.wait(word),
                })
            }
        }
    }

    async fn push_all(&mut self, fleet: &Arc<Fleet>) -> Result<(), FeedError> {
        for _ in 0..ATTEMPTS {
            if !self.session.holds(fleet) {
                let stamp = self.session.topology_stamp();
                let body = message::topology(fleet, self.feed.replicas, stamp.clone())?;
                if !self.push(Kind::Topology, body).await? {
                    continue;
                }
                self.session.topology_accepted(fleet.clone(), &stamp);
                self.tokenizers.unsettle();
                let (models, pods) = (fleet.models.len(), fleet.members.len());
                let (epoch, sequence) = (stamp.epoch, stamp.sequence);
                let envoy = self.feed.target.name();
                tracing::info!(
                    envoy,
                    epoch,
                    sequence,
                    models,
                    pods,
                    "topology acknowledged"
                );
            }
            let Some((stamp, topology_sequence)) = self.session.samples_stamp() else {
                continue;
            };
            let now = Instant::now();
            let samples = message::samples(fleet, &self.feed.board, stamp, topology_sequence, now);
            if self.push(Kind::Samples, samples.encode()).await? {
                return Ok(());
            }
        }
        Err(FeedError::Unsettled)
    }

    /// One push: true when it was accepted, false when the session has to catch up.
    async fn push(&mut self, kind: Kind, body: Vec<u8>) -> Result<bool, FeedError> {
        if body.len() > MAX_MESSAGE {
            return Err(FeedError::TooLong(body.len()));
        }
        let begun = Instant::now();
        let answer = self.feed.target.client.put(kind, body).await;
        let result = match &answer {
            Ok(answer) => answer.status.as_str().to_owned(),
            Err(error) => error.kind().to_owned(),
        };
        let name = self.feed.target.name();
        self.feed
            .metrics
            .pushed(name, kind.label(), result, begun.elapsed());
        let answer = answer?;
        match (answer.status, answer.reply) {
            (StatusCode::OK, _) => {
                self.feed.target.acknowledge(kind, Instant::now());
                Ok(true)
            }
            (StatusCode::CONFLICT, Some(held)) => self.conflict(kind, &held).map(|()| false),
            (status, reply) => {
                let error = reply.map(|reply| reply.error).unwrap_or_default();
                Err(FeedError::Refused { status, error })
            }
        }
    }

    fn conflict(&mut self, kind: Kind, held: &PushReply) -> Result<(), FeedError> {
        let Some(other) = self.session.refused(kind, held) else {
            return Ok(());
        };
        let (envoy, agent) = (self.feed.target.name(), self.feed.agent.as_str());
        self.feed.metrics.takeover(envoy);
        let now = Instant::now();
        let known = self.clash.as_ref().is_some_and(|(known, at)| {
            *known == other && now.saturating_duration_since(*at) < QUIET
        });
        let fed = self.feed.target.fed();
        if !known {
            self.contest.reset();
        }
        if !known && fed {
            tracing::warn!(envoy, agent, other, "two agents feed this Envoy");
        } else if !known {
            tracing::info!(envoy, agent, other, "taking over from another agent");
        }
        self.clash = Some((other, now));
        // The first time it is taken back at once; two agents that go on alternating do so
        // ever more slowly.
        if known && fed {
            Err(FeedError::Contested)
        } else {
            Ok(())
        }
    }
}
