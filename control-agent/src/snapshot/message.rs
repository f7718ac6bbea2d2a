//! Fleet and board → the two messages, stamped for one Envoy.

use tokio::time::Instant;

use pd_wire::samples::{PodSample, Samples};
use pd_wire::topology::{Stamp, Topology};

use super::Fleet;
use crate::scrape::Board;

/// The topology as JSON, for an Envoy that is one of `replicas`.
pub fn topology(fleet: &Fleet, replicas: u32, stamp: Stamp) -> Result<Vec<u8>, serde_json::Error> {
    let topology = Topology {
        stamp,
        replicas,
        models: fleet.models.clone(),
    };
    serde_json::to_vec(&topology)
}

/// What is known of the fleet's engines at `now`, in the fleet's order. Pods without a sample
/// are absent.
pub fn samples(
    fleet: &Fleet,
    board: &Board,
    stamp: Stamp,
    topology_sequence: u64,
    now: Instant,
) -> Samples {
    let mut pods = Vec::new();
    for (position, member) in fleet.members.iter().enumerate() {
        let Ok(ordinal) = u32::try_from(position) else {
            break;
        };
        if let Some(sampled) = board.get(&member.key, now) {
            let age = now.saturating_duration_since(sampled.at).as_millis();
            pods.push(PodSample {
                ordinal,
                age_ms: u32::try_from(age).unwrap_or(u32::MAX),
                ..sampled.load
            });
        }
    }
    Samples {
        stamp,
        topology_sequence,
        pods,
    }
}
