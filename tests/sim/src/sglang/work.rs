//! One leg of a request: the room, the prompt, the KV.

use std::sync::Arc;
use std::time::Instant;

use hyper::{Response, StatusCode};

use super::Sglang;
use super::abort::Alive;
use super::request::{Job, error, error_event};
use crate::config::Role;
use crate::delivery::Delivery;
use crate::kv::Allocation;
use crate::openai::{Ended, Failure, Finish, Ready, Work};
use crate::reply::Reply;
use crate::rooms::{self, Join, Reason, Seat, VisitError};
use crate::strike::stall;

/// A request in work.
pub(super) struct Leg {
    engine: Arc<Sglang>,
    job: Job,
    alive: Alive,
    arrived: Instant,
}

/// What a prompt's KV is made of.
struct Kv {
    allocation: Allocation,
    taken: Option<(u64, String)>,
    started: Instant,
}

impl Leg {
    pub(super) fn new(engine: &Arc<Sglang>, job: Job, alive: Alive) -> Self {
        Self {
            engine: Arc::clone(engine),
            job,
            alive,
            arrived: Instant::now(),
        }
    }

    fn fail(&self, doing: &str, reason: &str) -> Failure {
        let room = self.job.room.unwrap_or_default();
        let message = format!(
            "{doing} failed for request rank=0 req.rid='{}' req.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}): {reason}",
            self.job.rid
        );
        Failure {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            message,
        }
    }

    fn timed_out(&self, state: &str) -> String {
        self.engine.rooms.timed_out();
        let seconds = self.engine.core.pace().lease().as_secs_f64();
        let room = self.job.room.unwrap_or_default();
        format!("Request {room} timed out after {seconds:.1}s in KVPoll.{state}")
    }

    /// Without disaggregation.
    async fn plain(&self, delivery: &mut Delivery) -> Kv {
        delivery.flight.wait(true);
        let allocation = self.engine.capacity.allocate(&self.job.ask).await;
        delivery.flight.wait(false);
        let started = Instant::now();
        self.engine.core.compute(self.job.ask.prompt.bytes).await;
        self.engine.tallies.computed_locally.up();
        Kv {
            allocation,
            taken: None,
            started,
        }
    }

    async fn prefill(&self, delivery: &mut Delivery) -> Result<Kv, Failure> {
        let engine = &self.engine;
        delivery.flight.wait(true);
        let mut seat = self.bootstrap().await.map_err(|reason| {
            engine.queues.bootstrap_failed.up();
            self.fail("Prefill bootstrap", &reason)
        })?;
        let allocation = self.engine.capacity.allocate(&self.job.ask).await;
        delivery.flight.wait(false);
        let started = Instant::now();
        self.engine.core.compute(self.job.ask.prompt.bytes).await;
        engine.tallies.computed_for_others.up();
        seat.ready(Some(self.job.ask.prompt.hash));
        let inflight = engine.queues.inflight.within();
        delivery.flight.wait(true);
        seat.taken().await.map_err(|reason| {
            engine.queues.transfer_failed.up();
            self.fail("Prefill transfer", &reason)
        })?;
        delivery.flight.wait(false);
        drop(inflight);
        engine.tallies.taken.up();
        Ok(Kv {
            allocation,
            taken: None,
            started,
        })
    }

    /// Waits in the room for the decode leg.
    async fn bootstrap(&self) -> Result<Seat, Reason> {
        let engine = &self.engine;
        let _queued = engine.queues.bootstrap.within();
        let lease = engine.core.pace().lease();
        let room = self.job.room.unwrap_or_default();
        let meet = async {
            let Some(seat) = engine.rooms.enter(room, rooms::Leg::Prefill) else {
                // The decode leg is the other request's.
                return std::future::pending().await;
            };
            seat.met().await.map(|()| seat)
        };
        match tokio::time::timeout(lease, meet).await {
            Ok(met) => met,
            Err(_) => Err(Reason::from(self.timed_out("Bootstrapping"))),
        }
    }

