//! The pods file: what it becomes, and how changes are followed.

use pd_wire::topology::{Role, Topology};
use serde_json::json;

use super::fixtures::{Envoy, PodSpec, PodsFile, Running, config};

fn address(host: u8) -> std::net::SocketAddr {
    // Nothing listens there and nothing has to: only the file matters here.
    std::net::SocketAddr::from(([127, 0, 0, host], 9))
}

fn held(topology: Option<&Topology>) -> Vec<String> {
    let models = topology.iter().flat_map(|topology| &topology.models);
    models
        .flat_map(|model| &model.pods)
        .map(|pod| pod.name.clone())
        .collect()
}

#[tokio::test]
async fn a_pod_list_becomes_models_with_sorted_pods_and_shared_configs() {
    let profile = r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#;
    let pods = PodsFile::new(&[
        PodSpec::new("d1", address(2))
            .role("decode")
            .annotation("model.aibrix.ai/config", profile),
        PodSpec::new("p1", address(1)).role("prefill"),
        PodSpec::new("d0", address(3))
            .role("decode")
            .annotation("model.aibrix.ai/config", profile),
        PodSpec::new("s", address(4))
            .label("model.aibrix.ai/name", "a")
            .unready(),
        PodSpec::new("pending", address(5)).status("podIP", json!("")),
        PodSpec::new("lost", address(6))
            .label("model.aibrix.ai/name", "nowhere")
            .status("podIP", json!("")),
        PodSpec::new("other", address(7)).label("model.aibrix.ai/name", ""),
        PodSpec::new("d9", address(8))
            .role("decode")
            .annotation("model.aibrix.ai/config", "{"),
    ]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let topology = envoy
        .until("a topology", |held| held.topology.clone())
        .await;
    let shape: Vec<_> = topology
        .models
        .iter()
        .map(|model| {
            let pods = model.pods.iter();
            let pods = pods.map(|pod| (pod.name.as_str(), pod.role, pod.config, pod.ready));
            (
                model.name.as_str(),
                model.configs.len(),
                pods.collect::<Vec<_>>(),
            )
        })
        .collect();
    let expected = [
        ("a", 0, vec![("s", Role::Standard, None, false)]),
        (
            "m",
            1,
            vec![
                ("d0", Role::Decode, Some(0), true),
                ("d1", Role::Decode, Some(0), true),
                ("d9", Role::Decode, None, true),
                ("p1", Role::Prefill, None, true),
            ],
        ),
        // A 503 for its requests, not a 404.
        ("nowhere", 0, vec![]),
    ];
    assert_eq!(shape, expected);
    assert_eq!(agent.metric("pd_agent_pods ").await, Some(5.0));
    assert_eq!(agent.metric("pd_agent_ready_pods ").await, Some(4.0));
    // Two pods without IP and one bad annotation.
    assert_eq!(agent.metric("pd_agent_pod_warnings ").await, Some(3.0));
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_change_is_pushed_whether_renamed_over_or_written_in_place() {
    let pods = PodsFile::new(&[PodSpec::new("a", address(1))]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let names = |wanted: &'static [&'static str]| {
        envoy.until("the pods", move |state| {
            (held(state.topology.as_ref()) == wanted).then_some(())
        })
    };
    names(&["a"]).await;
    pods.replace(&[PodSpec::new("a", address(1)), PodSpec::new("b", address(2))]);
    names(&["a", "b"]).await;
    let one =
        "- {metadata: {name: x, labels: {model.aibrix.ai/name: m}}, status: {podIP: 127.0.0.1}}";
    pods.overwrite(one);
    names(&["x"]).await;
    // As long as the one before.
    pods.overwrite(&one.replace("name: x", "name: y"));
    names(&["y"]).await;
    pods.overwrite("items: []");
    names(&[]).await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_gone_or_broken_leaves_the_pods_known_before() {
    let pods = PodsFile::new(&[PodSpec::new("a", address(1))]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy
        .until("a topology", |held| held.topology.as_ref().map(drop))
        .await;
    let mut failures = 0.0;
    for broken in [Some("{\"items\": [{"), Some(""), Some("a: b: c"), None] {
        match broken {
            Some(text) => pods.replace_text(text),
            None => std::fs::remove_file(pods.path()).unwrap(),
        }
        failures = counted_after(&agent, failures).await;
    }
    assert_eq!(envoy.held(|state| held(state.topology.as_ref())), ["a"]);
    pods.replace(&[PodSpec::new("a", address(1)), PodSpec::new("b", address(2))]);
    envoy
        .until("both", |held| (held.addresses().len() == 2).then_some(()))
        .await;
    assert_eq!(envoy.held(|held| held.topologies), 2);
    agent.stop().await.unwrap();
}

/// Waits until the pods file failed more often than `before`.
async fn counted_after(agent: &Running, before: f64) -> f64 {
    for _ in 0..1000 {
        let now = agent
            .metric("pd_agent_pods_file_failures_total ")
            .await
            .unwrap();
        if now > before {
            return now;
        }
    }
    panic!("the broken file was never noticed");
}

#[tokio::test]
async fn a_file_that_does_not_exist_yet_is_waited_for() {
    let pods = PodsFile::new(&[]);
    std::fs::remove_file(pods.path()).unwrap();
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    counted_after(&agent, 0.0).await;
    assert_eq!(
        agent.get("/readyz").await,
        (503, "no pods loaded yet".to_owned())
    );
    assert_eq!(envoy.held(|held| held.statuses.len()), 0);
    pods.replace(&[PodSpec::new("a", address(1))]);
    envoy
        .until("a topology", |held| held.topology.as_ref().map(drop))
        .await;
    agent.stop().await.unwrap();
}
