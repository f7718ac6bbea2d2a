//! TensorRT-LLM 1.3.0rc8, one `trtllm-serve` worker, as a router meets it.
//!
//! # Request members
//! `POST /v1/chat/completions` and `/v1/completions`. A member the schema does not know is a 400,
//! at the top level and in `disaggregated_params` alike; so are `max_completion_tokens` on
//! completions, `max_tokens` and `max_completion_tokens` together on chat, and `stream_options`
//! without `stream`. `prompt_token_ids` (chat only) stand for `messages`, which have to be there
//! all the same; a list of integers as `prompt` does on completions.
//!
//! `disaggregated_params`, an object whose `request_type` decides what is done; without it the
//! worker does the whole request itself:
//! * `context_only`: `disagg_request_id`, at least 2^42 (smaller ones are the worker's own) and
//!   used by no other request at the same time; `schedule_style`.
//! * `generation_only`: `ctx_request_id` (required), `disagg_request_id`, `first_gen_tokens` (a list,
//!   required unless generation comes first), `encoded_opaque_state` and/or `ctx_info_endpoint` (a
//!   string: where the context worker is), `ctx_dp_rank`, `schedule_style`.
//!
//! Ids are integers below 2^63, written without point or exponent. `ctx_request_id` has to be
//! `disagg_request_id` where both are there, and the id in `encoded_opaque_state` where that is:
//! a value that went through a double is a 400 that says so (a real worker would look for another
//! request's context).
//!
//! # Context first (`schedule_style` 0 or absent)
//! The context worker computes the prompt and answers at once, 200 with one token:
//! `choices[0].disaggregated_params` is
//! `{"request_type":"context_only","first_gen_tokens":[..],"first_gen_log_probs":null,
//! "first_gen_logits":null,"ctx_request_id":N,"encoded_opaque_state":"..","draft_tokens":null,
//! "disagg_request_id":N or null,"ctx_dp_rank":0,"ctx_info_endpoint":"..","schedule_style":0,
//! "ctx_usage":null}`, and `prompt_token_ids` stands at the top level of the answer. There is no
//! `disaggregated_params` at the top level. The KV is held until a generation worker took it, or
//! for 60 s ([`lease_ms`](crate::EngineConfig::lease_ms)). The generation leg is the client's body
//! with these members, `request_type` set to `generation_only`, and the token ids as `prompt` or
//! `prompt_token_ids`. A context that is not there (any more) leaves the generation leg waiting
//! for 60 s, then it fails.
//!
//! # Generation first (`schedule_style` 1, both legs at once)
//! `GET /server_info` of the context worker: `{"disaggregated_params":{"ctx_dp_rank":0,
//! "ctx_info_endpoint":["tcp://host:port/instance"]}}`; with the C++ transceiver
//! ([`Transceiver::Cpp`]) `{"disaggregated_params":{}}`. The context leg carries `disagg_request_id`;
//! the generation leg the same as `disagg_request_id` and `ctx_request_id`, `ctx_dp_rank`, and the one
//! entry of `ctx_info_endpoint` as a string (a list is a 400). They meet by the id, in rooms: the
//! context leg computes when the generation leg is there and answers when its KV was taken. A leg
//! alone waits 60 s and fails; when one leaves, the other fails. A restarted worker has another
//! endpoint, and asking the old one is like a context that is not there.
//!
//! # Errors
//! Of the schema: 400 `{"error":"..."}`. Of the worker: `{"object":"error","message":...,
//! "type":"BadRequestError","param":null,"code":400}`, also when the transfer failed. A stream has
//! its headers by then and just breaks: no error event, no last chunk. The model name is not
//! checked; answers name the worker's own.
//!
//! # Metrics
//! `GET /prometheus/metrics`. `GET /metrics` is the list of iterations since the last reader, as
//! JSON, and forgets what it told. There is no way to abort but to close the connection.
//!
//! [`Transceiver::Cpp`]: crate::Transceiver::Cpp

mod metrics;
mod params;
mod request;
mod serve;
mod work;

use std::sync::{Arc, PoisonError, RwLock};

use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};

use self::metrics::Iterations;
use crate::channel::Channel;
use crate::core::{Core, Count};
use crate::kv::Content;
use crate::openai::{Capacity, Meters};
use crate::reply::{Reply, json_of, not_found};
use crate::rooms::{JOIN, Rooms};
use crate::state::KvState;

/// Path on which held KV is taken.
const TAKE: &str = "/sim/side-channel/take";

/// One TensorRT-LLM worker.
pub(crate) struct Trtllm {
    core: Arc<Core>,
    capacity: Capacity,
    pub(crate) rooms: Arc<Rooms>,
    channel: Channel,
    meters: Meters,
    iterations: Iterations,
    tallies: Tallies,
    /// Tells a process from the one before it.
    instance: RwLock<Arc<str>>,
    advertised_host: String,
    side_channel_port: u16,
    local_ids: Count,
}

