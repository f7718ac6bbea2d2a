//! The `pd-engine-sim` program.

use std::net::SocketAddr;
use std::process::Stdio;

use pd_engine_sim::Record;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::client::{CHAT, PATIENCE, chat, get, post, prefill_of};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pd-engine-sim"));
    command.kill_on_drop(true);
    command
}

#[tokio::test]
async fn one_process_serves_the_engines_of_a_file_and_logs_what_arrives() {
    let folder = tempfile::tempdir().unwrap();
    let (spec, log) = (
        folder.path().join("spec.json"),
        folder.path().join("p.jsonl"),
    );
    let engines = json!([
        {"name": "p", "role": "prefill", "model": "tiny", "log": log, "log_body_limit": 4096},
        {"name": "d", "role": "decode", "model": "tiny", "tokens": 2},
    ]);
    std::fs::write(&spec, engines.to_string()).unwrap();
    let mut child = program()
        .args(["--threads", "2", "--spec"])
        .arg(&spec)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut line = async || -> Value {
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap();
        serde_json::from_str(&line.unwrap().unwrap()).unwrap()
    };
    let (p, d) = (line().await, line().await);
    assert_eq!((&p["name"], &d["name"]), (&json!("p"), &json!("d")));
    assert_eq!(line().await, json!({"ready": true}));
    let address = |of: &Value| {
        of["address"]
            .as_str()
            .unwrap()
            .parse::<SocketAddr>()
            .unwrap()
    };
    let body = chat(json!({"model": "tiny"}));
    let first = prefill_of(body.clone());
    let kv = post(address(&p), CHAT, &first).await.kv();
    let mut second = body;
    crate::client::merge(&mut second, json!({"kv_transfer_params": kv}));
    let answer = post(address(&d), CHAT, &second).await;
    assert_eq!(answer.identity().engine, "d");
    assert_eq!(answer.json()["usage"]["completion_tokens"], 2);
    let admin = p["admin"].as_str().unwrap().parse().unwrap();
    let state = get(admin, "/sim/admin/state").await.json();
    assert_eq!(
        (&state["role"], &state["kv_taken"]),
        (&json!("prefill"), &json!(1))
    );

    let pid = child.id().unwrap().to_string();
    let signalled = Command::new("kill").args(["-TERM", &pid]).status().await;
    assert!(signalled.unwrap().success());
    let status = timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0));
    let text = std::fs::read_to_string(&log).unwrap();
    let records: Vec<Record> = text
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].body, Some(first.to_string()));
    assert_eq!(records[0].path, CHAT);
}

#[tokio::test]
async fn mistakes_in_the_arguments_exit_with_2() {
    let cases: [(&[&str], &str); 4] = [
        (&["--engine", "llama"], "llama"),
        (
            &["--engine", "sglang", "--dp-size", "0"],
            "dp_size is out of range",
        ),
        (&["--tokens", "0"], "tokens is out of range"),
        (
            &["--spec", "/nonexistent/spec.json"],
            "/nonexistent/spec.json",
        ),
    ];
    for (arguments, cause) in cases {
        let run = program().args(arguments).output();
        let output = timeout(PATIENCE, run).await.unwrap().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(cause), "{told}");
        assert!(output.stdout.is_empty());
    }
}
