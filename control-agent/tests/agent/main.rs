//! The whole agent over loopback, between fake engines and fake Envoys.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

mod fixtures;
mod pods;
mod push;
mod scrape;
mod shutdown;
mod tokenizers;
