//! What a test can read about an engine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::Role;
use crate::core::Death;
use crate::fault::Fault;

/// What the admin endpoint tells about an engine. Counts are since the start or the last
/// `reset-counters`; `running`, `waiting`, `kv_held*`, `kv_used_blocks`,
/// `rooms_open` and `connections_open` are of now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Name of the engine.
    pub name: String,
    /// Role label.
    pub role: Role,
    /// Whether the port is open.
    pub listening: bool,
    /// Generation requests that arrived.
    pub requests_total: u64,
    /// Generation requests in work.
    pub running: u64,
    /// Generation requests that wait for a slot, for KV blocks or for their other leg.
    pub waiting: u64,
    /// Requests whose client left before the answer was complete.
    pub aborted: u64,
    /// Connections open on the engine's port.
    pub connections_open: u64,
    /// Connections accepted on the engine's port.
    pub connections_total: u64,
    /// How often the engine died.
    pub deaths: u64,
    /// The deaths, oldest first, at most 64.
    pub death_causes: Vec<Death>,
    /// The KV held and moved.
    #[serde(flatten)]
    pub kv: KvState,
    /// Where two legs of a request meet.
    #[serde(flatten)]
    pub rooms: RoomState,
    /// Aborts by call.
    #[serde(flatten)]
    pub aborts: AbortState,
    /// Faults armed.
    pub faults: Vec<Fault>,
}

/// The KV side of a [`State`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvState {
    /// Sequences whose KV waits for a decode engine.
    pub kv_held: u64,
    /// Their blocks.
    pub kv_held_blocks: u64,
    /// Blocks in use, held or by running requests.
    pub kv_used_blocks: u64,
    /// Sequences a decode engine pulled.
    pub kv_taken: u64,
    /// Sequences whose lease ended.
    pub kv_expired: u64,
    /// Sequences freed because a decode engine refused the request that named them.
    pub kv_freed_by_refusal: u64,
    /// Sequences freed because the decode engine's client left before the pull.
    pub kv_freed_by_abort: u64,
    /// Claims of ids that hold nothing (any more), for whatever reason.
    pub after_expiry: u64,
    /// Those of them that generated from whatever the blocks held by then.
    pub stale_pulls: u64,
    /// Pulls refused at this engine: wrong engine id or blocks out of range.
    pub pulls_refused: u64,
    /// Prompts pulled from another engine.
    pub pulled: u64,
    /// Pulls that failed, at the decode engine.
    pub pulls_failed: u64,
    /// Prompts this engine computed for its own generation.
    pub computed_locally: u64,
    /// Prompts this engine computed to hand over.
    pub computed_for_others: u64,
}

/// The rooms of a [`State`]: SGLang's, and TensorRT-LLM's with generation first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomState {
    /// At a prefill engine the rooms with a leg in them, at a decode engine its requests that
    /// are in one.
    pub rooms_open: u64,
    /// Rooms in which both legs were (at the prefill engine, as all that follow).
    pub rooms_met: u64,
    /// Rooms whose KV was taken.
    pub rooms_done: u64,
    /// Rooms a leg left before the KV was taken.
    pub rooms_failed: u64,
    /// Legs that waited for the other one until their timeout; counted by the leg's engine.
    pub rooms_timed_out: u64,
    /// Legs that found one of their kind in the room.
    pub rooms_duplicate: u64,
}

/// The aborts of a [`State`], asked for with SGLang's `POST /abort_request`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortState {
    /// Calls that arrived.
    pub abort_calls: u64,
    /// Requests that were in work and ended by a call.
    pub aborted_by_call: u64,
    /// Calls by `rid`, at most 4096 different ones.
    pub abort_rids: BTreeMap<String, u64>,
}

/// What an engine holds at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// See [`State::running`].
    pub running: u64,
    /// See [`State::waiting`].
    pub waiting: u64,
    /// See [`KvState::kv_held`].
    pub kv_held: u64,
    /// See [`RoomState::rooms_open`].
    pub rooms_open: u64,
}
