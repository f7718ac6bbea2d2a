//! `scripts/up.sh` in front of engines that already run.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use pd_e2e::{Call, Pod, Programs, Stand, chat_body, eventually, prompt_of, within};
use tokio::net::TcpListener;

fn up(arguments: &[&str]) -> Command {
    let mut command = Command::new(Programs::repository().join("scripts/up.sh"));
    command
        .args(arguments)
        .env("ENVOY", Programs::envoy())
        .env("PD_FILTER_WASM", Programs::filter())
        .env("PD_AGENT", Programs::agent());
    command
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    let sent = Command::new("kill")
        .args([&format!("-{name}"), &pid])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Ports of loopback that are free at the moment.
async fn free_ports<const N: usize>() -> [String; N] {
    let mut held = Vec::new();
    for _ in 0..N {
        held.push(TcpListener::bind(("127.0.0.1", 0)).await.unwrap());
    }
    std::array::from_fn(|at| held[at].local_addr().unwrap().port().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn up_serves_until_it_is_told_to_stop_and_leaves_nothing_running() {
    // The stand's own gateway is not used, only its engines and its pods file.
    let stand = Stand::builder("up")
        .pods(Pod::pairs(1))
        .without_agent()
        .start()
        .await;
    let [port, control, admin] = free_ports().await;
    let plugin = stand.pods_file().with_file_name("plugin.json");
    std::fs::write(&plugin, "{\n  \"prefillRequestTimeout\": 9\n}\n").unwrap();
    let pods = stand.pods_file();
    let arguments = [
        ("--pods-file", pods.to_str()),
        ("--plugin-config", plugin.to_str()),
        ("--port", Some(port.as_str())),
        ("--control-port", Some(control.as_str())),
        ("--admin-port", Some(admin.as_str())),
        ("--concurrency", Some("1")),
        ("--waiting-timeout", Some("20")),
    ];
    let arguments: Vec<&str> = arguments
        .iter()
        .flat_map(|(name, value)| [*name, value.unwrap()])
        .collect();
    let output = stand.pods_file().with_file_name("up.log");
    let log = std::fs::File::create(&output).unwrap();
    let mut child = up(&arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let printed = || std::fs::read_to_string(&output).unwrap_or_default();
    within(Duration::from_secs(60), "up.sh is ready", || async {
        ensure!(
            printed().lines().any(|line| line == "ready"),
            "{}",
            printed()
        );
        Ok(())
    })
    .await;

    let at = |port: &str| format!("127.0.0.1:{port}").parse().unwrap();
    let call = Call::post("/v1/chat/completions", chat_body("up", true));
    prompt_of(&call.send(at(&port)).await.unwrap().expect(200));
    let status = Call::get(pd_wire::names::PATH_STATUS)
        .send(at(&control))
        .await
        .unwrap()
        .json();
    assert_eq!(
        status["knobs"]["prefillRequestTimeout"].as_f64(),
        Some(9.0),
        "{status}"
    );

    signal(&child, "TERM");
    eventually("up.sh ends", || {
        let ended = child.try_wait();
        async move { ended?.context("still running") }
    })
    .await;
    for port in [&port, &control, &admin] {
        let open = tokio::net::TcpStream::connect(format!("127.0.0.1:{port}")).await;
        assert!(open.is_err(), "something still listens on {port}");
    }
}

fn refused(output: &Output, code: i32, words: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.contains(words), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn up_says_what_is_wrong_with_its_arguments() {
    refused(&up(&[]).output().unwrap(), 2, "--pods-file");
    refused(
        &up(&["--pods-file", "/nowhere/pods.yaml"]).output().unwrap(),
        2,
        "/nowhere/pods.yaml",
    );
    refused(
        &up(&["--pods-file", "x", "--prot", "1"]).output().unwrap(),
        2,
        "Usage",
    );
    let pods = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let pods = pods.to_str().unwrap();
    refused(
        &up(&["--pods-file", pods, "--port", "ten"])
            .output()
            .unwrap(),
        2,
        "'ten'",
    );
    let taken = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(
        &up(&["--pods-file", pods, "--port", &port])
            .output()
            .unwrap(),
        1,
        &port,
    );
}
