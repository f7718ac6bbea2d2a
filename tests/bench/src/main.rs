//! `pd-bench`: what the gateway costs, measured against two plain Envoy legs by hand.
//!
//! Measures servers that already run (`scripts/bench.sh` starts them). One thread drives all
//! connections, because client, engines and Envoy share the machine and whatever the client spends
//! is missing from the throughput of what is measured. Every answer is checked: status 200, and
//! written from the KV of its own prompt; anything else fails the run.

mod args;
mod connection;
mod load;
mod matrix;
mod measured;
mod process;
mod prompt;
mod report;
mod response;
mod soak;
mod spread;
mod target;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Args, Command};

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Floor(floor) => floor
            .targets()
            .and_then(|pair| matrix::compare(pair, &floor.matrix)),
        Command::Ab(ab) => ab
            .targets()
            .and_then(|pair| matrix::compare(pair, &ab.matrix)),
        Command::Soak(soak) => soak::run(&soak),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pd-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
