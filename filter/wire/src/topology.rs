//! *Topology*: which pods serve which model, pushed as JSON whenever it changes.
//!
//! Numbers that may be missing are absent, never zero. Unknown fields are ignored, so a newer
//! agent may feed an older filter; a message with another [`WIRE_VERSION`] is refused (426).

use serde::{Deserialize, Serialize};

/// Version of both pushed messages.
pub const WIRE_VERSION: u32 = 1;
/// Most models one topology may name.
pub const MAX_MODELS: usize = 200;
/// Most pods one topology may hold.
pub const MAX_PODS: usize = 8192;
/// Largest pushed message, in bytes.
pub const MAX_MESSAGE: usize = 16 << 20;

/// Who sent a message and where it stands in that sender's order.
///
/// A filter keeps the highest sequence of the newest epoch and refuses what is older (409).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stamp {
    /// Wire version, [`WIRE_VERSION`].
    pub version: u32,
    /// Id of the agent, for reports about two agents that alternate.
    pub agent: String,
    /// Life of the agent: it takes the next one above the epoch a 409 reported.
    pub epoch: u64,
    /// Counts messages of one kind within an epoch.
    pub sequence: u64,
}

/// All models and pods an agent knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Topology {
    /// Sender and order.
    pub stamp: Stamp,
    /// Live gateway replicas; each enforces its share of a `requestsPerSecond`.
    #[serde(default = "one")]
    pub replicas: u32,
    /// Models by name; names are unique.
    pub models: Vec<Model>,
}

fn one() -> u32 {
    1
}

/// One model and its pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// Name that requests carry in `model`.
    pub name: String,
    /// Config annotations of the pods, each distinct text once; [`Pod::config`] indexes it.
    #[serde(default)]
    pub configs: Vec<crate::profile::ModelConfig>,
    /// Pods, sorted by namespace and name. Samples name pods by their position in the
    /// concatenation of all models' lists.
    pub pods: Vec<Pod>,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name, unique in its namespace.
    pub name: String,
    /// Kubernetes UID: a recreated pod with an old name is a new pod.
    pub uid: String,
    /// `ip:port` of the engine's HTTP server (IPv6 in brackets).
    pub address: String,
    /// Phase the pod serves.
    pub role: Role,
    /// Value of the roleset label; absent without one. Rolesets are identified by namespace
    /// and this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roleset: Option<String>,
    /// Value of the engine label; `vllm` without one.
    pub engine: String,
    /// Value of the KV connector label, lower-cased.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_connector: Option<String>,
    /// Bootstrap port of an SGLang prefill pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Index into [`Model::configs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<u32>,
    /// Ready and able to take requests.
    pub ready: bool,
    /// Taken out of selection by annotation; what runs on it ends normally.
    #[serde(default)]
    pub draining: bool,
    /// Labels, for `external-filter`.
    #[serde(default)]
    pub labels: std::collections::BTreeMap<String, String>,
}

/// Phase a pod serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Processes prompts.
    Prefill,
    /// Generates tokens from handed-over KV.
    Decode,
    /// Runs both phases; combined when its profile says so.
    Standard,
}
