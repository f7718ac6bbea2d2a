//! SGLang with PD disaggregation (0.5), as a router meets it.
//!
//! # What a pair's request needs
//! Both legs are `POST /v1/chat/completions` or `/v1/completions` with the same body and
//! * `bootstrap_room`: an integer of 0 to 2^63 - 1, the same in both, used by no other request at
//!   the same time. Missing: 400, on either leg. Larger, negative, a list, not integral: 400 (what
//!   a real one does with such a room differs by version; a router must not send it).
//! * `bootstrap_host`, `bootstrap_port`: where the decode engine finds the prefill engine's
//!   bootstrap server ([`side_channel_port`](crate::EngineConfig::side_channel_port); 8998 when
//!   absent). The prefill engine does not look at them.
//! * `rid`: id of the request and of the answer. At one engine two at a time with the same are a
//!   400; absent, the engine makes one.
//!
//! # What happens
//! The prefill leg waits (bootstrap queue) until the decode leg is in the room too, computes,
//! waits until the KV was taken, and only then answers: 200 with one token. The decode leg waits
//! in the room for the KV and then generates. Whichever comes first does not matter.
//! A leg alone waits for its timeout (300 s, [`lease_ms`](crate::EngineConfig::lease_ms)) and is
//! answered 500; so does a second leg of the same kind in one room (`rooms_duplicate`). When a
//! leg's client leaves, or it is aborted, the other leg is answered 500. A prefill engine that is
//! not reachable at `bootstrap_host:bootstrap_port` gives the decode leg a 500 after
//! [`closed_port_delay_ms`](crate::EngineConfig::closed_port_delay_ms) (a real one asks 15 times,
//! once a second); the prefill leg knows nothing of that and waits.
//! With [`Role::Both`] (no disaggregation) the bootstrap members are ignored.
//!
//! # Aborts
//! `POST /abort_request {"rid": "...", "abort_all": false}` answers 200 with an empty body,
//! whatever it finds. Only a `rid` that is in work does something, and then to all requests whose
//! `rid` *starts* with it. A request that waits for its other leg is answered 500; one that
//! generates ends with `finish_reason` `abort`, a 200.
//!
//! # Errors
//! `{"object":"error","message":...,"type":...,"param":null,"code":status}`; in a stream the event
//! `data: {"error":{...}}` and `data: [DONE]`. Response headers of a stream go out before
//! anything else is known ([`early_headers`](crate::EngineConfig::early_headers)). The model name
//! is not checked, only echoed. A full queue
//! ([`max_num_queued_reqs`](crate::EngineConfig::max_num_queued_reqs)) is a 503.
//!
//! [`Role::Both`]: crate::Role::Both

mod abort;
mod metrics;
mod request;
mod work;

use std::sync::Arc;

use hyper::header::{HeaderValue, SERVER};
use hyper::{Method, Response, StatusCode};
use serde_json::json as value;

use self::abort::Aborts;
use self::request::{Job, error};
use self::work::Leg;
use crate::channel::Channel;
use crate::config::Role;
use crate::core::{Core, Count, unix_ms};
use crate::delivery::Delivery;
use crate::engine::Exchange;
use crate::fault::On;
use crate::flight::Flight;
use crate::openai::{Capacity, Meters, Route, Run, Voice};
use crate::reply::{Reply, json_of, not_found, respond, wrong_method};
use crate::rooms::{JOIN, Rooms};
use crate::state::{Held, KvState};
use crate::strike::strike;

const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const VOICE: Voice = Voice {
    message: r#","reasoning_content":null,"tool_calls":null"#,
    delta: r#","reasoning_content":null,"tool_calls":null"#,
    choice: r#","matched_stop":null"#,
    chunk_choice: r#","matched_stop":null"#,
    usage: r#","prompt_tokens_details":null,"reasoning_tokens":0"#,
    end: r#","metadata":{"weight_version":"default"}"#,
    finish_apart: true,
};

