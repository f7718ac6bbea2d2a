//! Flags, their environment fallbacks and the YAML file → a validated [`Config`].
//!
//! One table (`settings`) names every setting; help, environment and file follow from it. A
//! flag wins over its variable, that over the file, that over the default; an empty value
//! counts as not given. Every mistake is collected before anything is refused. Exception, for
//! AIBrix deployments that move over: a bad `AIBRIX_*` variable is a warning and its default
//! stands, as there.

mod settings;
mod sources;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use settings::command;
use settings::{PODS_FILE, SETTINGS};
use sources::Sources;

use crate::push::{Credentials, EnvoyUrl};
use crate::scrape::Schedule;
use crate::tokenizers::Source;

/// Time between two looks at the pods file.
const POLL: Duration = Duration::from_millis(500);

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// How to log.
#[derive(Clone, Debug)]
pub struct Log {
    /// Format of each event.
    pub format: LogFormat,
    /// Directives of `tracing-subscriber`'s filter, known to parse.
    pub filter: String,
}

/// A validated configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// The pods file.
    pub pods_file: PathBuf,
    /// Time between two looks at it.
    pub poll: Duration,
    /// Tokenizers to push.
    pub tokenizers: Vec<Source>,
    /// Control listeners of the Envoys to feed, at least one.
    pub envoys: Vec<EnvoyUrl>,
    /// Gateways that share the rate limits.
    pub replicas: u32,
    /// Token of the control listeners.
    pub credentials: Credentials,
    /// Where to serve the agent's own pages.
    pub listen: SocketAddr,
    /// Name of this agent.
    pub agent_id: String,
    /// How engines are scraped.
    pub schedule: Schedule,
    /// Longest time for one push.
    pub push_timeout: Duration,
    /// How to log.
    pub log: Log,
    /// What was passed over, to be logged once.
    pub warnings: Vec<String>,
}

/// Options of `pd-agent check`.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// The pods file.
    pub pods_file: PathBuf,
    /// Longest time for one connection attempt.
    pub timeout: Duration,
}

/// What was asked for.
#[derive(Debug)]
pub enum Invocation {
    /// Run the agent.
    Run(Box<Config>),
    /// Check a pods file.
    Check(CheckOptions),
}

/// Why nothing is run.
#[derive(Debug)]
pub enum Refusal {
    /// Help or version was asked for, or a flag is unknown.
    Usage(clap::Error),
    /// Everything that is wrong with the values.
    Mistakes(Vec<String>),
}

impl Refusal {
    /// Prints it where it belongs.
    pub fn print(&self) {
        match self {
            // Nothing can be done about a closed terminal.
            Self::Usage(error) => drop(error.print()),
            Self::Mistakes(mistakes) => {
                for mistake in mistakes {
                    eprintln!("pd-agent: {mistake}");
                }
                eprintln!("pd-agent: try --help");
            }
        }
    }

    /// Exit code: 0 for help and version, 2 otherwise.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(error) => u8::try_from(error.exit_code()).unwrap_or(2),
            Self::Mistakes(_) => 2,
        }
    }
}

/// Reads arguments, environment and file.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Invocation, Refusal> {
    let matches = command()
        .try_get_matches_from(arguments)
        .map_err(Refusal::Usage)?;
    if let Some(matches) = matches.subcommand_matches("check") {
        let mut sources = Sources::new(matches, environment, &[PODS_FILE]);
        let pods_file = sources.pods_file();
        let timeout = Duration::from_secs(1);
        return sources.finish(Invocation::Check(CheckOptions { pods_file, timeout }));
    }
    let mut sources = Sources::new(&matches, environment, SETTINGS);
    let file = matches.get_one::<String>("config").cloned();
    if let Some(file) = file
        .or_else(|| environment("PD_AGENT_CONFIG"))
        .filter(|f| !f.is_empty())
    {
        sources.read_file(Path::new(&file));
    }
    let ms = 10..=60_000;
    let envoys = sources.envoys();
    let replicas = match sources.number("gateway-replicas", 0..=10_000) {
        0 => envoys.len().max(1) as u64,
        replicas => replicas,
    };
    let config = Config {
        pods_file: sources.pods_file(),
        poll: POLL,
        tokenizers: sources.tokenizers(),
        envoys,
        replicas: u32::try_from(replicas).unwrap_or(u32::MAX),
        credentials: sources.credentials(),
        listen: sources.listen(),
        agent_id: sources.agent_id(),
        schedule: Schedule {
            refresh: Duration::from_millis(sources.number("refresh-interval-ms", 10..=600_000)),
            budget: u32::try_from(sources.number("scrape-budget", 1..=10_000)).unwrap_or(1),
            timeout: Duration::from_millis(sources.number("scrape-timeout-ms", ms.clone())),
            concurrency: usize::try_from(sources.number("scrape-concurrency", 1..=1024))
                .unwrap_or(1),
        },
        push_timeout: Duration::from_millis(sources.number("push-timeout-ms", ms)),
        log: sources.log(),
        warnings: std::mem::take(&mut sources.warnings),
    };
    sources.finish(Invocation::Run(Box::new(config)))
}

#[cfg(test)]
mod tests;