    async fn decode(&self, delivery: &mut Delivery) -> Result<Kv, Failure> {
        let engine = &self.engine;
        delivery.flight.wait(true);
        let prealloc = engine.queues.prealloc.within();
        let allocation = self.engine.capacity.allocate(&self.job.ask).await;
        drop(prealloc);
        let started = Instant::now();
        let transfer = engine.queues.transfer.within();
        let content = match tokio::time::timeout(engine.core.pace().lease(), self.visit()).await {
            Ok(visited) => visited,
            Err(_) => Err(self.fail("Decode transfer", &self.timed_out("WaitingForInput"))),
        };
        drop(transfer);
        delivery.flight.wait(false);
        let content = content.inspect_err(|_| engine.tallies.pulls_failed.up())?;
        engine.tallies.pulled.up();
        let room = self.job.room.unwrap_or_default();
        Ok(Kv {
            allocation,
            taken: Some((content, room.to_string())),
            started,
        })
    }

    async fn visit(&self) -> Result<u64, Failure> {
        let (engine, job) = (&self.engine, &self.job);
        let (port, pace) = (job.bootstrap_port, engine.core.pace());
        let join = Join {
            room: job.room.unwrap_or_default(),
            instance: None,
            transfer_ms: u64::try_from(pace.transfer().as_millis()).unwrap_or(u64::MAX),
        };
        let host = job.bootstrap_host.as_deref().unwrap_or("None");
        let visit = engine.rooms.visit(&engine.channel, host, port, &join);
        match visit.await {
            // No prompt hashes to 0 but by chance: it stands for a mixture of prompts.
            Ok(content) => Ok(content.unwrap_or(0)),
            Err(VisitError::Unreachable) => {
                engine.queues.bootstrap_failed.up();
                stall(Some(engine.core.config.closed_port_delay_ms)).await;
                let reason = format!("Could not fetch prefill parallel info from {host}:{port}");
                Err(self.fail("Decode handshake", &reason))
            }
            Err(VisitError::Lost) => {
                engine.queues.transfer_failed.up();
                let reason = format!(
                    "Lost connection with prefill instance (bootstrap_addr: {host}:{port})"
                );
                Err(self.fail("Decode transfer", &reason))
            }
            Err(VisitError::Failed(reason)) => {
                engine.queues.transfer_failed.up();
                Err(self.fail("Decode transfer", &reason))
            }
        }
    }

    async fn by_role(&self, delivery: &mut Delivery) -> Result<Kv, Failure> {
        match self.engine.core.config.role {
            Role::Prefill => self.prefill(delivery).await,
            Role::Decode => self.decode(delivery).await,
            Role::Both => Ok(self.plain(delivery).await),
        }
    }
}

impl Work for Leg {
    async fn prepare(&mut self, delivery: &mut Delivery) -> Result<Ready, Failure> {
        let abort = self.alive.abort();
        let waited = async {
            let kv = self.by_role(delivery).await?;
            delivery.flight.wait(true);
            let slot = self.engine.capacity.slot().await;
            delivery.flight.wait(false);
            Ok(Ready {
                allocation: kv.allocation,
                _slot: slot,
                taken: kv.taken,
                arrived: self.arrived,
                started: kv.started,
                first_token: Instant::now(),
            })
        };
        let doing = match self.engine.core.config.role {
            Role::Prefill => "Prefill bootstrap",
            Role::Decode | Role::Both => "Decode transfer",
        };
        let ready = tokio::select! {
            biased;
            () = abort.called() => Err(self.fail(doing, "Aborted by AbortReq.")),
            ready = waited => ready,
        };
        ready.inspect_err(|_| self.engine.meters.failed.up())
    }

    fn decoded(&self, tokens: u32) {
        self.engine.meters.decoded.add(u64::from(tokens));
    }

    fn settle(
        &mut self,
        ready: Ready,
        _: &Delivery,
        tokens: u32,
        finish: Finish,
    ) -> (String, String) {
        let ask = &self.job.ask;
        self.engine.meters.ended(Ended {
            finish,
            prompt_tokens: ask.prompt.tokens.saturating_mul(ask.prompt.count),
            tokens: tokens.saturating_mul(ask.sequences()),
            arrived: ready.arrived,
            started: ready.started,
            first_token: ready.first_token,
        });
        (String::new(), String::new())
    }

    fn refuse(&self, failure: &Failure) -> Response<Reply> {
        let kind = failure.status.as_str().to_owned();
        error(failure.status, &kind, &failure.message)
    }

    fn error_event(&self, failure: &Failure) -> Option<String> {
        Some(error_event(failure.status, &failure.message))
    }
}
