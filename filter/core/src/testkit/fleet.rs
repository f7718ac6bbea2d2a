//! Builders of pods, models and topologies, with chained modifiers.

use super::MemoryStore;
use crate::fleet::{FleetCache, ModelFleet, accept_samples, accept_topology};
use pd_wire::profile::ModelConfig;
use pd_wire::samples::{PodSample, Samples};
use pd_wire::topology::{Model, Pod, Role, Stamp, Topology, WIRE_VERSION};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Builds a pod.
#[derive(Clone, Debug)]
pub struct PodBuilder {
    pod: Pod,
    config: Option<ModelConfig>,
}

/// Builds a model.
#[derive(Clone, Debug)]
pub struct ModelBuilder {
    model: Model,
}

/// Builds a topology.
#[derive(Clone, Debug)]
pub struct TopologyBuilder {
    topology: Topology,
}

/// A ready standard vLLM pod. `name` is `namespace/name` or a name in namespace `default`; the
/// address is made of the name, so two pods never share one by accident.
pub fn pod(name: &str) -> PodBuilder {
    let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
    let hash = crate::ledger::PodKey::of(namespace, name, "address").0;
    let [a, b, c, ..] = hash.to_le_bytes();
    PodBuilder {
        pod: Pod {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            address: format!("10.{a}.{b}.{c}:8000"),
            role: Role::Standard,
            roleset: None,
            engine: "vllm".to_owned(),
            kv_connector: None,
            bootstrap_port: None,
            restarts: 0,
            config: None,
            ready: true,
            draining: false,
            labels: BTreeMap::new(),
        },
        config: None,
    }
}

/// A model without pods.
pub fn model(name: &str) -> ModelBuilder {
    ModelBuilder {
        model: Model {
            name: name.to_owned(),
            configs: Vec::new(),
            pods: Vec::new(),
        },
    }
}

/// A topology of agent `agent-1` without models.
pub fn topology(epoch: u64, sequence: u64) -> TopologyBuilder {
    let stamp = Stamp {
        version: WIRE_VERSION,
        agent: "agent-1".to_owned(),
        epoch,
        sequence,
    };
    TopologyBuilder {
        topology: Topology {
            stamp,
            replicas: 1,
            models: Vec::new(),
        },
    }
}

// === impl PodBuilder ===

impl PodBuilder {
    /// Serves the prefill phase.
    pub fn prefill(mut self) -> Self {
        self.pod.role = Role::Prefill;
        self
    }

    /// Serves the decode phase.
    pub fn decode(mut self) -> Self {
        self.pod.role = Role::Decode;
        self
    }

    /// Belongs to a roleset.
    pub fn roleset(mut self, name: &str) -> Self {
        self.pod.roleset = Some(name.to_owned());
        self
    }

    /// Kubernetes UID.
    pub fn uid(mut self, uid: &str) -> Self {
        uid.clone_into(&mut self.pod.uid);
        self
    }

    /// `ip:port`.
    pub fn address(mut self, address: &str) -> Self {
        address.clone_into(&mut self.pod.address);
        self
    }

    /// Engine label.
    pub fn engine(mut self, engine: &str) -> Self {
        engine.clone_into(&mut self.pod.engine);
        self
    }

    /// KV connector label.
    pub fn kv_connector(mut self, connector: &str) -> Self {
        self.pod.kv_connector = Some(connector.to_owned());
        self
    }

    /// SGLang bootstrap port.
    pub fn bootstrap_port(mut self, port: u16) -> Self {
        self.pod.bootstrap_port = Some(port);
        self
    }

    /// Restarts of its containers.
    pub fn restarts(mut self, restarts: u32) -> Self {
        self.pod.restarts = restarts;
        self
    }

    /// A label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.pod.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Config annotation.
    pub fn config(mut self, config: ModelConfig) -> Self {
        self.config = Some(config);
        self
    }

