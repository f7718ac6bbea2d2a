//! One leg of a request: context, generation, or both.

use std::sync::Arc;
use std::time::Instant;

use hyper::{Response, StatusCode};

use super::params::{Context, Generation, Kind, Offer};
use super::request::{Job, worker_error};
use super::{TAKE, Take, Taken, Trtllm};
use crate::channel::CallError;
use crate::config::Transceiver;
use crate::delivery::Delivery;
use crate::kv::{Allocation, Content};
use crate::openai::{Ended, Failure, Finish, Ready, Work};
use crate::reply::Reply;
use crate::rooms::{self, Join, Seat, VisitError};
use crate::strike::stall;

/// A request in work.
pub(super) struct Leg {
    engine: Arc<Trtllm>,
    job: Job,
    arrived: Instant,
}

impl Leg {
    pub(super) fn new(engine: &Arc<Trtllm>, job: Job) -> Self {
        Self {
            engine: Arc::clone(engine),
            job,
            arrived: Instant::now(),
        }
    }

    /// Computes once the generation leg is there, and waits until it took the KV.
    async fn compute_for(&self, id: u64) -> Result<(), Failure> {
        let engine = &self.engine;
        let meet = async {
            let Some(seat) = engine.rooms.enter(id, rooms::Leg::Prefill) else {
                // The generation leg is the other request's.
                return std::future::pending().await;
            };
            seat.met().await.map(|()| seat)
        };
        let lease = engine.core.pace().lease();
        let mut seat: Seat = match tokio::time::timeout(lease, meet).await {
            Ok(met) => met.map_err(|_| transfer_failed("context"))?,
            Err(_) => {
                engine.rooms.timed_out();
                return Err(transfer_failed("context"));
            }
        };
        self.engine.core.compute(self.job.ask.prompt.bytes).await;
        engine.tallies.computed_for_others.up();
        seat.ready(Some(self.job.ask.prompt.hash));
        seat.taken().await.map_err(|_| transfer_failed("context"))?;
        engine.tallies.taken.up();
        Ok(())
    }

    /// Gets the KV of a context.
    async fn fetch(&self, generation: &Generation) -> Result<u64, Failure> {
        let engine = &self.engine;
        let fetch = async {
            if generation.generation_first {
                self.join(generation).await
            } else {
                self.take(generation).await
            }
        };
        let fetched = match tokio::time::timeout(engine.core.pace().lease(), fetch).await {
            Ok(fetched) => fetched,
            Err(_) => {
                engine.rooms.timed_out();
                None
            }
        };
        match fetched {
            Some(content) => {
                engine.tallies.pulled.up();
                // No prompt hashes to 0 but by chance: it stands for a mixture of prompts.
                Ok(content.unwrap_or(0))
            }
            None => {
                engine.tallies.pulls_failed.up();
                Err(transfer_failed("generation"))
            }
        }
    }

    async fn join(&self, generation: &Generation) -> Option<Content> {
        let engine = &self.engine;
        let (place, pace) = (&generation.place, engine.core.pace());
        let join = Join {
            room: generation.id,
            instance: Some(place.instance.clone()),
            transfer_ms: u64::try_from(pace.transfer().as_millis()).unwrap_or(u64::MAX),
        };
        let visit = engine
            .rooms
            .visit(&engine.channel, &place.host, place.port, &join);
        match visit.await {
            Ok(content) => Some(content),
            Err(VisitError::Unreachable) => {
                stall(Some(engine.core.config.closed_port_delay_ms)).await;
                None
            }
            Err(VisitError::Lost | VisitError::Failed(_)) => None,
        }
    }

