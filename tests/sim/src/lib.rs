//! Simulated inference engines for prefill/decode tests, demos and load runs.
//!
//! An engine is an HTTP server on loopback that speaks one inference engine's protocol without
//! computing anything: it answers with the shapes, delays, metrics and failure modes of the real
//! one, keeps a ledger of the KV blocks it holds for decode engines, and injects faults on demand.
//! What the generated text says ([`Identity`]) lets a test prove which request, which prompt and
//! whose KV produced an answer.
//!
//! What each protocol asks of a request and answers is told in its module: `vllm/mod.rs`,
//! `sglang/mod.rs` and `trtllm/mod.rs`.
//!
//! Start one with [`start`], or several in one process with the `pd-engine-sim` binary.
//! Invariants: every queue, log and table is bounded; nothing here trusts its input not to be
//! hostile except the admin paths, which are for the test that started the engine.

mod admin;
mod channel;
mod config;
mod core;
mod delivery;
mod engine;
mod fault;
mod flight;
mod identity;
mod journal;
mod kv;
mod measure;
mod openai;
mod prompt;
mod protocol;
mod reply;
mod rooms;
mod server;
mod sglang;
mod state;
mod strike;
mod trtllm;
mod vllm;

pub use config::{
    ConfigError, EngineConfig, EngineKind, LoadFailure, Pace, PaceChange, Role, Transceiver,
};
pub use core::Death;
pub use engine::{Engine, start};
pub use fault::{Cut, Every, Fault, FaultKind, On, Times};
pub use identity::{Identity, prompt_hash};
pub use journal::Record;
pub use state::{AbortState, Held, KvState, RoomState, State};
