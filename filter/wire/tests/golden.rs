//! Both pushed messages as bytes that must never change within a wire version. The agent and the
//! filter read the same files.

use pd_wire::samples::{PodSample, Samples, SamplesError};
use pd_wire::topology::{Stamp, Topology, TopologyError, WIRE_VERSION};

const TOPOLOGY: &[u8] = include_bytes!("golden/topology.json");
const TOPOLOGY_OLDER: &[u8] = include_bytes!("golden/topology-older-peer.json");
const TOPOLOGY_NEWER: &[u8] = include_bytes!("golden/topology-newer-peer.json");
const TOPOLOGY_UNKNOWN: &[u8] = include_bytes!("golden/topology-unknown-version.json");
const SAMPLES: &[u8] = include_bytes!("golden/samples.bin");
const SAMPLES_NEWER: &[u8] = include_bytes!("golden/samples-newer-peer.bin");
const SAMPLES_UNKNOWN: &[u8] = include_bytes!("golden/samples-unknown-version.bin");

fn samples() -> Samples {
    Samples {
        stamp: Stamp {
            version: WIRE_VERSION,
            agent: "node-a/agent-1".to_owned(),
            epoch: 7,
            sequence: 42,
        },
        topology_sequence: 11,
        pods: vec![
            PodSample {
                ordinal: 0,
                age_ms: 15,
                running: Some(3.0),
                waiting: Some(0.0),
                kv_usage: Some(0.25),
                generation_throughput: Some(812.5),
                drain_rate: Some(1.75),
                prefill_ms: Some(90.0),
                remote_running: Some(2.0),
                remote_decode_tokens: Some(4096.0),
            },
            PodSample {
                ordinal: 1,
                age_ms: 120,
                running: Some(0.0),
                ..PodSample::default()
            },
            PodSample {
                ordinal: 5,
                age_ms: u32::MAX,
                ..PodSample::default()
            },
        ],
    }
}

#[test]
fn samples_are_written_and_read_as_these_bytes() {
    assert_eq!(samples().encode(), SAMPLES);
    assert_eq!(Samples::decode(SAMPLES).unwrap(), samples());
}

#[test]
fn samples_of_a_newer_agent_are_read_without_its_new_fields() {
    assert_eq!(Samples::decode(SAMPLES_NEWER).unwrap(), samples());
    assert_eq!(
        Samples::decode(SAMPLES_UNKNOWN),
        Err(SamplesError::Version { found: 2 })
    );
}

#[test]
fn a_topology_reads_back_as_written() {
    let topology = Topology::parse(TOPOLOGY).unwrap();
    let written = serde_json::to_value(&topology).unwrap();
    let golden: serde_json::Value = serde_json::from_slice(TOPOLOGY).unwrap();
    assert_eq!(written["stamp"], golden["stamp"]);
    assert_eq!(written["replicas"], golden["replicas"]);
    assert_eq!(written["models"][0]["pods"], golden["models"][0]["pods"]);
    assert_eq!(written["models"][1], golden["models"][1]);
}

#[test]
fn topologies_of_older_and_newer_agents_are_read() {
    let ours = Topology::parse(TOPOLOGY).unwrap();
    assert_eq!(Topology::parse(TOPOLOGY_NEWER).unwrap(), ours);

    let older = Topology::parse(TOPOLOGY_OLDER).unwrap();
    assert_eq!(older.replicas, 1);
    assert!(
        older.models[0]
            .pods
            .iter()
            .all(|pod| pod.labels.is_empty() && !pod.draining)
    );
    assert_eq!(
        Topology::parse(TOPOLOGY_UNKNOWN),
        Err(TopologyError::Version { found: 2 })
    );
}