    async fn take(&self, generation: &Generation) -> Option<Content> {
        let engine = &self.engine;
        let place = &generation.place;
        let transfer = engine.core.pace().transfer();
        if !transfer.is_zero() {
            tokio::time::sleep(transfer).await;
        }
        let take = Take {
            instance: place.instance.clone(),
            id: generation.id,
        };
        let call = engine.channel.call(&place.host, place.port, TAKE, &take);
        match call.await {
            Ok((StatusCode::OK, body)) => {
                let taken = serde_json::from_slice::<Taken>(&body);
                taken.ok().map(|taken| taken.content)
            }
            Err(CallError::Unreachable) => {
                stall(Some(engine.core.config.closed_port_delay_ms)).await;
                None
            }
            Ok(_) | Err(CallError::Broken) => None,
        }
    }

    /// Holds a context's KV for a generation worker.
    fn hold(&self, context: Context, allocation: Allocation, delivery: &Delivery) -> String {
        let engine = &self.engine;
        let id = context.id.unwrap_or_else(|| {
            engine.local_ids.up();
            engine.local_ids.get()
        });
        if !context.generation_first {
            let lease = engine.core.pace().lease();
            engine.capacity.kv.hold(&id.to_string(), allocation, lease);
            engine.tallies.computed_for_others.up();
        }
        let offer = Offer {
            id,
            disagg_id: context.id,
            generation_first: context.generation_first,
            endpoint: &engine.endpoint(),
            tells_endpoint: engine.core.config.transceiver == Transceiver::Python,
            first_token: (self.job.ask.prompt.hash & 0x7fff) as u32,
        };
        let offered = delivery.distort(Some(offer.write()));
        format!(
            r#","disaggregated_params":{}"#,
            offered.as_deref().unwrap_or("null")
        )
    }
}

fn transfer_failed(kind: &str) -> Failure {
    Failure {
        status: StatusCode::BAD_REQUEST,
        message: format!("Error in kv cache transfer for {kind} requests"),
    }
}

impl Work for Leg {
    async fn prepare(&mut self, delivery: &mut Delivery) -> Result<Ready, Failure> {
        delivery.flight.wait(true);
        let allocation = self.engine.capacity.allocate(&self.job.ask).await;
        let slot = self.engine.capacity.slot().await;
        let engine = &self.engine;
        let started = Instant::now();
        let taken = match &self.job.kind {
            Kind::Whole => {
                delivery.flight.wait(false);
                self.engine.core.compute(self.job.ask.prompt.bytes).await;
                engine.tallies.computed_locally.up();
                Ok(None)
            }
            Kind::Context(Context {
                id: Some(id),
                generation_first: true,
            }) => self.compute_for(*id).await.map(|()| None),
            Kind::Context(_) => {
                delivery.flight.wait(false);
                self.engine.core.compute(self.job.ask.prompt.bytes).await;
                Ok(None)
            }
            Kind::Generation(generation) => {
                let content = self.fetch(generation).await;
                content.map(|content| Some((content, generation.id.to_string())))
            }
        };
        let taken = taken.inspect_err(|_| engine.meters.failed.up())?;
        delivery.flight.wait(false);
        Ok(Ready {
            allocation,
            _slot: slot,
            taken,
            arrived: self.arrived,
            started,
            first_token: Instant::now(),
        })
    }

    fn decoded(&self, tokens: u32) {
        self.engine.meters.decoded.add(u64::from(tokens));
        self.engine.iterations.count();
    }

    fn settle(
        &mut self,
        ready: Ready,
        delivery: &Delivery,
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
        match &self.job.kind {
            Kind::Context(context) => {
                let ids = serde_json::Value::from(ask.prompt.token_ids());
                let choice = self.hold(*context, ready.allocation, delivery);
                (choice, format!(r#","prompt_token_ids":{ids}"#))
            }
            _ => (
                r#","disaggregated_params":null"#.to_owned(),
                r#","prompt_token_ids":null"#.to_owned(),
            ),
        }
    }

    fn refuse(&self, failure: &Failure) -> Response<Reply> {
        worker_error(failure.status, &failure.message)
    }

    fn error_event(&self, _: &Failure) -> Option<String> {
        None
    }
}
