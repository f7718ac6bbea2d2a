//! `pd-engine-sim`: one or several simulated engines in a process.
//!
//! Prints one JSON line per engine when it listens, then `{"ready":true}` when all do. SIGTERM or
//! SIGINT ends it. Exit codes: 2 for a mistake in the arguments, 1 when an engine cannot start.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use pd_engine_sim::{Engine, EngineConfig, start};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// JSON file with a list of engine configurations (members as the flags, with underscores);
    /// the flags that describe an engine are ignored then.
    #[arg(long)]
    spec: Option<PathBuf>,
    /// Worker threads for all engines of the process.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    #[command(flatten)]
    engine: EngineConfig,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let configs = match configs(&args) {
        Ok(configs) => configs,
        Err(error) => {
            eprintln!("pd-engine-sim: {error:#}");
            return ExitCode::from(2);
        }
    };
    match serve(args.threads, configs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pd-engine-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn configs(args: &Args) -> anyhow::Result<Vec<EngineConfig>> {
    let configs = match &args.spec {
        None => vec![args.engine.clone()],
        Some(path) => {
            let text = std::fs::read(path).with_context(|| path.display().to_string())?;
            serde_json::from_slice(&text).with_context(|| path.display().to_string())?
        }
    };
    for config in &configs {
        config.validate().with_context(|| config.name.clone())?;
    }
    Ok(configs)
}

fn serve(threads: u16, configs: Vec<EngineConfig>) -> anyhow::Result<()> {
    // One worker is cheapest without the scheduler that shares work among several.
    let mut runtime = if threads == 1 {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    let runtime = runtime
        .worker_threads(usize::from(threads))
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut engines: Vec<Engine> = Vec::new();
        for config in configs {
            let name = config.name.clone();
            let engine = start(config).await.with_context(|| name.clone())?;
            let line = json!({
                "name": name,
                "address": engine.address().to_string(),
                "admin": engine.admin_address().to_string(),
            });
            println!("{line}");
            engines.push(engine);
        }
        println!("{}", json!({ "ready": true }));
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        for engine in engines {
            engine.stop().await;
        }
        Ok(())
    })
}
