//! The simulated TensorRT-LLM over loopback.

// clippy's exemption for tests covers test functions only, not the client they share.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

#[path = "../vllm/wire.rs"]
#[allow(dead_code, reason = "each engine's tests use a part of it")]
mod wire;

mod context_first;
mod faults;
mod generation_first;
mod protocol;
mod worker;
