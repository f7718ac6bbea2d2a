//! The worker's HTTP side: paths, and a generation request from its arrival to its work.

use std::sync::Arc;

use hyper::header::{HeaderValue, SERVER};
use hyper::{Method, Response, StatusCode};
use serde_json::json as value;

use super::Trtllm;
use super::params::Kind;
use super::request::{Job, worker_error};
use super::work::Leg;
use crate::config::Transceiver;
use crate::core::unix_ms;
use crate::delivery::Delivery;
use crate::engine::Exchange;
use crate::fault::On;
use crate::flight::Flight;
use crate::openai::{Route, Run, Voice};
use crate::reply::{Reply, json, json_of, not_found, respond, wrong_method};
use crate::state::Held;
use crate::strike::strike;

const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The version whose behaviour is simulated.
const VERSION: &str = "1.3.0rc8";

const VOICE: Voice = Voice {
    message: r#","reasoning_content":null,"reasoning":null,"tool_calls":[]"#,
    delta: r#","reasoning_content":null,"reasoning":null,"tool_calls":null"#,
    choice: r#","stop_reason":null,"avg_decoded_tokens_per_iter":1.0"#,
    chunk_choice: r#","stop_reason":null,"avg_decoded_tokens_per_iter":1.0"#,
    usage: r#","prompt_tokens_details":{"cached_tokens":0}"#,
    end: "",
    finish_apart: false,
};

impl Trtllm {
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
        response
    }

    fn held(&self) -> Held {
        let held = self
            .capacity
            .kv
            .usage()
            .0
            .saturating_add(self.rooms.holding());
        self.core.held(held, self.rooms.open())
    }

    fn note(&self, exchange: Exchange) {
        let Exchange {
            parts, body, peer, ..
        } = exchange;
        let journal = &self.core.journal;
        journal.note(parts, &body, peer, None, || self.held());
    }

    /// Everything but generation.
    async fn answer(&self, exchange: Exchange) -> Response<Reply> {
        let get = exchange.parts.method == Method::GET;
        let path = exchange.parts.uri.path();
        let answer: fn(&Self) -> Response<Reply> = match path {
            "/health" => |_| Response::new(Reply::full("")),
            "/prometheus/metrics" => {
                |engine| respond(StatusCode::OK, METRICS_TYPE, engine.metrics())
            }
            "/metrics" => |engine| json(StatusCode::OK, engine.iterations.drain()),
            "/server_info" => Self::server_info,
            "/v1/models" => Self::models,
            "/version" => |_| json_of(StatusCode::OK, &value!({ "version": VERSION })),
            _ => {
                self.note(exchange);
                return not_found();
            }
        };
        if !get {
            self.note(exchange);
            return wrong_method("GET");
        }
        let on = match path {
            "/health" | "/prometheus/metrics" => Some(On::Scrape),
            "/server_info" => Some(On::Info),
            _ => None,
        };
        let link = Arc::clone(&exchange.link);
        if on != Some(On::Scrape) {
            // The others are polled all the time, so kept out of the log.
            self.note(exchange);
        }
        if let Some(fault) = on.and_then(|on| self.core.faults.draw(on))
            && let Some(answer) = strike(&self.core, &fault, &link, injected).await
        {
            return answer;
        }
        answer(self)
    }

    fn server_info(&self) -> Response<Reply> {
        let params = match self.core.config.transceiver {
            Transceiver::Cpp => value!({}),
            Transceiver::Python => {
                value!({ "ctx_dp_rank": 0, "ctx_info_endpoint": [self.endpoint()] })
            }
        };
        json_of(StatusCode::OK, &value!({ "disaggregated_params": params }))
    }

    fn models(&self) -> Response<Reply> {
        let model = value!({
            "id": self.core.config.model,
            "object": "model",
            "created": unix_ms() / 1000,
            "owned_by": "tensorrt_llm",
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
        let job = Job::read(route, &parts.headers, &body);
        let leg = job.as_ref().ok().map(|job| match &job.kind {
            Kind::Context(_) => On::Prefill,
            Kind::Whole | Kind::Generation(_) => On::Decode,
        });
        core.journal.note(parts, &body, peer, leg, || self.held());
        drop(body);
        let fault = core.faults.draw(leg.unwrap_or(On::Decode));
        if let Some(fault) = &fault
            && let Some(answer) = strike(core, fault, &link, injected).await
        {
            flight.land();
            return answer;
        }
        let job = match job.and_then(|job| job.accepted(self)) {
            Ok(job) => job,
            Err(refusal) => {
                flight.land();
                return refusal.respond();
            }
        };
        let most_tokens = match job.kind {
            Kind::Context(_) => 1,
            Kind::Whole | Kind::Generation(_) => core.pace().tokens,
        };
        let (first, second) = (core.words.next(), core.words.next());
        let prefix = match route {
            Route::Chat => "chatcmpl",
            Route::Completions => "cmpl",
        };
        let run = Run {
            core: Arc::clone(core),
            ask: job.ask.clone(),
            id: format!("{prefix}-{first:016x}{second:016x}"),
            model: core.config.model.clone(),
            voice: &VOICE,
            abort: None,
            work: Leg::new(self, job),
            delivery: Delivery {
                flight,
                link,
                fault,
            },
            most_tokens,
            early_headers: true,
        };
        run.respond().await
    }
}

/// The answer of an injected status.
fn injected(status: StatusCode) -> Response<Reply> {
    worker_error(status, "Injected.")
}
