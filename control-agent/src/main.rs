//! `pd-agent`: arguments in, exit code out. 0: stopped on request; 1: failed; 2: called wrongly.

use std::process::ExitCode;

use pd_agent::args::{self, Invocation, LogFormat};
use pd_agent::{Config, check};
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let environment = |name: &str| std::env::var(name).ok();
    match args::parse(std::env::args_os(), &environment) {
        Ok(Invocation::Run(config)) => finish(serve(*config)),
        Ok(Invocation::Check(options)) => finish(check(options)),
        Err(refusal) => {
            refusal.print();
            ExitCode::from(refusal.code())
        }
    }
}

fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("pd-agent: {error:#}");
        ExitCode::FAILURE
    })
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
}

fn serve(config: Config) -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_new(&config.log.filter)?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match config.log.format {
        LogFormat::Text => log.with_ansi(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    for warning in &config.warnings {
        tracing::warn!(warning, "configuration");
    }
    runtime()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let shutdown = async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        pd_agent::run(config, shutdown).await?;
        Ok(ExitCode::SUCCESS)
    })
}

fn check(options: args::CheckOptions) -> anyhow::Result<ExitCode> {
    let report = runtime()?.block_on(check::check(&options))?;
    print!("{report}");
    Ok(if report.is_clean() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
