//! How the agent ends, and the program around it.

use std::io::Read;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pd_wire::control::{Band, Charged, Ledgers, ModelLedger, PodLedger};

use super::fixtures::{Engine, Envoy, Page, PodSpec, PodsFile, Running, config, eventually};

#[tokio::test]
async fn asked_to_end_it_ends_though_engines_stall() {
    let engine = Engine::start("").await;
    engine.show(Page::Stall);
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address())]);
    let envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.schedule.timeout = Duration::from_secs(60);
    let agent = Running::start(config).await;
    eventually("a scrape", || (engine.scrapes() > 0).then_some(())).await;
    let asked = Instant::now();
    agent.stop().await.unwrap();
    assert!(
        asked.elapsed() < Duration::from_secs(4),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test]
async fn pages_are_served_and_unknown_ones_are_not() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    assert_eq!(agent.get("/healthz").await, (200, "ok".to_owned()));
    assert_eq!(agent.get("/elsewhere").await.0, 404);
    let (status, page) = agent.get("/metrics").await;
    assert_eq!(status, 200);
    assert!(page.ends_with("# EOF\n"), "{page}");
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn the_filters_ledgers_are_summed_over_the_envoys_that_answer() {
    let pods = PodsFile::new(&[]);
    let (one, two, mut gone) = (
        Envoy::start().await,
        Envoy::start().await,
        Envoy::start().await,
    );
    for (envoy, active_tokens) in [(&one, 100), (&two, 11)] {
        let charged = Charged {
            active_tokens,
            kv_tokens: 7,
            decode_tokens: 1,
            ..Charged::default()
        };
        let pod = PodLedger {
            namespace: "ns".to_owned(),
            name: "p".to_owned(),
            charged,
        };
        let models = vec![ModelLedger {
            model: "m".to_owned(),
            pods: vec![pod],
        }];
        envoy.held(|held| {
            held.ledgers = Ledgers {
                models,
                total: charged,
            }
        });
    }
    let agent = Running::start(config(&pods, &[&one, &two, &gone])).await;
    gone.stop().await;
    let labels = "{namespace=\"ns\",pod_name=\"p\"}";
    for (gauge, sum) in [("active", 111.0), ("kv", 14.0), ("decode", 2.0)] {
        let line = format!("pd_token_load_{gauge}_tokens{labels}");
        assert_eq!(agent.metric(&line).await, Some(sum), "{gauge}");
    }
    assert!(
        agent
            .metric("pd_agent_ledger_reads_total{result=\"connect\"}")
            .await
            .is_some()
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn the_filters_bands_are_shown_while_they_have_some() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let set = |bands| envoy.held(|held| held.status.bands = bands);
    set(vec![Band {
        model: "m".to_owned(),
        namespace: "ns".to_owned(),
        roleset: "r".to_owned(),
        low: 18,
        high: None,
    }]);
    let low = |page: &str| {
        let line = page
            .lines()
            .find(|line| line.starts_with("pd_bucket_band{"));
        line.map(|line| line.contains("roleset=\"r\"") && line.ends_with("bound=\"low\"} 18"))
    };
    assert_eq!(low(&agent.get("/metrics").await.1), Some(true));
    set(Vec::new());
    assert_eq!(low(&agent.get("/metrics").await.1), None);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_bound_address_is_an_error_that_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.listen = taken.local_addr().unwrap();
    let error = pd_agent::run(config, std::future::pending())
        .await
        .unwrap_err();
    assert!(
        format!("{error:#}").contains(&taken.local_addr().unwrap().to_string()),
        "{error:#}"
    );
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pd-agent"));
    command.env_clear().stdin(Stdio::null());
    command
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[tokio::test]
async fn the_program_ends_with_0_on_sigterm_and_logs_json() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let mut child = program()
        .args([
            "--envoy",
            &envoy.url(),
            "--listen",
            "127.0.0.1:0",
            "--log-format",
            "json",
        ])
        .arg("--pods-file")
        .arg(pods.path())
        .env("PD_AGENT_TOKEN", "s3cret")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    envoy
        .until("samples", |held| held.samples.as_ref().map(drop))
        .await;
    let kill = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let status = eventually("the end", || child.try_wait().unwrap()).await;
    assert_eq!(status.code(), Some(0));
    let mut log = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .unwrap();
    assert!(!log.contains("s3cret"), "{log}");
    let messages: Vec<String> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|event| event["message"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(messages.first().unwrap(), "agent started");
    assert_eq!(messages.last().unwrap(), "agent stopped");
    assert!(
        messages.contains(&"topology acknowledged".to_owned()),
        "{messages:?}"
    );
}

#[test]
fn the_program_names_every_mistake_and_ends_with_2() {
    let output = program()
        .args([
            "--envoy",
            "nowhere",
            "--listen",
            "here",
            "--scrape-budget",
            "0",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let (_, errors) = text(&output);
    for named in ["--pods-file", "--envoy", "--listen", "--scrape-budget"] {
        assert!(
            errors.contains(&format!("pd-agent: {named}: ")),
            "{named}: {errors}"
        );
    }
}

#[test]
fn check_prints_a_table_and_ends_with_1_if_anything_is_wrong() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let good = PodSpec::new("good", address).role("prefill");
    let partner = PodSpec::new("partner", address).role("decode");
    let check = |pods: &[PodSpec]| {
        let file = PodsFile::new(pods);
        program()
            .arg("check")
            .arg("--pods-file")
            .arg(file.path())
            .output()
            .unwrap()
    };
    let output = check(&[good.clone(), partner]);
    let (table, errors) = text(&output);
    assert_eq!(output.status.code(), Some(0), "{table}{errors}");
    let row = table
        .lines()
        .find(|line| line.starts_with("ns/good"))
        .unwrap();
    let cells: Vec<_> = row.split_whitespace().collect();
    let address = address.to_string();
    assert_eq!(
        cells,
        [
            "ns/good", "m", "prefill", "r1", "vllm", &address, "yes", "yes"
        ]
    );

    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = PodSpec::new("nobody", closed.local_addr().unwrap()).role("decode");
    drop(closed);
    let output = check(&[good, nobody.label("model.aibrix.ai/metric-port", "x")]);
    let (table, _) = text(&output);
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert!(
        table.contains("warning: pod ns/nobody: nothing accepts connections at "),
        "{table}"
    );
    assert!(
        table.contains("warning: pod ns/nobody: label model.aibrix.ai/metric-port"),
        "{table}"
    );
    assert!(table.ends_with("2 pods, 2 warnings\n"), "{table}");

    let (table, _) = text(&check(&[]));
    assert!(table.ends_with("0 pods, 1 warnings\n"), "{table}");
    assert_eq!(check(&[]).status.code(), Some(1));
}

#[test]
fn check_says_once_what_is_wrong_with_the_text_of_a_file() {
    let file = PodsFile::new(&[]);
    file.replace_text("a: b: c");
    let mut check = program();
    check.arg("check").arg("--pods-file").arg(file.path());
    let output = check.output().unwrap();
    let (_, errors) = text(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(
        errors.matches("neither JSON nor YAML").count(),
        1,
        "{errors}"
    );
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(
        errors.contains(&file.path().display().to_string()),
        "{errors}"
    );
}
