//! End-to-end tests: a real Envoy with two workers, a real agent, simulated engines.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

mod agent;
mod bodies;
mod config;
mod documented;
mod ejection;
mod errors;
mod faults;
mod idle;
mod matrix;
mod observe;
mod oldest;
mod orphan;
mod pause;
mod reload;
mod retry;
mod routing;
mod security;
mod sglang;
mod streaming;
mod traps;
mod trtllm;
mod up;
mod upgrade;
mod waiting;
mod watchdog;
