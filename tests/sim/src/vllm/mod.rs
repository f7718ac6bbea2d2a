//! vLLM 0.32 with the NIXL connector, pull mode.
//!
//! A prefill request (`do_remote_decode`) computes and leaves KV under a lease; a decode request
//! (`do_remote_prefill`) claims it from the engine that holds it. What is wrong with a hand-over
//! decides, as in the real engine, between an error, silently wrong text and the engine's death.

mod error;
mod fields;
mod metrics;
mod prepare;
mod pull;
mod request;
mod run;
mod settle;
mod shape;
mod stream;
mod transfer;

use std::sync::{Arc, PoisonError, RwLock};

use hyper::header::{CONTENT_ENCODING, HeaderValue, SERVER, VARY};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde_json::json as value;
use tokio::sync::Semaphore;

use self::error::Refusal;
use self::metrics::{Gauges, Meters};
use self::pull::{Duty, Reason};
use self::request::{Job, Route};
use self::run::Run;
use self::transfer::Transfer;
use crate::channel::Channel;
use crate::core::{Core, Count, unix_ms};
use crate::delivery::Delivery;
use crate::engine::Exchange;
use crate::fault::On;
use crate::flight::Flight;
use crate::kv::KvCache;
use crate::reply::{Reply, json_of, not_found, respond, wrong_method};
use crate::state::{Held, KvState};
use crate::strike::strike;

const METRICS_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

/// The version whose behaviour is simulated.
const VERSION: &str = "0.32.0";

/// One vLLM engine.
pub(crate) struct Vllm {
    core: Arc<Core>,
    kv: Arc<KvCache>,
    meters: Meters,
    tallies: Tallies,
    engine_id: RwLock<Arc<str>>,
    advertised_host: String,
    side_channel_port: u16,
    channel: Channel,
    slots: Option<Arc<Semaphore>>,
}

/// See [`KvState`].
#[derive(Default)]
struct Tallies {
    taken: Count,
    expired: Count,
    freed_by_refusal: Count,
    freed_by_abort: Count,
    after_expiry: Count,
    stale_pulls: Count,
    pulls_refused: Count,
    pulled: Count,
    pulls_failed: Count,
    computed_locally: Count,
    computed_for_others: Count,
}

impl Vllm {
    pub(crate) fn new(core: &Arc<Core>, side_channel_port: u16) -> Arc<Self> {
        let config = &core.config;
        let slots = config.max_num_seqs as usize;
        let host = match config.host.as_str() {
            "0.0.0.0" | "::" | "" => "127.0.0.1",
            host => host,
        };
        let advertised = config.advertise_host.as_deref().unwrap_or(host);
        Arc::new(Self {
            kv: KvCache::new(config.num_blocks, config.block_size),
            meters: Meters::new(),
            tallies: Tallies::default(),
            engine_id: RwLock::new(new_engine_id()),
            advertised_host: advertised.to_owned(),
            side_channel_port,
            channel: Channel::new(),
            slots: (slots > 0).then(|| Arc::new(Semaphore::new(slots))),
            core: Arc::clone(core),
        })
    }

    /// Frees held KV as its leases end, until the engine stops.
    pub(crate) async fn expire_leases(self: Arc<Self>) {
        let mut gate = self.core.gate.subscribe();
        let expired = |count| {
            self.tallies.expired.add(count);
            self.meters.expired.add(count);
        };
        tokio::select! {
            () = self.kv.expire_all(|| self.core.pace().lease(), expired) => {}
            _ = gate.wait_for(|gate| gate.stopped) => {}
        }
    }

    /// Leases may be shorter from now on.
    pub(crate) fn lease_changed(&self) {
        self.kv.lease_changed();
    }

    /// A new process: another engine id, no KV, metrics at zero.
    pub(crate) fn restart(&self) {
        *self
            .engine_id
            .write()
            .unwrap_or_else(PoisonError::into_inner) = new_engine_id();
        self.kv.clear();
        self.meters.reset();
    }

    /// Zeroes the tallies; the metrics are the process's own and stay.
    pub(crate) fn reset_counters(&self) {
        let t = &self.tallies;
        for count in [
            &t.taken,
            &t.expired,
            &t.freed_by_refusal,
            &t.freed_by_abort,
            &t.after_expiry,
            &t.stale_pulls,
            &t.pulls_refused,
            &t.pulled,
            &t.pulls_failed,
            &t.computed_locally,
            &t.computed_for_others,
        ] {
            count.reset();
        }
    }

    /// What is held and counted.
    pub(crate) fn kv_state(&self) -> KvState {
        let (held, held_blocks, used) = self.kv.usage();
        let t = &self.tallies;
        KvState {
            kv_held: held,
            kv_held_blocks: held_blocks,
            kv_used_blocks: used,
            kv_taken: t.taken.get(),
            kv_expired: t.expired.get(),
            kv_freed_by_refusal: t.freed_by_refusal.get(),
            kv_freed_by_abort: t.freed_by_abort.get(),
            after_expiry: t.after_expiry.get(),
            stale_pulls: t.stale_pulls.get(),
            pulls_refused: t.pulls_refused.get(),
            pulled: t.pulled.get(),
            pulls_failed: t.pulls_failed.get(),
            computed_locally: t.computed_locally.get(),
            computed_for_others: t.computed_for_others.get(),
        }
    }

