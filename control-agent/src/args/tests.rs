use super::*;

fn pods_file() -> tempfile::NamedTempFile {
    tempfile::NamedTempFile::new().unwrap()
}

fn parsed(flags: &[&str], environment: &[(&str, &str)]) -> Result<Invocation, Refusal> {
    let arguments = std::iter::once("pd-agent")
        .chain(flags.iter().copied())
        .map(OsString::from);
    let environment = |name: &str| {
        let found = environment.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    parse(arguments, &environment)
}

fn config(flags: &[&str], environment: &[(&str, &str)]) -> Config {
    match parsed(flags, environment) {
        Ok(Invocation::Run(config)) => *config,
        other => panic!("{other:?}"),
    }
}

fn mistakes(flags: &[&str], environment: &[(&str, &str)]) -> Vec<String> {
    match parsed(flags, environment) {
        Err(Refusal::Mistakes(mistakes)) => mistakes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn defaults_stand_for_what_is_not_given() {
    let pods = pods_file();
    let path = pods.path().to_str().unwrap();
    let config = config(&["--pods-file", path, "--envoy", "http://127.0.0.1:1"], &[]);
    assert_eq!(config.pods_file, pods.path());
    assert_eq!(config.listen, "127.0.0.1:9464".parse().unwrap());
    assert_eq!(config.schedule.refresh, Duration::from_millis(200));
    assert_eq!(
        (config.schedule.budget, config.schedule.concurrency),
        (200, 32)
    );
    assert_eq!(config.push_timeout, Duration::from_secs(2));
    assert!(matches!(config.credentials, Credentials::None));
    assert_eq!(config.log.format, LogFormat::Text);
    assert!(!config.agent_id.is_empty());
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn a_flag_wins_over_its_variable_and_that_over_the_file() {
    let pods = pods_file();
    let path = pods.path().to_str().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "pods-file: {path}\nenvoy: [http://127.0.0.1:1, http://127.0.0.1:2]\n\
         listen: 127.0.0.1:1\nagent-id: file\nscrape-budget: 7\nlog-format:\n"
    );
    std::fs::write(file.path(), text).unwrap();
    let config = config(
        &["--agent-id", "flag"],
        &[
            ("PD_AGENT_CONFIG", file.path().to_str().unwrap()),
            ("PD_AGENT_ID", "variable"),
            ("PD_AGENT_LISTEN", "127.0.0.1:2"),
            ("PD_AGENT_SCRAPE_BUDGET", ""),
        ],
    );
    assert_eq!(config.agent_id, "flag");
    assert_eq!(config.listen, "127.0.0.1:2".parse().unwrap());
    assert_eq!(config.schedule.budget, 7);
    assert_eq!(config.envoys.len(), 2);
}

#[test]
fn several_envoys_come_from_repeated_flags_or_a_comma_separated_variable() {
    let pods = pods_file();
    let flags = ["--pods-file", pods.path().to_str().unwrap()];
    let variable = ("PD_AGENT_ENVOY", "http://127.0.0.1:1, http://127.0.0.1:2");
    assert_eq!(config(&flags, &[variable]).envoys.len(), 2);
    let repeated = [
        "--envoy",
        "http://127.0.0.1:3",
        "--envoy",
        "http://127.0.0.1:4",
    ];
    let both = config(&[&flags[..], &repeated[..]].concat(), &[variable]);
    assert_eq!(
        both.envoys,
        repeated[1..]
            .iter()
            .step_by(2)
            .map(|url| url.parse().unwrap())
            .collect::<Vec<_>>()
    );
}

#[test]
fn every_mistake_of_every_source_is_named_at_once() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "scrape-timeout-ms: 5\nlisten: [1]\nnothing: 1\n",
    )
    .unwrap();
    let found = mistakes(
        &[
            "--config",
            file.path().to_str().unwrap(),
            "--envoy",
            "https://h:1",
            "--envoy",
            "http://h:1",
            "--envoy",
            "http://h:1",
            "--log-filter",
            "pd_agent=loud",
            "--token-file",
            "/does/not/exist",
        ],
        &[
            ("PD_AGENT_LOG_FORMAT", "xml"),
            ("PD_AGENT_SCRAPE_BUDGET", "many"),
        ],
    );
    let expected = [
        "config file X: listen: not a plain value",
        "config file X: nothing: no such setting",
        "--pods-file: needed",
        "--envoy: \"https://h:1\" is not of the form http://HOST:PORT",
        "--envoy: \"http://h:1\" is given twice",
        "--token-file: ",
        "PD_AGENT_SCRAPE_BUDGET: \"many\" is not a number from 1 to 10000",
        "config file X: scrape-timeout-ms: \"5\" is not a number from 10 to 60000",
        "PD_AGENT_LOG_FORMAT: \"xml\" is neither text nor json",
        "--log-filter: \"pd_agent=loud\"",
    ];
    let path = file.path().display().to_string();
    for start in expected {
        let start = start.replace('X', &path);
        assert!(
            found.iter().any(|mistake| mistake.starts_with(&start)),
            "{start}: {found:#?}"
        );
    }
    assert_eq!(found.len(), expected.len(), "{found:#?}");
}

#[test]
fn a_bad_variable_of_aibrix_is_a_warning_but_a_bad_flag_is_not() {
    let pods = pods_file();
    let flags = [
        "--pods-file",
        pods.path().to_str().unwrap(),
        "--envoy",
        "http://h:1",
    ];
    for bad in ["0", "-5", "soon"] {
        let config = config(&flags, &[("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", bad)]);
        assert_eq!(config.schedule.refresh, Duration::from_millis(200));
        assert_eq!(config.warnings.len(), 1, "{bad}");
    }
    let flag = ["--refresh-interval-ms", "0"];
    let found = mistakes(&[&flags[..], &flag[..]].concat(), &[]);
    assert_eq!(
        found,
        ["--refresh-interval-ms: \"0\" is not a number from 10 to 600000"]
    );
}

#[test]
fn a_token_comes_from_one_place_only_and_is_not_shown() {
    let pods = pods_file();
    let flags = [
        "--pods-file",
        pods.path().to_str().unwrap(),
        "--envoy",
        "http://h:1",
    ];
    let variable = ("PD_AGENT_TOKEN", "s3cret");
    let config = config(&flags, &[variable]);
    assert!(matches!(config.credentials, Credentials::Fixed(_)));
    assert!(!format!("{config:?}").contains("s3cret"));
    let file = ["--token-file", pods.path().to_str().unwrap()];
    let found = mistakes(&[&flags[..], &file[..]].concat(), &[variable]);
    assert_eq!(found, ["--token-file: PD_AGENT_TOKEN is set as well"]);
}

#[test]
fn help_names_every_setting_with_variable_and_default() {
    let Err(Refusal::Usage(help)) = parsed(&["--help"], &[]) else {
        panic!("no help")
    };
    assert_eq!(help.exit_code(), 0);
    let help = help.to_string();
    for setting in SETTINGS {
        assert!(
            help.contains(&format!("--{} <", setting.name)),
            "{}",
            setting.name
        );
        assert!(help.contains(setting.variable), "{}", setting.variable);
    }
    assert!(help.contains("status.podIP"), "{help}");
    let Err(refusal) = parsed(&["--no-such-flag"], &[]) else {
        panic!("accepted")
    };
    assert_eq!(refusal.code(), 2);
}

#[test]
fn check_needs_only_the_pods_file() {
    let pods = pods_file();
    let flags = ["check", "--pods-file", pods.path().to_str().unwrap()];
    assert!(matches!(parsed(&flags, &[]), Ok(Invocation::Check(_))));
    assert_eq!(mistakes(&["check"], &[]).len(), 1);
}

#[test]
fn tokenizers_are_checked_at_start_with_every_mistake_named() {
    let pods = pods_file();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let good = path(
        "good",
        r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
    );
    let unigram = path(
        "unigram",
        r#"{"model":{"type":"Unigram","vocab":[["a",0]]}}"#,
    );
    let merge = path(
        "merge",
        r#"{"model":{"vocab":{"a":0,"ab":1},"merges":["a b"]}}"#,
    );
    let long = path("long", &" ".repeat((32 << 20) + 1));
    let base = [
        "--pods-file",
        pods.path().to_str().unwrap(),
        "--envoy",
        "http://127.0.0.1:1",
    ];

    let given = format!("org/a={good}, b={good}");
    let sources = config(&base, &[("PD_AGENT_TOKENIZER", &given)]).tokenizers;
    let models: Vec<_> = sources.iter().map(|it| it.model.as_str()).collect();
    assert_eq!(models, ["org/a", "b"]);

    let wrong = [
        ("nothing".to_owned(), "is not of the form MODEL=FILE"),
        (format!("={good}"), "is not of the form MODEL=FILE"),
        ("m=".to_owned(), "is not of the form MODEL=FILE"),
        ("m=/nowhere".to_owned(), "No such file"),
        (format!("u={unigram}"), "unknown variant `Unigram`"),
        (format!("i={merge}"), "not all in model.vocab"),
        (format!("l={long}"), "longer than 33554432 bytes"),
        (format!("g={good}"), ""),
        (format!("g={good}"), "given twice"),
    ];
    let flags: Vec<&str> = wrong
        .iter()
        .flat_map(|(value, _)| ["--tokenizer", value])
        .collect();
    let found = mistakes(&[&base[..], &flags].concat(), &[]);
    let expected: Vec<_> = wrong
        .iter()
        .filter(|(_, reason)| !reason.is_empty())
        .collect();
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (mistake, (_, reason)) in found.iter().zip(expected) {
        assert!(
            mistake.starts_with("--tokenizer: ") && mistake.contains(reason),
            "{mistake}"
        );
    }
    let many: Vec<String> = (0..9).map(|n| format!("m{n}={good}")).collect();
    let many = mistakes(&base, &[("PD_AGENT_TOKENIZER", &many.join(","))]);
    assert_eq!(many, ["PD_AGENT_TOKENIZER: 9 tokenizers, at most 8"]);
}

#[test]
fn rate_limits_are_shared_by_the_envoys_fed_here_unless_a_number_is_given() {
    let two = [
        "--envoy",
        "http://127.0.0.1:2",
        "--envoy",
        "http://127.0.0.1:3",
    ];
    let pods = pods_file();
    let replicas = |more: &[&str]| {
        let flags = [
            &["--pods-file", pods.path().to_str().unwrap()],
            &two[..],
            more,
        ]
        .concat();
        config(&flags, &[]).replicas
    };
    assert_eq!(replicas(&[]), 2);
    assert_eq!(replicas(&["--gateway-replicas", "5"]), 5);
}
