//! The simulated vLLM over loopback, against what was measured of the real one.

// clippy's exemption for tests covers test functions only, not the client they share.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

#[allow(dead_code, reason = "each engine's tests use a part of it")]
mod wire;

mod binary;
mod client;
mod connection;
mod errors;
mod faults;
mod handover;
mod lease;
mod metrics;
mod protocol;