/// One SGLang engine.
pub(crate) struct Sglang {
    core: Arc<Core>,
    capacity: Capacity,
    pub(crate) rooms: Arc<Rooms>,
    pub(crate) aborts: Arc<Aborts>,
    channel: Channel,
    meters: Meters,
    tallies: Tallies,
    queues: Queues,
}

/// See [`KvState`].
#[derive(Default)]
struct Tallies {
    taken: Count,
    pulled: Count,
    pulls_failed: Count,
    computed_locally: Count,
    computed_for_others: Count,
}

/// Requests by where they wait.
#[derive(Default)]
struct Queues {
    /// A prefill leg alone in its room.
    bootstrap: Count,
    /// A prefill leg whose KV is being taken.
    inflight: Count,
    /// A decode leg without blocks.
    prealloc: Count,
    /// A decode leg that waits for its KV.
    transfer: Count,
    bootstrap_failed: Count,
    transfer_failed: Count,
}

impl Sglang {
    pub(crate) fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self {
            capacity: Capacity::new(&core.config),
            rooms: Arc::default(),
            aborts: Arc::default(),
            channel: Channel::new(),
            meters: Meters::new(),
            tallies: Tallies::default(),
            queues: Queues::default(),
            core: Arc::clone(core),
        })
    }

    /// A new process: metrics at zero. Its requests ended with their connections.
    pub(crate) fn restart(&self) {
        self.meters.reset();
        self.queues.bootstrap_failed.reset();
        self.queues.transfer_failed.reset();
    }

    /// Zeroes what is counted for tests.
    pub(crate) fn reset_counters(&self) {
        let t = &self.tallies;
        for count in [
            &t.taken,
            &t.pulled,
            &t.pulls_failed,
            &t.computed_locally,
            &t.computed_for_others,
        ] {
            count.reset();
        }
        self.rooms.reset();
        self.aborts.reset();
    }

    /// What is held and counted: KV is held from its computing until the decode engine took it.
    pub(crate) fn kv_state(&self) -> KvState {
        let t = &self.tallies;
        KvState {
            kv_held: self.rooms.holding(),
            kv_used_blocks: self.capacity.kv.usage().2,
            kv_taken: t.taken.get(),
            pulled: t.pulled.get(),
            pulls_failed: t.pulls_failed.get(),
            computed_locally: t.computed_locally.get(),
            computed_for_others: t.computed_for_others.get(),
            ..KvState::default()
        }
    }

    /// Answers a decode engine.
    pub(crate) async fn side_channel(&self, path: &str, body: &[u8]) -> Response<Reply> {
        match path {
            // The bootstrap server's own.
            "/health" => respond(StatusCode::OK, "text/plain; charset=utf-8", "OK"),
            JOIN if self.core.config.role == Role::Prefill => self.rooms.receive(body, None).await,
            _ => not_found(),
        }
    }

    /// Answers a request on the engine's port.
    pub(crate) async fn handle(self: &Arc<Self>, exchange: Exchange) -> Response<Reply> {
        let post = exchange.parts.method == Method::POST;
        let path = exchange.parts.uri.path();
        let mut response = match (Route::of(path), path) {
            (Some(route), _) if post => self.infer(route, exchange).await,
            (None, "/abort_request") if post => self.abort(exchange).await,
            (Some(_), _) | (None, "/abort_request") => {
                self.note(exchange);
                wrong_method("POST")
            }
            _ => self.answer(exchange).await,
        };
        let headers = response.headers_mut();
        headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
        response
    }

    fn held(&self) -> Held {
        self.core.held(self.rooms.holding(), self.rooms.open())
    }

    fn note(&self, exchange: Exchange) {
        let Exchange {
            parts, body, peer, ..
        } = exchange;
        let journal = &self.core.journal;
        journal.note(parts, &body, peer, None, || self.held());
    }

    async fn abort(&self, exchange: Exchange) -> Response<Reply> {
        let fault = self.core.faults.draw(On::Abort);
        let (link, body) = (Arc::clone(&exchange.link), exchange.body.clone());
        self.aborts.called(&body);
        self.note(exchange);
        if let Some(fault) = fault
            && let Some(answer) = strike(&self.core, &fault, &link, injected).await
        {
            return answer;
        }
        match self.aborts.call(&body) {
            Ok(()) => respond(StatusCode::OK, "application/json", ""),
            Err(problem) => error(StatusCode::BAD_REQUEST, "Bad Request", &problem),
        }
    }

    /// Everything else.
    async fn answer(&self, exchange: Exchange) -> Response<Reply> {
        let get = exchange.parts.method == Method::GET;
        let path = exchange.parts.uri.path();
        let answer: fn(&Self) -> Response<Reply> = match path {
            "/health" | "/health_generate" => |_| Response::new(Reply::full("")),
            "/metrics" => |engine| respond(StatusCode::OK, METRICS_TYPE, engine.metrics()),
            "/v1/models" => Self::models,
            "/server_info" | "/get_server_info" | "/model_info" | "/get_model_info" => Self::info,
            _ => {
                self.note(exchange);
                return not_found();
            }
        };
        if !get {
            self.note(exchange);
            return wrong_method("GET");
        }
        if matches!(path, "/health" | "/metrics") {
            // Polled all the time, so kept out of the log.
            if let Some(fault) = self.core.faults.draw(On::Scrape)
                && let Some(answer) = strike(&self.core, &fault, &exchange.link, injected).await
            {
                return answer;
            }
        } else {
            self.note(exchange);
        }
        answer(self)
    }

    fn models(&self) -> Response<Reply> {
        let config = &self.core.config;
        let model = value!({
            "id": config.model,
            "object": "model",
            "created": unix_ms() / 1000,
            "owned_by": "sglang",
            "root": config.model,
            "parent": null,
            "max_model_len": config.max_model_len,
        });
        json_of(
            StatusCode::OK,
            &value!({ "object": "list", "data": [model] }),
        )
    }

    fn info(&self) -> Response<Reply> {
        let config = &self.core.config;
        let mode = match config.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "null",
        };
        let info = value!({
            "model_path": config.model,
            "served_model_name": config.model,
            "is_generation": true,
            "disaggregation_mode": mode,
            "dp_size": config.dp_size,
            "tp_size": config.tp_size,
        });
        json_of(StatusCode::OK, &info)
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
        let job = Job::read(route, &parts.headers, &body, core);
        let leg = match core.config.role {
            Role::Prefill => On::Prefill,
            Role::Decode | Role::Both => On::Decode,
        };
        core.journal
            .note(parts, &body, peer, Some(leg), || self.held());
        drop(body);
        let fault = core.faults.draw(leg);
        if let Some(fault) = &fault
            && let Some(answer) = strike(core, fault, &link, injected).await
        {
            flight.land();
            return answer;
        }
        let refused = job.and_then(|job| {
            job.refusal(self)?;
            let alive = self.aborts.enter(&job.rid);
            let duplicate = || format!("Duplicate request ID detected: {}", job.rid);
            let alive = alive.ok_or_else(|| request::bad_request(&duplicate()))?;
            Ok((job, alive))
        });
        let (job, alive) = match refused {
            Ok(accepted) => accepted,
            Err(refusal) => {
                flight.land();
                return error(refusal.status, refusal.kind, &refusal.message);
            }
        };
        let most_tokens = match core.config.role {
            Role::Prefill => 1,
            Role::Decode | Role::Both => core.pace().tokens,
        };
        let run = Run {
            core: Arc::clone(core),
            ask: job.ask.clone(),
            id: job.rid.clone(),
            model: job.ask.model.clone(),
            voice: &VOICE,
            abort: Some(alive.abort()),
            work: Leg::new(self, job, alive),
            delivery: Delivery {
                flight,
                link,
                fault,
            },
            most_tokens,
            early_headers: core.config.early_headers,
        };
        run.respond().await
    }
}

/// The answer of an injected status.
fn injected(status: StatusCode) -> Response<Reply> {
    error(status, "InternalServerError", "Injected.")
}
