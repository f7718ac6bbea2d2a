//! The built filter in the wasm host: what clients, engines, the agent and other workers see.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod abi;
mod bands;
mod bodies;
mod configure;
mod ejection;
mod endings;
mod faults;
mod ledger_vms;
mod matrix;
mod metrics;
mod orders;
mod orphan;
mod reload;
mod retry;
mod schedules;
mod sessions;
mod sglang;
mod snapshot;
mod spread;
mod stand;
mod strategies;
mod streaming;
mod timers;
mod tokenizers;
mod trtllm;
mod upgrade;
mod watchdog;
