//! The engine labels of the documentation, as `pd-agent check` reads them.

use std::process::Command;

use pd_e2e::Programs;

/// A pair of each engine; vLLM's without the engine label, which it does not need.
const PODS: &str = r#"
apiVersion: v1
kind: List
items:
- metadata:
    name: vllm-prefill
    labels:
      model.aibrix.ai/name: my-model
      model.aibrix.ai/port: "8000"
      role-name: prefill
      roleset-name: group-0
  status: {podIP: 127.0.0.1}
- metadata:
    name: sglang-prefill
    labels:
      model.aibrix.ai/name: my-sglang-model
      model.aibrix.ai/port: "8000"
      model.aibrix.ai/engine: sglang
      role-name: prefill
      roleset-name: group-0
    annotations:
      model.aibrix.ai/sglang-bootstrap-port: "8998"
  status: {podIP: 127.0.0.1}
- metadata:
    name: sglang-decode
    labels:
      model.aibrix.ai/name: my-sglang-model
      model.aibrix.ai/port: "8000"
      model.aibrix.ai/engine: sglang
      role-name: decode
      roleset-name: group-0
  status: {podIP: 127.0.0.1}
- metadata:
    name: sglang-wrong-port
    labels:
      model.aibrix.ai/name: my-sglang-model
      model.aibrix.ai/port: "8000"
      model.aibrix.ai/engine: sglang
      role-name: prefill
      roleset-name: group-0
    annotations:
      model.aibrix.ai/sglang-bootstrap-port: "eight thousand"
  status: {podIP: 127.0.0.1}
- metadata:
    name: trtllm-decode
    labels:
      model.aibrix.ai/name: my-trt-model
      model.aibrix.ai/engine: trtllm
      role-name: decode
      roleset-name: group-0
  status: {podIP: 127.0.0.1}
- metadata:
    name: standard
    labels:
      model.aibrix.ai/name: my-model
      model.aibrix.ai/port: "8000"
      model.aibrix.ai/engine: vllm
      role-name: all
  status: {podIP: 127.0.0.1}
"#;

#[test]
fn every_engine_label_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pods.yaml");
    std::fs::write(&file, PODS).unwrap();
    let mut check = Command::new(Programs::agent());
    check.arg("check").arg("--pods-file").arg(&file);
    let output = check.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    let row = |pod: &str| -> Vec<&str> {
        let mut rows = text.lines().filter(|line| !line.starts_with("warning"));
        let row = rows.find(|line| line.split(' ').next() == Some(&format!("default/{pod}")));
        row.unwrap().split_whitespace().skip(1).take(5).collect()
    };
    for (pod, model, role, roleset, engine) in [
        ("vllm-prefill", "my-model", "prefill", "group-0", "vllm"),
        (
            "sglang-prefill",
            "my-sglang-model",
            "prefill",
            "group-0",
            "sglang",
        ),
        (
            "sglang-decode",
            "my-sglang-model",
            "decode",
            "group-0",
            "sglang",
        ),
        (
            "trtllm-decode",
            "my-trt-model",
            "decode",
            "group-0",
            "trtllm",
        ),
        ("standard", "my-model", "standard", "-", "vllm"),
    ] {
        assert_eq!(
            row(pod),
            [model, role, roleset, engine, "127.0.0.1:8000"],
            "{pod}"
        );
    }
    // Which port the agent takes instead is said; the good annotation brings no warning.
    let warnings = || text.lines().filter(|line| line.starts_with("warning"));
    let port = "model.aibrix.ai/sglang-bootstrap-port";
    let about: Vec<&str> = warnings().filter(|line| line.contains(port)).collect();
    assert_eq!(about.len(), 1, "{about:?}");
    assert!(about[0].contains("sglang-wrong-port") && about[0].contains("8998"));
    // Nothing listens there: the operator is told by the exit code too.
    assert_eq!(output.status.code(), Some(1));
}
