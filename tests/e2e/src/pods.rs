//! The pods of a test: an engine each, and the Kubernetes list that names them.

use std::collections::BTreeMap;

use pd_engine_sim::{Engine, EngineConfig, EngineKind, Role};
use serde_json::{Value, json};

/// Model that the engines serve unless a test says otherwise.
pub const MODEL: &str = "sim-model";
/// Namespace of all pods.
pub(crate) const NAMESPACE: &str = "test";

/// A pod to be started.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Pod name; also the engine's.
    pub name: String,
    /// Value of the role label; empty: there is none.
    pub role: String,
    /// Value of the roleset label.
    pub roleset: Option<String>,
    /// Config annotation.
    pub config: Option<Value>,
    /// More labels.
    pub labels: BTreeMap<String, String>,
    /// More annotations.
    pub annotations: BTreeMap<String, String>,
    /// Restarts of its container.
    pub restarts: u32,
    /// How its engine behaves.
    pub engine: EngineConfig,
}

// === impl Pod ===

impl Pod {
    /// The prefill pod of a roleset, named `prefill-ROLESET`.
    pub fn prefill(roleset: &str) -> Self {
        Self::new("prefill", Role::Prefill, Some(roleset))
    }

    /// The decode pod of a roleset, named `decode-ROLESET`.
    pub fn decode(roleset: &str) -> Self {
        Self::new("decode", Role::Decode, Some(roleset))
    }

    /// A combined pod, named `combined`.
    pub fn combined() -> Self {
        let mut pod = Self::new("combined", Role::Both, None);
        "all".clone_into(&mut pod.role);
        pod.profile("routingConfig", json!({ "combined": true }))
    }

    /// Rolesets `r0`, `r1`, … of one prefill and one decode pod each.
    pub fn pairs(count: usize) -> Vec<Self> {
        let names = (0..count).map(|n| format!("r{n}"));
        names
            .flat_map(|name| [Self::prefill(&name), Self::decode(&name)])
            .collect()
    }

    pub(crate) fn new(role: &str, engine_role: Role, roleset: Option<&str>) -> Self {
        let name = match roleset {
            Some(roleset) => format!("{role}-{roleset}"),
            None => role.to_owned(),
        };
        let mut engine = EngineConfig::named(&name, engine_role);
        MODEL.clone_into(&mut engine.model);
        engine.log_ring = 8192;
        engine.log_body_limit = 64 << 20;
        Self {
            name,
            role: role.to_owned(),
            roleset: roleset.map(str::to_owned),
            config: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            restarts: 0,
            engine,
        }
    }

    /// Gives the pod another name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        name.clone_into(&mut self.engine.name);
        self
    }

    /// Serves another model.
    pub fn model(mut self, model: &str) -> Self {
        model.clone_into(&mut self.engine.model);
        self
    }

    /// Sets a member of the default profile of the config annotation.
    pub fn profile(mut self, member: &str, value: Value) -> Self {
        let config = self
            .config
            .get_or_insert_with(|| json!({ "profiles": { "default": {} } }));
        config["profiles"]["default"][member] = value;
        self
    }

    /// Runs another engine.
    pub fn of_engine(mut self, kind: EngineKind) -> Self {
        let label = match kind {
            EngineKind::Vllm => "vllm",
            EngineKind::Sglang => "sglang",
            EngineKind::Trtllm => "trtllm",
        };
        let name = pd_wire::names::LABEL_ENGINE.to_owned();
        self.labels.insert(name, label.to_owned());
        self.engine.engine = kind;
        self
    }

    /// Changes how the engine behaves.
    pub fn engine(mut self, change: impl FnOnce(&mut EngineConfig)) -> Self {
        change(&mut self.engine);
        self
    }

    /// The pod as Kubernetes shows it, served by this engine.
    pub(crate) fn manifest(&self, engine: &Engine, uid: &str) -> Value {
        let at = engine.address();
        let mut labels = self.labels.clone();
        labels
            .entry(pd_wire::names::LABEL_ENGINE.to_owned())
            .or_insert_with(|| "vllm".to_owned());
        let mut label = |name: &str, value: &str| labels.insert(name.to_owned(), value.to_owned());
        label(pd_wire::names::LABEL_MODEL, &self.engine.model);
        label(pd_wire::names::LABEL_PORT, &at.port().to_string());
        if !self.role.is_empty() {
            label(pd_wire::names::LABEL_ROLE, &self.role);
        }
        if let Some(roleset) = &self.roleset {
            label(pd_wire::names::LABEL_ROLESET, roleset);
        }
        let mut annotations = self.annotations.clone();
        if self.engine.engine == EngineKind::Sglang {
            let name = pd_wire::names::ANNOTATION_BOOTSTRAP_PORT.to_owned();
            let port = engine.side_channel_port().to_string();
            annotations.entry(name).or_insert(port);
        }
        if let Some(config) = &self.config {
            let name = pd_wire::names::ANNOTATION_CONFIG.to_owned();
            annotations.insert(name, config.to_string());
        }
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": NAMESPACE,
                "uid": uid,
                "labels": labels,
                "annotations": annotations,
            },
            "spec": { "containers": [{ "name": "engine", "image": "engine" }] },
            "status": {
                "phase": "Running",
                "podIP": at.ip().to_string(),
                "containerStatuses": [{
                    "name": "engine", "image": "engine", "imageID": "engine",
                    "ready": true, "restartCount": self.restarts,
                }],
                "conditions": [{ "type": "Ready", "status": "True" }],
            },
        })
    }
}

/// The list of these pods as `kubectl get pods -o json` prints it.
pub(crate) fn list(pods: impl IntoIterator<Item = Value>) -> Value {
    let items: Vec<Value> = pods.into_iter().collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}
