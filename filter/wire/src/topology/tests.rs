use super::*;
use serde_json::{Value, json};

fn message() -> Value {
    json!({
        "stamp": {"version": 1, "agent": "node-1", "epoch": 3, "sequence": 9},
        "models": [{
            "name": "m",
            "pods": [
                {"namespace": "ns", "name": "p", "uid": "u", "address": "10.0.0.1:8000",
                 "role": "prefill", "engine": "vllm", "ready": true},
                {"namespace": "ns", "name": "q", "uid": "u", "address": "[fd00::1]:8000",
                 "role": "decode", "engine": "vllm", "ready": true},
            ],
        }],
    })
}

fn parse(message: &Value) -> Result<Topology, TopologyError> {
    Topology::parse(message.to_string().as_bytes())
}

/// The mistakes of a message after one change.
fn mistakes(change: impl FnOnce(&mut Value)) -> Vec<String> {
    let mut message = message();
    change(&mut message);
    match parse(&message) {
        Err(TopologyError::Mistakes(found)) => found
            .into_iter()
            .map(|mistake| format!("{} {}", mistake.path, mistake.problem))
            .collect(),
        other => panic!("expected mistakes, got {other:?}"),
    }
}

#[test]
fn a_right_message_is_read_and_replicas_default_to_one() {
    let topology = parse(&message()).unwrap();
    assert_eq!((topology.replicas, topology.pods()), (1, 2));
    assert!(topology.models[0].pods[0].usable());
}

#[test]
fn every_mistake_is_named_with_its_path_and_all_at_once() {
    let found = mistakes(|message| {
        message["stamp"]["epoch"] = json!(0);
        message["stamp"]["agent"] = json!("");
        message["replicas"] = json!(0);
        let pods = &mut message["models"][0]["pods"];
        pods[0]["address"] = json!("engine.local:8000");
        pods[0]["config"] = json!(0);
        pods[0]["bootstrapPort"] = json!(0);
        pods[1]["name"] = json!("p");
        pods[1]["engine"] = json!("");
    });
    assert_eq!(
        found,
        [
            "stamp.epoch must be above 0 and below 2^64 - 1",
            "stamp.agent must have 1 to 256 bytes",
            "replicas must be at least 1",
            "models[0].pods[0].address \"engine.local:8000\" is not ip:port of a pod",
            "models[0].pods[0].bootstrapPort must be 1 to 65535",
            "models[0].pods[0].config 0 is none of the model's 0 configs",
            "models[0].pods[1].engine must not be empty",
            "models[0].pods[1] pod ns/p is listed twice",
        ]
    );
}

#[test]
fn only_an_address_of_ip_and_port_is_an_address() {
    for wrong in [
        "",
        "10.0.0.1",
        "10.0.0.1:0",
        "0.0.0.0:80",
        "[::]:80",
        "10.0.0.1:80,10.0.0.2:80",
        "fd00::1:80",
    ] {
        let found = mistakes(|message| message["models"][0]["pods"][1]["address"] = json!(wrong));
        assert_eq!(found.len(), 1, "{wrong}");
        assert!(
            found[0].starts_with("models[0].pods[1].address "),
            "{}",
            found[0]
        );
    }
}

#[test]
fn a_model_or_a_pod_listed_twice_is_a_mistake_across_models_too() {
    let found = mistakes(|message| {
        let mut again = message["models"][0].clone();
        again["pods"].as_array_mut().unwrap().truncate(1);
        message["models"].as_array_mut().unwrap().push(again);
    });
    assert_eq!(
        found,
        [
            "models[1].name model m is listed twice",
            "models[1].pods[0] pod ns/p is listed twice"
        ]
    );
}

#[test]
fn too_many_models_and_pods_are_mistakes_and_the_list_is_bounded() {
    let found = mistakes(|message| {
        let pod = message["models"][0]["pods"][0].clone();
        let models: Vec<Value> = (0..=MAX_MODELS)
            .map(|at| json!({"name": format!("m{at}"), "pods": vec![&pod; MAX_PODS / 150]}))
            .collect();
        message["models"] = json!(models);
    });
    assert_eq!(found[0], "models 201 models are over the limit of 200");
    assert_eq!(
        found[1],
        format!(
            "models {} pods are over the limit of 8192",
            201 * (MAX_PODS / 150)
        )
    );
    assert_eq!(found.len(), MAX_MISTAKES);
}

#[test]
fn another_version_is_told_from_a_malformed_message() {
    let newer = json!({"stamp": {"version": 2, "sender": {}}, "models": {"m": []}});
    assert_eq!(parse(&newer), Err(TopologyError::Version { found: 2 }));
    assert!(matches!(
        Topology::parse(b"{"),
        Err(TopologyError::Malformed(_))
    ));
    let mut wrong = message();
    wrong["models"] = json!({});
    assert!(matches!(parse(&wrong), Err(TopologyError::Malformed(_))));
    assert_eq!(
        Topology::parse(&vec![b' '; MAX_MESSAGE + 1]),
        Err(TopologyError::TooLarge {
            len: MAX_MESSAGE + 1
        })
    );
}

#[test]
fn a_newer_epoch_replaces_and_within_one_only_the_same_agent_goes_on() {
    let stamp = |agent: &str, epoch, sequence| Stamp {
        version: WIRE_VERSION,
        agent: agent.to_owned(),
        epoch,
        sequence,
    };
    let held = stamp("a", 5, 5);
    assert!(stamp("a", 5, 6).replaces(&held));
    assert!(stamp("b", 6, 0).replaces(&held));
    assert!(!stamp("a", 5, 5).replaces(&held));
    assert!(!stamp("b", 5, 6).replaces(&held));
    assert!(!stamp("a", 4, 9).replaces(&held));
}
