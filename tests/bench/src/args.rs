//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::matrix::Pair;
use crate::process::Process;
use crate::target::{Route, Target};

#[derive(Parser)]
#[command(version, about)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Compares the gateway with two plain Envoy legs sent by hand.
    Floor(Floor),
    /// Compares two gateways.
    Ab(Ab),
    /// Sends many small requests through both and watches memory.
    Soak(Soak),
}

/// The gateway and the two plain listeners.
#[derive(clap::Args)]
pub(crate) struct Servers {
    /// Plain Envoy listener in front of the prefill engines, HOST:PORT.
    #[arg(long, value_parser = address)]
    pub(crate) prefill_url: SocketAddr,
    /// Plain Envoy listener in front of the decode engines.
    #[arg(long, value_parser = address)]
    pub(crate) decode_url: SocketAddr,
    /// Process id of the plain Envoy.
    #[arg(long)]
    pub(crate) floor_pid: u32,
    /// Data listener of the gateway.
    #[arg(long, value_parser = address)]
    pub(crate) url: SocketAddr,
    /// Process id of the gateway's Envoy.
    #[arg(long)]
    pub(crate) pid: u32,
}

#[derive(clap::Args)]
pub(crate) struct Floor {
    #[command(flatten)]
    pub(crate) servers: Servers,
    #[command(flatten)]
    pub(crate) matrix: Matrix,
}

#[derive(clap::Args)]
pub(crate) struct Ab {
    /// Data listener of gateway A, the one compared with.
    #[arg(long, value_parser = address)]
    pub(crate) a_url: SocketAddr,
    /// Process id of A's Envoy.
    #[arg(long)]
    pub(crate) a_pid: u32,
    /// Data listener of gateway B.
    #[arg(long, value_parser = address)]
    pub(crate) b_url: SocketAddr,
    /// Process id of B's Envoy.
    #[arg(long)]
    pub(crate) b_pid: u32,
    #[command(flatten)]
    pub(crate) matrix: Matrix,
}

/// Which cells are measured, how often and for how long.
#[derive(clap::Args)]
pub(crate) struct Matrix {
    /// 3 short repeats instead of 7: a look, not a measurement.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Repeats; default 7, with --quick 3.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeats: Option<u32>,
    /// Time measured per target and repeat, in ms; default 1600, with --quick 600.
    #[arg(long)]
    pub(crate) window_ms: Option<u64>,
    /// The targets take turns of this many ms until each had its window.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) slice_ms: u64,
    /// Load before the measurement, in ms; default 300, with --quick 150.
    #[arg(long)]
    pub(crate) warm_up_ms: Option<u64>,
    /// Sizes of request bodies, in bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [200, 8 << 10, 128 << 10, 1 << 20])]
    pub(crate) sizes: Vec<usize>,
    /// Requests in flight.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    pub(crate) concurrency: Vec<usize>,
    /// `true`: answers are streamed.
    #[arg(long, value_delimiter = ',', action = clap::ArgAction::Set, default_values_t = [false, true])]
    pub(crate) stream: Vec<bool>,
    /// Model the engines serve.
    #[arg(long, default_value = "sim-model")]
    pub(crate) model: String,
    /// Where the JSON goes.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

#[derive(clap::Args)]
pub(crate) struct Soak {
    #[command(flatten)]
    pub(crate) servers: Servers,
    /// Control listener of the gateway.
    #[arg(long, value_parser = address)]
    pub(crate) control_url: SocketAddr,
    /// Requests through each of the two.
    #[arg(long, default_value_t = 200_000)]
    pub(crate) requests: u64,
    /// Worker VMs the growth is divided by.
    #[arg(long, default_value_t = 2)]
    pub(crate) workers: u32,
    /// Memory a worker VM may take above plain Envoy, in MB of 2^20 bytes.
    #[arg(long, default_value_t = 40.0)]
    pub(crate) limit_mb: f64,
    /// Model the engines serve.
    #[arg(long, default_value = "sim-model")]
    pub(crate) model: String,
    /// Where the JSON goes.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

// === impl Servers, Floor, Ab, Matrix ===

impl Servers {
    /// Two plain legs first, the gateway second.
    pub(crate) fn targets(&self) -> Result<Pair> {
        Ok(Pair {
            baseline: Target {
                name: "floor",
                route: Route::ByHand {
                    prefill: self.prefill_url,
                    decode: self.decode_url,
                },
                process: Process::open(self.floor_pid)?,
            },
            contender: Target {
                name: "ours",
                route: Route::Gateway(self.url),
                process: Process::open(self.pid)?,
            },
        })
    }
}

impl Floor {
    pub(crate) fn targets(&self) -> Result<Pair> {
        self.servers.targets()
    }
}

impl Ab {
    pub(crate) fn targets(&self) -> Result<Pair> {
        Ok(Pair {
            baseline: Target {
                name: "A",
                route: Route::Gateway(self.a_url),
                process: Process::open(self.a_pid)?,
            },
            contender: Target {
                name: "B",
                route: Route::Gateway(self.b_url),
                process: Process::open(self.b_pid)?,
            },
        })
    }
}

impl Matrix {
    pub(crate) fn repeats(&self) -> u32 {
        self.repeats.unwrap_or(if self.quick { 3 } else { 7 })
    }

    pub(crate) fn window(&self) -> Duration {
        let default = if self.quick { 600 } else { 1600 };
        Duration::from_millis(self.window_ms.unwrap_or(default))
    }

    pub(crate) fn slice(&self) -> Duration {
        Duration::from_millis(self.slice_ms)
    }

    /// Turns of each target in a repeat.
    pub(crate) fn turns(&self) -> usize {
        let turns = self
            .window()
            .as_millis()
            .div_ceil(u128::from(self.slice_ms.max(1)));
        usize::try_from(turns).unwrap_or(usize::MAX)
    }

    pub(crate) fn warm_up(&self) -> Duration {
        let default = if self.quick { 150 } else { 300 };
        Duration::from_millis(self.warm_up_ms.unwrap_or(default))
    }
}

/// An address, with or without `http://` before it and a slash behind it.
fn address(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix("http://").unwrap_or(text);
    let bare = bare.strip_suffix('/').unwrap_or(bare);
    bare.parse()
        .map_err(|_| format!("'{text}' is not http://IP:PORT"))
}
