//! The index of a snapshot that selection reads: one model's pods, rolesets and samples.

use crate::ledger::PodKey;
use pd_wire::profile::ModelConfig;
use pd_wire::samples::PodSample;
use pd_wire::topology::Role;
use std::rc::Rc;

/// One model of the snapshot, ready for selection. Pods are named by their position in `pods`.
///
/// The parts are shared: new samples make a new `ModelFleet` and copy nothing else.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFleet {
    /// Model name.
    pub name: Rc<str>,
    /// Number of the model's ledger record.
    pub slot: u16,
    /// All pods, sorted by namespace and name.
    pub pods: Rc<[FleetPod]>,
    /// Complete rolesets: at least one ready, undrained prefill and one such decode pod.
    pub rolesets: Rc<[Roleset]>,
    /// Config annotations of the pods.
    pub configs: Rc<[ModelConfig]>,
    /// Index into `configs` of the request-level config: the first pod (in order) that has one.
    pub config: Option<u32>,
    /// Newest sample of each pod, in the order of `pods`, and the time it was taken, in ms of the
    /// shared monotonic clock.
    pub samples: Rc<[Option<(PodSample, u64)>]>,
}

/// One pod of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetPod {
    /// Identity in ledger and prefix index.
    pub key: PodKey,
    /// Namespace.
    pub namespace: String,
    /// Name, for response headers and logs.
    pub name: String,
    /// `ip:port`.
    pub address: String,
    /// Phase.
    pub role: Role,
    /// Engine label.
    pub engine: String,
    /// KV connector label.
    pub kv_connector: Option<String>,
    /// SGLang bootstrap port.
    pub bootstrap_port: Option<u16>,
    /// Index into [`ModelFleet::configs`].
    pub config: Option<u32>,
    /// Ready and not draining: may be chosen.
    pub usable: bool,
    /// Labels, for `external-filter`.
    pub labels: Vec<(String, String)>,
}

/// Prefill and decode pods that may be paired with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roleset {
    /// Namespace of its pods.
    pub namespace: String,
    /// Value of the roleset label.
    pub name: String,
    /// Usable prefill pods, by position in [`ModelFleet::pods`].
    pub prefill: Vec<u16>,
    /// Usable decode pods, by position in [`ModelFleet::pods`].
    pub decode: Vec<u16>,
}

// === impl ModelFleet ===

impl ModelFleet {
    /// The pod at a position.
    pub fn pod(&self, position: u16) -> Option<&FleetPod> {
        self.pods.get(usize::from(position))
    }

    /// Newest sample of the pod at a position and the time it was taken, in ms of the shared
    /// monotonic clock.
    pub fn sample(&self, position: u16) -> Option<(&PodSample, u64)> {
        let sample = self.samples.get(usize::from(position))?.as_ref();
        sample.map(|(sample, taken_at_ms)| (sample, *taken_at_ms))
    }
}
