//! What the end-to-end tests stand on: a real Envoy with the built filter, a real agent, and
//! simulated engines, all on loopback.
//!
//! A [`Stand`] owns everything a test started and stops it, by process id, when it is dropped.
//! Programs are found by [`Programs`]; one that is missing fails the test and names the script
//! that makes it, nothing is ever skipped. What a test waits for it polls with a bound
//! ([`eventually`]); the logs of a failed test are kept and named.

#![allow(
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a harness fails its test by panicking"
)]

mod agent;
mod client;
mod documented;
mod envoy;
mod load;
mod patience;
mod pods;
mod process;
mod programs;
mod stand;

pub use agent::Agent;
pub use client::{Answer, Call, Link, Live, Piece};
pub use documented::variables;
pub use envoy::{Envoy, EnvoyConfig};
pub use load::{Load, Outcomes};
pub use patience::{eventually, until, within};
pub use pods::{MODEL, Pod};
pub use programs::Programs;
pub use stand::{Stand, StandBuilder, chat_body, prompt_of};
