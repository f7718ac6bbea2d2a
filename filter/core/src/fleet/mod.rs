//! The fleet as pushed by the control agent: which pods serve which model, and what their engines
//! report.
//!
//! The VM that accepts a push checks and compiles it once ([`accept`]) and stores the compiled
//! form ([`snapshot`]); every VM finds changes by one small record and decodes the models it is
//! asked for ([`cache`]). Selection reads a [`ModelFleet`].

pub mod accept;
pub mod build;
pub mod cache;
pub mod snapshot;

pub use accept::{PushStatus, Refusal, accept_samples, accept_topology};
pub use cache::FleetCache;
pub use pd_wire::roleset::Roleset;

use crate::ledger::PodKey;
use pd_wire::profile::{ModelConfig, Profile};
use pd_wire::samples::PodSample;
use pd_wire::topology::Role;
use serde::{Deserialize, Serialize};
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
    /// Complete rolesets: those with a prefill and a decode pod, ready or not. They list the usable
    /// ones.
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// How often its containers were restarted.
    pub restarts: u32,
    /// Index into [`ModelFleet::configs`].
    pub config: Option<u32>,
    /// Ready and not draining: may be chosen.
    pub usable: bool,
    /// Labels, for `external-filter`.
    pub labels: Vec<(String, String)>,
}

// === impl FleetPod ===

impl FleetPod {
    /// The pod's IP, without port and the brackets of IPv6.
    pub fn ip(&self) -> &str {
        let address = self.address.as_str();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

// === impl ModelFleet ===

impl ModelFleet {
    /// The pod at a position.
    pub fn pod(&self, position: u16) -> Option<&FleetPod> {
        self.pods.get(usize::from(position))
    }

    /// The profile of the pod at a position: the one called `requested`, else its default one.
    pub fn profile(&self, position: u16, requested: Option<&str>) -> Option<&Profile> {
        let config = usize::try_from(self.pod(position)?.config?).ok()?;
        self.configs.get(config)?.profile(requested)
    }

    /// Newest sample of the pod at a position and the time it was taken, in ms of the shared
    /// monotonic clock.
    pub fn sample(&self, position: u16) -> Option<(&PodSample, u64)> {
        let sample = self.samples.get(usize::from(position))?.as_ref();
        sample.map(|(sample, taken_at_ms)| (sample, *taken_at_ms))
    }
}