    /// Not ready.
    pub fn unready(mut self) -> Self {
        self.pod.ready = false;
        self
    }

    /// Draining.
    pub fn draining(mut self) -> Self {
        self.pod.draining = true;
        self
    }
}

// === impl ModelBuilder ===

impl ModelBuilder {
    /// Adds a pod.
    pub fn pod(mut self, builder: PodBuilder) -> Self {
        let PodBuilder { mut pod, config } = builder;
        if let Some(config) = config {
            let known = self.model.configs.iter().position(|known| *known == config);
            let at = known.unwrap_or_else(|| {
                self.model.configs.push(config);
                self.model.configs.len().saturating_sub(1)
            });
            pod.config = u32::try_from(at).ok();
        }
        self.model.pods.push(pod);
        self
    }

    /// Adds a complete roleset of one prefill and one decode pod, named `<roleset>-p` and
    /// `<roleset>-d`.
    pub fn pair(self, roleset: &str) -> Self {
        self.pod(pod(&format!("{roleset}-p")).prefill().roleset(roleset))
            .pod(pod(&format!("{roleset}-d")).decode().roleset(roleset))
    }

    /// The pushed form.
    pub fn build(self) -> Model {
        self.model
    }

    /// What selection reads, without samples.
    ///
    /// # Panics
    /// When the model breaks a rule of topologies.
    pub fn fleet(self) -> Rc<ModelFleet> {
        self.fleet_with(&[], 0)
    }

    /// What selection reads, with samples by pod name, stored at `now_ms`.
    ///
    /// # Panics
    /// When the model breaks a rule of topologies, or a sample names no pod.
    #[allow(clippy::panic)] // Runs in tests only.
    pub fn fleet_with(self, samples: &[(&str, PodSample)], now_ms: u64) -> Rc<ModelFleet> {
        let name = self.model.name.clone();
        let position = |pod: &str| {
            let found = self.model.pods.iter().position(|it| it.name == pod);
            let Some(position) = found else {
                panic!("no pod {pod}")
            };
            u32::try_from(position).unwrap_or(u32::MAX)
        };
        let pods = samples
            .iter()
            .map(|(pod, sample)| PodSample {
                ordinal: position(pod),
                ..*sample
            })
            .collect();
        let store = MemoryStore::new();
        let builder = topology(1, 1).model(self);
        let samples = Samples {
            pods,
            ..builder.samples(1)
        };
        if let Err(refusal) = accept_topology(&store, &builder.json(), now_ms) {
            panic!("{}", refusal.reply.error);
        }
        if let Err(refusal) = accept_samples(&store, &samples.encode(), now_ms) {
            panic!("{}", refusal.reply.error);
        }
        let mut cache = FleetCache::new();
        cache.refresh(&store);
        let Some(fleet) = cache.model(&name) else {
            panic!("no model {name}")
        };
        fleet
    }
}

// === impl TopologyBuilder ===

impl TopologyBuilder {
    /// Adds a model.
    pub fn model(mut self, model: ModelBuilder) -> Self {
        self.topology.models.push(model.model);
        self
    }

    /// Sender.
    pub fn agent(mut self, agent: &str) -> Self {
        agent.clone_into(&mut self.topology.stamp.agent);
        self
    }

    /// Live gateway replicas.
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.topology.replicas = replicas;
        self
    }

    /// The topology.
    pub fn build(self) -> Topology {
        self.topology
    }

    /// The pushed form.
    pub fn json(&self) -> Vec<u8> {
        serde_json::to_vec(&self.topology).unwrap_or_default()
    }

    /// Samples that index this topology, of no pod.
    pub fn samples(&self, sequence: u64) -> Samples {
        Samples {
            stamp: Stamp {
                sequence,
                ..self.topology.stamp.clone()
            },
            topology_sequence: self.topology.stamp.sequence,
            pods: Vec::new(),
        }
    }
}
