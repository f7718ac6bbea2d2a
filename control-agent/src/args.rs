//! Flags, their environment fallbacks and the YAML file → a validated [`Config`].
//!
//! One table, [`SETTINGS`], names every setting; help, environment and file follow from it. A
//! flag wins over its variable, that over the file, that over the default; an empty value
//! counts as not given. Every mistake is collected before anything is refused. Exception, for
//! AIBrix deployments that move over: a bad `AIBRIX_*` variable is a warning and its default
//! stands, as there.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::Value;

use crate::backoff::random_word;
use crate::push::{Credentials, EnvoyUrl};
use crate::scrape::Schedule;

/// Time between two looks at the pods file.
const POLL: Duration = Duration::from_millis(500);
/// Variable with the token: a flag would show it to every process.
const TOKEN_VARIABLE: &str = "PD_AGENT_TOKEN";

/// One setting.
struct Setting {
    /// Flag, and key of the YAML file.
    name: &'static str,
    variable: &'static str,
    value: &'static str,
    /// Given more than once: flags repeat, the variable is comma-separated, the file has a list.
    many: bool,
    /// A bad variable is only a warning.
    lenient: bool,
    default: Option<&'static str>,
    help: &'static str,
}

const fn setting(
    name: &'static str,
    variable: &'static str,
    value: &'static str,
    default: Option<&'static str>,
    help: &'static str,
) -> Setting {
    Setting {
        name,
        variable,
        value,
        many: false,
        lenient: false,
        default,
        help,
    }
}

const PODS_FILE: Setting = setting(
    "pods-file",
    "PD_AGENT_PODS_FILE",
    "FILE",
    None,
    "Pods to route to: a Kubernetes Pod List in YAML or JSON, as `kubectl get pods -o json` \
     prints it; a bare list and several YAML documents work too. Read again when it changes. A \
     pod without status.conditions counts as ready if it has a status.podIP",
);

/// Every setting of the agent.
const SETTINGS: &[Setting] = &[
    PODS_FILE,
    Setting {
        many: true,
        ..setting(
            "envoy",
            "PD_AGENT_ENVOY",
            "URL",
            None,
            "Control listener of an Envoy to feed, http://HOST:PORT; may be repeated \
             (comma-separated in the variable)",
        )
    },
    setting(
        "token-file",
        "PD_AGENT_TOKEN_FILE",
        "FILE",
        None,
        "File with the bearer token of the control listeners; read again after a 401. The token \
         itself can be given in PD_AGENT_TOKEN instead",
    ),
    setting(
        "listen",
        "PD_AGENT_LISTEN",
        "ADDR",
        Some("127.0.0.1:9464"),
        "Where to serve /metrics, /healthz and /readyz; port 0 takes a free one and logs it",
    ),
    setting(
        "agent-id",
        "PD_AGENT_ID",
        "ID",
        None,
        "Name of this agent in reports about two agents that feed one Envoy [default: host name \
         and a random suffix]",
    ),
    Setting {
        lenient: true,
        ..setting(
            "refresh-interval-ms",
            "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS",
            "MS",
            Some("200"),
            "Time between two scrapes of a pod and two pushes of samples, 10 to 60000",
        )
    },
    setting(
        "scrape-budget",
        "PD_AGENT_SCRAPE_BUDGET",
        "N",
        Some("200"),
        "Most scrapes per second over all pods, 1 to 10000; the interval stretches to keep it",
    ),
    setting(
        "scrape-timeout-ms",
        "PD_AGENT_SCRAPE_TIMEOUT_MS",
        "MS",
        Some("1000"),
        "Longest time for one scrape, 10 to 60000",
    ),
    setting(
        "scrape-concurrency",
        "PD_AGENT_SCRAPE_CONCURRENCY",
        "N",
        Some("32"),
        "Most scrapes at the same time, 1 to 1024",
    ),
    setting(
        "push-timeout-ms",
        "PD_AGENT_PUSH_TIMEOUT_MS",
        "MS",
        Some("2000"),
        "Longest time for one push, 10 to 60000",
    ),
    setting(
        "log-format",
        "PD_AGENT_LOG_FORMAT",
        "FORMAT",
        Some("text"),
        "Format of the log on standard error: text or json",
    ),
    setting(
        "log-filter",
        "PD_AGENT_LOG",
        "FILTER",
        Some("info"),
        "What is logged: off, error, warn, info, debug, trace, or directives like pd_agent=debug",
    ),
];

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
    /// Control listeners of the Envoys to feed, at least one.
    pub envoys: Vec<EnvoyUrl>,
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

