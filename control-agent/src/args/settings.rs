//! The table of settings, and the command line made from it.

use clap::{Arg, ArgAction, Command};

/// One setting.
pub(super) struct Setting {
    /// Flag, and key of the YAML file.
    pub(super) name: &'static str,
    /// Environment variable.
    pub(super) variable: &'static str,
    value: &'static str,
    /// Given more than once: flags repeat, the variable is comma-separated, the file has a list.
    pub(super) many: bool,
    /// A bad variable is only a warning.
    pub(super) lenient: bool,
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

/// Source of pods, of the agent and of `check`.
pub(super) const PODS_FILE: Setting = setting(
    "pods-file",
    "PD_AGENT_PODS_FILE",
    "FILE",
    None,
    "Pods to route to: a Kubernetes Pod List in YAML or JSON, as `kubectl get pods -o json` \
     prints it; a bare list and several YAML documents work too. Read again when it changes. A \
     pod without status.conditions counts as ready if it has a status.podIP",
);

/// Every setting of the agent.
pub(super) const SETTINGS: &[Setting] = &[
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
    Setting {
        many: true,
        ..setting(
            "tokenizer",
            "PD_AGENT_TOKENIZER",
            "MODEL=FILE",
            None,
            "A model's Hugging Face tokenizer.json, at most 32 MiB: its prompts are counted, not \
             estimated, where their length decides. Read again when it changes; may be repeated, \
             at most 8 (comma-separated in the variable)",
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
            "Time between two scrapes of a pod and two pushes of samples, 10 to 600000",
        )
    },
    setting(
        "gateway-replicas",
        "PD_AGENT_GATEWAY_REPLICAS",
        "N",
        Some("0"),
        "Gateways that share the rate limits of profiles (requestsPerSecond), each an equal part; \
         0: as many as Envoys are fed here",
    ),
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

/// Default of a setting that has one.
pub(super) fn default(name: &str) -> &'static str {
    let setting = SETTINGS.iter().find(|setting| setting.name == name);
    setting
        .and_then(|setting| setting.default)
        .unwrap_or_default()
}