/// See [`KvState`].
#[derive(Default)]
struct Tallies {
    taken: Count,
    expired: Count,
    missing: Count,
    pulled: Count,
    pulls_failed: Count,
    computed_locally: Count,
    computed_for_others: Count,
}

/// A generation worker's message: it takes held KV.
#[derive(Serialize, Deserialize)]
struct Take {
    instance: String,
    id: u64,
}

#[derive(Serialize, Deserialize)]
struct Taken {
    content: Content,
}

impl Trtllm {
    pub(crate) fn new(core: &Arc<Core>, side_channel_port: u16) -> Arc<Self> {
        let config = &core.config;
        let host = match config.host.as_str() {
            "0.0.0.0" | "::" | "" => "127.0.0.1",
            host => host,
        };
        let advertised = config.advertise_host.as_deref().unwrap_or(host);
        Arc::new(Self {
            capacity: Capacity::new(config),
            rooms: Arc::default(),
            channel: Channel::new(),
            meters: Meters::new(),
            iterations: Iterations::default(),
            tallies: Tallies::default(),
            instance: RwLock::new(new_instance(core)),
            advertised_host: advertised.to_owned(),
            side_channel_port,
            local_ids: Count::default(),
            core: Arc::clone(core),
        })
    }

    /// Frees held KV as its time ends, until the engine stops.
    pub(crate) async fn expire_held(self: Arc<Self>) {
        let mut gate = self.core.gate.subscribe();
        let expired = |count| self.tallies.expired.add(count);
        tokio::select! {
            () = self.capacity.kv.expire_all(|| self.core.pace().lease(), expired) => {}
            _ = gate.wait_for(|gate| gate.stopped) => {}
        }
    }

    /// Held KV may be freed sooner from now on.
    pub(crate) fn lease_changed(&self) {
        self.capacity.kv.lease_changed();
    }

    /// A new process: another endpoint, no KV, metrics at zero.
    pub(crate) fn restart(&self) {
        let instance = new_instance(&self.core);
        *self
            .instance
            .write()
            .unwrap_or_else(PoisonError::into_inner) = instance;
        self.capacity.kv.clear();
        self.meters.reset();
        self.iterations.reset();
    }

    /// Zeroes what is counted for tests.
    pub(crate) fn reset_counters(&self) {
        let t = &self.tallies;
        for count in [
            &t.taken,
            &t.expired,
            &t.missing,
            &t.pulled,
            &t.pulls_failed,
            &t.computed_locally,
            &t.computed_for_others,
        ] {
            count.reset();
        }
        self.rooms.reset();
    }

    /// What is held and counted.
    pub(crate) fn kv_state(&self) -> KvState {
        let (held, held_blocks, used) = self.capacity.kv.usage();
        let t = &self.tallies;
        KvState {
            kv_held: held.saturating_add(self.rooms.holding()),
            kv_held_blocks: held_blocks,
            kv_used_blocks: used,
            kv_taken: t.taken.get(),
            kv_expired: t.expired.get(),
            after_expiry: t.missing.get(),
            stale_pulls: t.missing.get(),
            pulled: t.pulled.get(),
            pulls_failed: t.pulls_failed.get(),
            computed_locally: t.computed_locally.get(),
            computed_for_others: t.computed_for_others.get(),
            ..KvState::default()
        }
    }

    fn instance(&self) -> Arc<str> {
        let instance = self.instance.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&instance)
    }

    /// Where generation workers find this one.
    fn endpoint(&self) -> String {
        let (host, port) = (&self.advertised_host, self.side_channel_port);
        format!("tcp://{host}:{port}/{}", self.instance())
    }

    /// Answers a generation worker.
    pub(crate) async fn side_channel(&self, path: &str, body: &[u8]) -> Response<Reply> {
        match path {
            JOIN => self.rooms.receive(body, Some(&self.instance())).await,
            TAKE => self.give(body).await,
            _ => not_found(),
        }
    }

    async fn give(&self, body: &[u8]) -> Response<Reply> {
        let Ok(take) = serde_json::from_slice::<Take>(body) else {
            return json_of(StatusCode::BAD_REQUEST, &());
        };
        if *take.instance == *self.instance()
            && let Some(content) = self.capacity.kv.take(&take.id.to_string())
        {
            self.tallies.taken.up();
            return json_of(StatusCode::OK, &Taken { content });
        }
        self.tallies.missing.up();
        std::future::pending().await
    }
}

fn new_instance(core: &Core) -> Arc<str> {
    Arc::from(format!("{:08x}", core.words.next() as u32))
}
