//! *Topology*: which pods serve which model, pushed as JSON whenever it changes.
//!
//! Numbers that may be missing are absent, never zero. Unknown fields are ignored, so a newer
//! agent may feed an older filter; a message with another [`WIRE_VERSION`] is refused (426).

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Version of both pushed messages.
pub const WIRE_VERSION: u32 = 1;
/// Most models one topology may name.
pub const MAX_MODELS: usize = 200;
/// Most pods one topology may hold.
pub const MAX_PODS: usize = 8192;
/// Largest pushed message, in bytes.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Most bytes of labels an agent pushes of one pod, keys and values together.
pub const MAX_LABELS: usize = 4096;
/// Longest id of an agent, in bytes.
pub const MAX_AGENT: usize = 256;
/// Most mistakes that are listed; a message with more is refused all the same.
pub const MAX_MISTAKES: usize = 100;

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
    /// How often the pod's containers were restarted: after a restart it is another process.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restarts: u32,
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

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls")]
fn is_zero(count: &u32) -> bool {
    *count == 0
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

/// Why a topology is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Larger than [`MAX_MESSAGE`] (413).
    #[error("{len} bytes are over the limit of {MAX_MESSAGE}: watch fewer namespaces or models")]
    TooLarge {
        /// Bytes received.
        len: usize,
    },
    /// Another wire version (426).
    #[error(
        "wire version {found} is unknown, this filter reads {WIRE_VERSION}: run the agent and the filter of one release"
    )]
    Version {
        /// Version received.
        found: u32,
    },
    /// No JSON, or not of this shape (400).
    #[error("not a topology: {0}")]
    Malformed(String),
    /// Of the right shape and wrong (400).
    #[error("{}", list(.0))]
    Mistakes(Vec<Mistake>),
}

/// One thing that is wrong in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Where, as `models[0].pods[2].address`.
    pub path: String,
    /// What, and what is allowed.
    pub problem: String,
}

fn list(mistakes: &[Mistake]) -> String {
    let lines: Vec<String> = mistakes
        .iter()
        .map(|mistake| format!("{}: {}", mistake.path, mistake.problem))
        .collect();
    lines.join("; ")
}

// === impl Stamp ===

impl Stamp {
    /// True when this message replaces one that is held: of a newer epoch, or the next of the same
    /// agent in the same epoch.
    pub fn replaces(&self, held: &Stamp) -> bool {
        self.epoch > held.epoch
            || (self.epoch == held.epoch
                && self.agent == held.agent
                && self.sequence > held.sequence)
    }

    /// What is wrong with the stamp.
    pub fn mistakes(&self) -> Vec<Mistake> {
        let mut found = Vec::new();
        // 0 stands for "nothing held", and there has to be a next epoch after every other one.
        if self.epoch == 0 || self.epoch == u64::MAX {
            found.push(mistake("stamp.epoch", "must be above 0 and below 2^64 - 1"));
        }
        if self.agent.is_empty() || self.agent.len() > MAX_AGENT {
            found.push(mistake(
                "stamp.agent",
                format!("must have 1 to {MAX_AGENT} bytes"),
            ));
        }
        found
    }
}

// === impl Topology ===

impl Topology {
    /// Reads and checks a pushed topology.
    ///
    /// # Errors
    /// Says what is wrong; all mistakes at once when the shape is right.
    pub fn parse(bytes: &[u8]) -> Result<Self, TopologyError> {
        #[derive(Deserialize)]
        struct OnlyVersion {
            stamp: VersionOfStamp,
        }
        #[derive(Deserialize)]
        struct VersionOfStamp {
            version: u32,
        }
        let malformed = |error: serde_json::Error| TopologyError::Malformed(error.to_string());
        if bytes.len() > MAX_MESSAGE {
            return Err(TopologyError::TooLarge { len: bytes.len() });
        }
        // The version comes first: the rest of another version may have another shape.
        let found = serde_json::from_slice::<OnlyVersion>(bytes)
            .map_err(malformed)?
            .stamp
            .version;
        if found != WIRE_VERSION {
            return Err(TopologyError::Version { found });
        }
        let topology: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        let mistakes = topology.mistakes();
        if mistakes.is_empty() {
            Ok(topology)
        } else {
            Err(TopologyError::Mistakes(mistakes))
        }
    }

    /// Number of pods over all models.
    pub fn pods(&self) -> usize {
        self.models.iter().map(|model| model.pods.len()).sum()
    }

    /// What is wrong with the topology, the first [`MAX_MISTAKES`].
    pub fn mistakes(&self) -> Vec<Mistake> {
        let mut found = self.stamp.mistakes();
        if self.replicas == 0 {
            found.push(mistake("replicas", "must be at least 1"));
        }
        if self.models.len() > MAX_MODELS {
            let problem = format!(
                "{} models are over the limit of {MAX_MODELS}",
                self.models.len()
            );
            found.push(mistake("models", problem));
        }
        if self.pods() > MAX_PODS {
            let problem = format!("{} pods are over the limit of {MAX_PODS}", self.pods());
            found.push(mistake("models", problem));
        }
        let mut names = BTreeSet::new();
        let mut pods = BTreeSet::new();
        for (at, model) in self.models.iter().enumerate() {
            let path = format!("models[{at}]");
            if model.name.is_empty() {
                found.push(mistake(format!("{path}.name"), "must not be empty"));
            } else if !names.insert(&model.name) {
                let problem = format!("model {} is listed twice", model.name);
                found.push(mistake(format!("{path}.name"), problem));
            }
            for (at, pod) in model.pods.iter().enumerate() {
                let path = format!("{path}.pods[{at}]");
                pod.check(&path, model.configs.len(), &mut found);
                if !pods.insert((&pod.namespace, &pod.name)) {
                    let problem = format!("pod {}/{} is listed twice", pod.namespace, pod.name);
                    found.push(mistake(path, problem));
                }
                if found.len() >= MAX_MISTAKES {
                    found.truncate(MAX_MISTAKES);
                    return found;
                }
            }
        }
        found
    }
}

// === impl Pod ===

impl Pod {
    /// Ready and not draining: may be chosen.
    pub fn usable(&self) -> bool {
        self.ready && !self.draining
    }

    fn check(&self, path: &str, configs: usize, found: &mut Vec<Mistake>) {
        for (field, value) in [
            ("namespace", &self.namespace),
            ("name", &self.name),
            ("engine", &self.engine),
        ] {
            if value.is_empty() {
                found.push(mistake(format!("{path}.{field}"), "must not be empty"));
            }
        }
        // A `SocketAddr` and nothing else: what is chosen becomes the address Envoy connects to.
        match self.address.parse::<SocketAddr>() {
            Ok(address) if address.port() != 0 && !address.ip().is_unspecified() => {}
            Ok(_) | Err(_) => {
                let problem = format!("{:?} is not ip:port of a pod", self.address);
                found.push(mistake(format!("{path}.address"), problem));
            }
        }
        if self.bootstrap_port == Some(0) {
            found.push(mistake(
                format!("{path}.bootstrapPort"),
                "must be 1 to 65535",
            ));
        }
        let known = |config: u32| usize::try_from(config).is_ok_and(|config| config < configs);
        if let Some(config) = self.config.filter(|config| !known(*config)) {
            let problem = format!("{config} is none of the model's {configs} configs");
            found.push(mistake(format!("{path}.config"), problem));
        }
    }
}

fn mistake(path: impl Into<String>, problem: impl Into<String>) -> Mistake {
    Mistake {
        path: path.into(),
        problem: problem.into(),
    }
}

#[cfg(test)]
mod tests;
