//! The whole agent over loopback, between fake engines and fake Envoys.

mod fixtures;
mod pods;
mod push;
mod scrape;
mod shutdown;