/// The command line.
pub fn command() -> Command {
    let arg = |setting: &Setting| {
        let mut help = format!("{} [env: {}]", setting.help, setting.variable);
        if let Some(default) = setting.default {
            help.push_str(&format!(" [default: {default}]"));
        }
        let action = if setting.many {
            ArgAction::Append
        } else {
            ArgAction::Set
        };
        Arg::new(setting.name)
            .long(setting.name)
            .value_name(setting.value)
            .action(action)
            .help(help)
    };
    let config = Arg::new("config").long("config").value_name("FILE").help(
        "YAML file with settings; its keys are the flags' names, flags and variables win \
         [env: PD_AGENT_CONFIG]",
    );
    let check = Command::new("check")
        .about("Checks a pods file and prints a table; exit code 1 if anything is wrong")
        .arg(arg(&PODS_FILE));
    Command::new("pd-agent")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Tells the filters of its Envoys which pods exist and how loaded they are")
        .after_help(
            "Exit code: 0 stopped on SIGTERM or SIGINT, 1 failed, 2 called wrongly (every \
             mistake is named).",
        )
        .args_conflicts_with_subcommands(true)
        .args(SETTINGS.iter().map(arg))
        .arg(config)
        .subcommand(check)
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
    let config = Config {
        pods_file: sources.pods_file(),
        poll: POLL,
        envoys: sources.envoys(),
        credentials: sources.credentials(),
        listen: sources.listen(),
        agent_id: sources.agent_id(),
        schedule: Schedule {
            refresh: Duration::from_millis(sources.number("refresh-interval-ms", ms.clone())),
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

/// Values of one setting and where they are from.
#[derive(Clone, Debug)]
struct Given {
    place: String,
    values: Vec<String>,
    lenient: bool,
}

/// All settings given, and the mistakes found so far.
struct Sources<'a> {
    given: BTreeMap<&'static str, Given>,
    environment: &'a dyn Fn(&str) -> Option<String>,
    mistakes: Vec<String>,
    warnings: Vec<String>,
}

impl<'a> Sources<'a> {
    fn new(
        matches: &ArgMatches,
        environment: &'a dyn Fn(&str) -> Option<String>,
        settings: &[Setting],
    ) -> Self {
        let mut given = BTreeMap::new();
        for setting in settings {
            let flags = matches
                .get_many::<String>(setting.name)
                .into_iter()
                .flatten();
            let flags: Vec<String> = flags.filter(|value| !value.is_empty()).cloned().collect();
            let variable = environment(setting.variable).filter(|value| !value.trim().is_empty());
            let found = if !flags.is_empty() {
                Given {
                    place: format!("--{}", setting.name),
                    values: flags,
                    lenient: false,
                }
            } else if let Some(value) = variable {
                let values = if setting.many {
                    value
                        .split(',')
                        .map(|part| part.trim().to_owned())
                        .collect()
                } else {
                    vec![value]
                };
                Given {
                    place: setting.variable.to_owned(),
                    values,
                    lenient: setting.lenient,
                }
            } else {
                continue;
            };
            given.insert(setting.name, found);
        }
        Self {
            given,
            environment,
            mistakes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn finish(self, invocation: Invocation) -> Result<Invocation, Refusal> {
        if self.mistakes.is_empty() {
            Ok(invocation)
        } else {
            Err(Refusal::Mistakes(self.mistakes))
        }
    }

    fn mistake(&mut self, text: String) {
        self.mistakes.push(text);
    }

    /// Adds what only the file names.
    fn read_file(&mut self, path: &Path) {
        let shown = path.display();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => return self.mistake(format!("config file {shown}: {error}")),
        };
        let entries = match serde_norway::from_str::<Option<serde_json::Map<String, Value>>>(&text)
        {
            Ok(entries) => entries.unwrap_or_default(),
            Err(error) => return self.mistake(format!("config file {shown}: {error}")),
        };
        for (key, value) in entries {
            let place = format!("config file {shown}: {key}");
            let Some(setting) = SETTINGS.iter().find(|setting| setting.name == key) else {
                self.mistake(format!("{place}: no such setting"));
                continue;
            };
            let values = match value {
                Value::Null => continue,
                Value::Array(values) if setting.many => values.iter().map(scalar).collect(),
                value => scalar(&value).map(|value| vec![value]),
            };
            let Some(values) = values else {
                self.mistake(format!("{place}: not a plain value"));
                continue;
            };
            let given = Given {
                place,
                values,
                lenient: false,
            };
            self.given.entry(setting.name).or_insert(given);
        }
    }

    /// The single value of a setting; of repeated ones clap keeps none.
    fn value(&self, name: &str) -> Option<(Given, String)> {
        let given = self.given.get(name)?;
        let value = given.values.first()?.trim().to_owned();
        (!value.is_empty()).then(|| (given.clone(), value))
    }

    fn pods_file(&mut self) -> PathBuf {
        let Some((given, value)) = self.value("pods-file") else {
            self.mistake("--pods-file: needed, there is no other source of pods".to_owned());
            return PathBuf::new();
        };
        if let Err(error) = std::fs::File::open(&value) {
            self.mistake(format!("{}: cannot read {value:?}: {error}", given.place));
        }
        value.into()
    }

    fn envoys(&mut self) -> Vec<EnvoyUrl> {
        let Some(given) = self.given.get("envoy").cloned() else {
            self.mistake("--envoy: at least one is needed".to_owned());
            return Vec::new();
        };
        let mut envoys = Vec::new();
        for value in given.values {
            match value.trim().parse() {
                Ok(url) if envoys.contains(&url) => {
                    self.mistake(format!("{}: {value:?} is given twice", given.place));
                }
                Ok(url) => envoys.push(url),
                Err(wrong) => self.mistake(format!("{}: {value:?} is {wrong}", given.place)),
            }
        }
        envoys
    }

    fn credentials(&mut self) -> Credentials {
        let token = (self.environment)(TOKEN_VARIABLE).filter(|token| !token.trim().is_empty());
        let (place, credentials) = match (self.value("token-file"), token) {
            (None, None) => return Credentials::None,
            (Some((given, path)), None) => (given.place, Credentials::File(path.into())),
            (None, Some(token)) => (TOKEN_VARIABLE.to_owned(), Credentials::Fixed(token)),
            (Some((given, _)), Some(_)) => {
                self.mistake(format!("{}: {TOKEN_VARIABLE} is set as well", given.place));
                return Credentials::None;
            }
        };
        if let Err(wrong) = credentials.header() {
            self.mistake(format!("{place}: {wrong}"));
        }
        credentials
    }

    fn listen(&mut self) -> SocketAddr {
        let (place, value) = self.text("listen");
        value.parse().unwrap_or_else(|_| {
            self.mistake(format!("{place}: {value:?} is not of the form IP:PORT"));
            SocketAddr::from(([127, 0, 0, 1], 0))
        })
    }

    fn agent_id(&mut self) -> String {
        let Some((given, id)) = self.value("agent-id") else {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let host = Some(host.trim())
                .filter(|host| !host.is_empty())
                .unwrap_or("pd-agent");
            return format!("{host}-{:08x}", random_word() & 0xffff_ffff);
        };
        if id.len() > 253 || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            let place = given.place;
            self.mistake(format!(
                "{place}: {id:?} is not 1 to 253 printable ASCII characters"
            ));
        }
        id
    }

    fn log(&mut self) -> Log {
        let (place, value) = self.text("log-format");
        let format = match value.as_str() {
            "text" => LogFormat::Text,
            "json" => LogFormat::Json,
            _ => {
                self.mistake(format!("{place}: {value:?} is neither text nor json"));
                LogFormat::Text
            }
        };
        let (place, filter) = self.text("log-filter");
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&filter) {
            self.mistake(format!("{place}: {filter:?}: {error}"));
        }
        Log { format, filter }
    }

    /// Value of a setting that has a default, and where it is from.
    fn text(&self, name: &str) -> (String, String) {
        self.value(name)
            .map(|(given, value)| (given.place, value))
            .unwrap_or_else(|| (format!("--{name}"), default(name).to_owned()))
    }

    fn number(&mut self, name: &str, range: std::ops::RangeInclusive<u64>) -> u64 {
        let default = default(name).parse().unwrap_or(*range.start());
        let Some((given, value)) = self.value(name) else {
            return default;
        };
        if let Ok(number) = value.parse()
            && range.contains(&number)
        {
            return number;
        }
        let (least, most) = (range.start(), range.end());
        let text = format!(
            "{}: {value:?} is not a number from {least} to {most}",
            given.place
        );
        if given.lenient {
            self.warnings.push(format!("{text}: {default}"));
        } else {
            self.mistake(text);
        }
        default
    }
}

fn default(name: &str) -> &'static str {
    let setting = SETTINGS.iter().find(|setting| setting.name == name);
    setting
        .and_then(|setting| setting.default)
        .unwrap_or_default()
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}