    fn engine_id(&self) -> Arc<str> {
        let id = self
            .engine_id
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&id)
    }

    /// Answers a request on the engine's port.
    pub(crate) async fn handle(self: &Arc<Self>, exchange: Exchange) -> Response<Reply> {
        let mut response = match Route::of(exchange.parts.uri.path()) {
            Some(route) if exchange.parts.method == Method::POST => {
                self.infer(route, exchange).await
            }
            Some(_) => {
                self.note(exchange);
                wrong_method("POST")
            }
            None => self.answer(exchange).await,
        };
        let headers = response.headers_mut();
        headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
        headers.insert(VARY, HeaderValue::from_static("Origin"));
        response
    }

    fn held(&self) -> Held {
        self.core.held(self.kv.usage().0, 0)
    }

    fn note(&self, exchange: Exchange) {
        let Exchange {
            parts, body, peer, ..
        } = exchange;
        self.core
            .journal
            .note(parts, &body, peer, None, || self.held());
    }

    /// Everything but generation.
    async fn answer(&self, exchange: Exchange) -> Response<Reply> {
        let path = exchange.parts.uri.path();
        if path.starts_with("/inference/v1/") {
            let kind = "PermissionDeniedError";
            let refusal = Refusal::other(StatusCode::FORBIDDEN, kind, "Scale-out is not enabled.");
            self.note(exchange);
            return refusal.respond(None);
        }
        let get = exchange.parts.method == Method::GET;
        let answer: fn(&Self) -> Response<Reply> = match path {
            "/health" | "/ping" => |_| Response::new(Reply::full("")),
            "/metrics" => Self::metrics,
            "/v1/models" => Self::models,
            "/version" => |_| json_of(StatusCode::OK, &value!({ "version": VERSION })),
            "/load" => |_| json_of(StatusCode::OK, &value!({ "server_load": 0 })),
            _ => {
                self.note(exchange);
                return not_found();
            }
        };
        if !get {
            self.note(exchange);
            return wrong_method("GET");
        }
        if matches!(path, "/health" | "/ping" | "/metrics") {
            // Polled all the time, so kept out of the log.
            let fault = self.core.faults.draw(On::Scrape);
            if let Some(fault) = fault
                && let Some(answer) = strike(&self.core, &fault, &exchange.link, |status| {
                    injected(status, None)
                })
                .await
            {
                return answer;
            }
        } else {
            self.note(exchange);
        }
        answer(self)
    }

    fn metrics(&self) -> Response<Reply> {
        let config = &self.core.config;
        let (_, _, used_blocks) = self.kv.usage();
        let page = self.meters.page(&Gauges {
            counters: &self.core.counters,
            model: &config.model,
            used_blocks,
            capacity: self.kv.capacity(),
            block_size: config.block_size,
        });
        respond(StatusCode::OK, METRICS_TYPE, page)
    }

    fn models(&self) -> Response<Reply> {
        let config = &self.core.config;
        let model = value!({
            "id": config.model,
            "object": "model",
            "created": unix_ms() / 1000,
            "owned_by": "vllm",
            "root": config.model,
            "parent": null,
            "max_model_len": config.max_model_len,
        });
        json_of(
            StatusCode::OK,
            &value!({ "object": "list", "data": [model] }),
        )
    }

    /// Generation.
    async fn infer(self: &Arc<Self>, route: Route, exchange: Exchange) -> Response<Reply> {
        let Exchange {
            parts,
            body,
            peer,
            link,
        } = exchange;
        let core = &self.core;
        let mut flight = Flight::begin(core, &link);
        let job = read(route, &parts, &body, core);
        let leg = job.as_ref().ok().map(|job| match job.transfer {
            Transfer::Produce => On::Prefill,
            _ => On::Decode,
        });
        core.journal.note(parts, &body, peer, leg, || self.held());
        drop(body);
        let fault = core.faults.draw(leg.unwrap_or(On::Decode));
        if let Some(fault) = &fault
            && let Some(answer) =
                strike(core, fault, &link, |status| injected(status, Some(route))).await
        {
            flight.land();
            return answer;
        }
        let job = match job {
            Ok(job) => job,
            Err(refusal) => {
                flight.land();
                return refusal.respond(Some(route));
            }
        };
        let source = match &job.transfer {
            Transfer::Consume(remote) => remote.source(0).ok(),
            _ => None,
        };
        let mut duty = Duty::new(self, source);
        if let Some(refusal) = job.refusal(&core.config, u64::from(self.kv.capacity())) {
            duty.discharge(Reason::Refused);
            flight.land();
            return refusal.respond(Some(route));
        }
        let queue = u64::from(core.config.max_num_queued_reqs);
        if queue > 0 && core.counters.waiting.get() >= queue {
            self.meters.rejected();
            duty.forget();
            flight.land();
            return Refusal::busy().respond(Some(route));
        }
        let delivery = Delivery {
            flight,
            link,
            fault,
        };
        Run::new(self, job, delivery, duty).respond().await
    }
}

/// The answer of an injected status.
fn injected(status: StatusCode, route: Option<Route>) -> Response<Reply> {
    Refusal::other(status, "InternalServerError", "Injected.").respond(route)
}

fn new_engine_id() -> Arc<str> {
    Arc::from(uuid::Uuid::new_v4().to_string())
}

fn read(route: Route, parts: &Parts, body: &[u8], core: &Core) -> Result<Job, Refusal> {
    if parts.headers.contains_key(CONTENT_ENCODING) {
        return Err(Refusal::schema("body", "JSON decode error"));
    }
    Job::read(route, &parts.headers, body, &core.words)
}
