//! Labels, annotations and status of one Kubernetes pod → what the filter needs to know.
//!
//! Lenient by design: a value that cannot be used is named in a warning and its default
//! stands; only a pod that cannot be reached at all is left out. Meaning and defaults of the
//! labels are AIBrix's, except that the metrics port defaults to the model port (there it is
//! always 8000, so pods on other ports are never scraped).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::Pod;
use pd_wire::knobs::excerpt;
use pd_wire::names;
use pd_wire::profile::ModelConfig;
use pd_wire::spelling::closest;
use pd_wire::topology;

use super::keys;

/// Label of Ray's worker pods, which serve no HTTP.
const LABEL_RAY_NODE: &str = "ray.io/node-type";
/// Engine of a pod without an engine label.
const DEFAULT_ENGINE: &str = "vllm";
/// Values of the role label that say on purpose: neither a prefill nor a decode pod.
const STANDARD_ROLES: [&str; 3] = ["all", "combined", "standard"];

/// Where a pod description comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Written by hand or saved: a pod without conditions is ready if it has an IP, and a
    /// missing UID is made from namespace, name and IP.
    File,
    /// The API server: readiness and UID are always there.
    Cluster,
}

/// Namespace and name: what identifies a pod object at one time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodName {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Name, unique in the namespace.
    pub name: String,
}

impl PodName {
    /// Name of a pod object; `None` when it has none. The namespace defaults to `default`.
    pub fn of(pod: &Pod) -> Option<Self> {
        let name = pod.metadata.name.clone().filter(|name| !name.is_empty())?;
        let namespace = pod
            .metadata
            .namespace
            .clone()
            .filter(|namespace| !namespace.is_empty());
        Some(Self {
            namespace: namespace.unwrap_or_else(|| "default".to_owned()),
            name,
        })
    }
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod that can take requests, now or once it is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// What is pushed; [`topology::Pod::config`] is set when the fleet is built.
    pub pod: topology::Pod,
    /// Config annotation: its text, which identifies it, and its meaning.
    pub config: Option<(String, ModelConfig)>,
    /// Address of the metrics page.
    pub metrics: SocketAddr,
}

/// What a pod's labels say of its part in pairs, whether or not it can take requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Phase it serves.
    pub role: topology::Role,
    /// Value of its roleset label.
    pub roleset: Option<String>,
    /// Value of its engine label.
    pub engine: String,
}

/// What a pod object means for routing.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// Names no model: not ours.
    Foreign,
    /// Serves the model together with other pods but has no HTTP server of its own.
    Worker {
        /// Why it is taken for a worker.
        reason: &'static str,
    },
    /// Belongs to a model but has no usable address.
    Unreachable {
        /// Model it will serve.
        model: String,
        /// Its part once it has an address.
        part: Part,
    },
    /// Can be routed to.
    Serving {
        /// Model it serves.
        model: String,
        /// The pod.
        record: Box<Record>,
    },
}

/// Reads one pod. The warnings name the field and the value that stands instead.
pub fn read(pod: &Pod, name: &PodName, source: Source) -> (Reading, Vec<String>) {
    let mut reader = Reader {
        pod,
        warnings: keys::idle(&pod.metadata.labels, &pod.metadata.annotations),
    };
    let reading = reader.read(name, source);
    (reading, reader.warnings)
}

struct Reader<'a> {
    pod: &'a Pod,
    warnings: Vec<String>,
}

impl<'a> Reader<'a> {
    fn read(&mut self, name: &PodName, source: Source) -> Reading {
        let named = self
            .label(names::LABEL_MODEL)
            .or_else(|| self.annotation(names::LABEL_MODEL));
        let Some(model) = named else {
            return Reading::Foreign;
        };
        if let Some(reason) = self.worker() {
            return Reading::Worker { reason };
        }
        let model = model.to_owned();
        let config = self.config();
        let part = self.part(config.as_ref().map(|(_, config)| config));
        let Some(ip) = self.ip() else {
            return Reading::Unreachable { model, part };
        };
        let port = self.port(names::LABEL_PORT, names::DEFAULT_MODEL_PORT);
        let metric_port = self.port(names::LABEL_METRIC_PORT, port);
        let labels = self.pod.metadata.labels.clone().unwrap_or_default();
        let record = Record {
            pod: topology::Pod {
                namespace: name.namespace.clone(),
                name: name.name.clone(),
                uid: self.uid(name, ip, source),
                address: SocketAddr::new(ip, port).to_string(),
                role: part.role,
                roleset: part.roleset,
                engine: part.engine,
                kv_connector: self
                    .label(names::LABEL_KV_CONNECTOR)
                    .map(str::to_ascii_lowercase),
                bootstrap_port: self.bootstrap_port(),
                restarts: self.restarts(),
                config: None,
                ready: self.ready(source),
                draining: self.draining(),
                labels: self.bounded(labels),
            },
            config,
            metrics: SocketAddr::new(ip, metric_port),
        };
        Reading::Serving {
            model,
            record: Box::new(record),
        }
    }

    fn warn(&mut self, text: String) {
        self.warnings.push(text);
    }

    /// Trimmed value of a label; an empty one counts as absent.
    fn label(&self, key: &str) -> Option<&'a str> {
        let value = self.pod.metadata.labels.as_ref()?.get(key)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Trimmed value of an annotation; an empty one counts as absent.
    fn annotation(&self, key: &str) -> Option<&'a str> {
        let value = self.pod.metadata.annotations.as_ref()?.get(key)?.trim();
        (!value.is_empty()).then_some(value)
    }

    fn worker(&mut self) -> Option<&'static str> {
        if self.label(LABEL_RAY_NODE) == Some("worker") {
            return Some("Ray worker");
        }
        let index = self
            .pod
            .metadata
            .labels
            .as_ref()?
            .get(names::LABEL_POD_GROUP_INDEX)?;
        if index == "0" {
            return None;
        }
        if index.parse::<u32>().is_err() {
            self.warn(format!(
                "label {} is {index:?}: only \"0\" serves HTTP, the pod is left out",
                names::LABEL_POD_GROUP_INDEX
            ));
        }
        Some("not the first pod of its group")
    }

    fn part(&mut self, config: Option<&ModelConfig>) -> Part {
        let role = self.role(config);
        // An empty roleset label is a legal group name, so only its presence counts.
        let labels = self.pod.metadata.labels.as_ref();
        let roleset = labels.and_then(|labels| labels.get(names::LABEL_ROLESET));
        if role != topology::Role::Standard && roleset.is_none() {
            self.warn(format!(
                "no label {}: the pod takes no part in prefill/decode routing",
                names::LABEL_ROLESET
            ));
        }
        let engine = self.label(names::LABEL_ENGINE).unwrap_or(DEFAULT_ENGINE);
        Part {
            role,
            roleset: roleset.cloned(),
            engine: engine.to_owned(),
        }
    }

    /// Any other role than the two is a standard pod's; one that neither its name nor a profile
    /// calls that is more likely misspelt.
    fn role(&mut self, config: Option<&ModelConfig>) -> topology::Role {
        let text = match self.label(names::LABEL_ROLE) {
            Some("prefill") => return topology::Role::Prefill,
            Some("decode") => return topology::Role::Decode,
            Some(text) if !STANDARD_ROLES.contains(&text) => text,
            _ => return topology::Role::Standard,
        };
        let mut profiles = config
            .into_iter()
            .flat_map(|config| config.profiles.values());
        if !profiles.any(|profile| profile.combined) {
            let fix = match closest(text, ["prefill", "decode"]) {
                Some(meant) => format!("did you mean {meant}?"),
                None => "if that is meant, call it \"all\" or leave the label out".to_owned(),
            };
            self.warn(format!(
                "label {} is {:?}, neither \"prefill\" nor \"decode\": the pod counts as a \
                 standard one; {fix}",
                names::LABEL_ROLE,
                excerpt(text)
            ));
        }
        topology::Role::Standard
    }

    fn ip(&mut self) -> Option<IpAddr> {
        let text = self
            .pod
            .status
            .as_ref()
            .and_then(|status| status.pod_ip.as_deref());
        let text = text.unwrap_or_default().trim();
        if text.is_empty() {
            self.warn("no status.podIP: the pod is left out".to_owned());
            return None;
        }
        let ip = text.parse().ok().filter(|ip: &IpAddr| !ip.is_unspecified());
        if ip.is_none() {
            self.warn(format!(
                "status.podIP {text:?} is no pod's address: the pod is left out"
            ));
        }
        ip
    }

    fn port(&mut self, key: &str, default: u16) -> u16 {
        let Some(text) = self.label(key) else {
            return default;
        };
        match text.parse() {
            Ok(port) if port != 0 => port,
            _ => {
                self.warn(format!(
                    "label {key} is {text:?}, not a port from 1 to 65535: {default}"
                ));
                default
            }
        }
    }

    /// Restarts of all containers.
    fn restarts(&self) -> u32 {
        let status = self.pod.status.as_ref();
        let containers = status.and_then(|status| status.container_statuses.as_ref());
        let counts = containers.into_iter().flatten();
        let counts = counts.map(|container| u32::try_from(container.restart_count).unwrap_or(0));
        counts.fold(0, u32::saturating_add)
    }

    fn bootstrap_port(&mut self) -> Option<u16> {
        let text = self.annotation(names::ANNOTATION_BOOTSTRAP_PORT)?;
        let port = text.parse().ok().filter(|port| *port != 0);
        if port.is_none() {
            self.warn(format!(
                "annotation {} is {text:?}, not a port from 1 to 65535: {}",
                names::ANNOTATION_BOOTSTRAP_PORT,
                names::DEFAULT_BOOTSTRAP_PORT
            ));
        }
        port
    }

    /// Being deleted, or without a Ready condition that is true, means not ready.
    fn ready(&self, source: Source) -> bool {
        if self.pod.metadata.deletion_timestamp.is_some() {
            return false;
        }
        let conditions = self
            .pod
            .status
            .as_ref()
            .and_then(|status| status.conditions.as_ref());
        match conditions {
            None => source == Source::File,
            Some(conditions) => conditions
                .iter()
                .any(|c| c.type_ == "Ready" && c.status == "True"),
        }
    }

    fn draining(&mut self) -> bool {
        match self.annotation(names::ANNOTATION_DRAIN) {
            Some("true") => true,
            None | Some("false") => false,
            Some(other) => {
                self.warn(format!(
                    "annotation {} is {other:?}, neither \"true\" nor \"false\": false",
                    names::ANNOTATION_DRAIN
                ));
                false
            }
        }
    }

    /// The labels that are pushed: those that fit, in the order of their keys.
    fn bounded(&mut self, mut labels: BTreeMap<String, String>) -> BTreeMap<String, String> {
        let all = labels.len();
        let mut bytes = 0_usize;
        labels.retain(|key, value| {
            bytes = bytes.saturating_add(key.len()).saturating_add(value.len());
            bytes <= topology::MAX_LABELS
        });
        let left_out = all - labels.len();
        if left_out > 0 {
            self.warn(format!(
                "labels of more than {} bytes: {left_out} of {all} are left out, and \
                 external-filter does not see them",
                topology::MAX_LABELS
            ));
        }
        labels
    }

    /// A file may leave the UID out; the one made here stays the same over reloads and
    /// changes with the address, as a recreated pod's does.
    fn uid(&self, name: &PodName, ip: IpAddr, source: Source) -> String {
        match self.pod.metadata.uid.as_deref().map(str::trim) {
            Some(uid) if !uid.is_empty() => uid.to_owned(),
            _ if source == Source::File => format!("{}/{}/{ip}", name.namespace, name.name),
            _ => String::new(),
        }
    }

    fn config(&mut self) -> Option<(String, ModelConfig)> {
        let text = self.annotation(names::ANNOTATION_CONFIG)?;
        let (config, warnings) = ModelConfig::parse(text);
        for warning in warnings {
            self.warn(format!(
                "annotation {}: {warning}",
                names::ANNOTATION_CONFIG
            ));
        }
        config.map(|config| (text.to_owned(), config))
    }
}

#[cfg(test)]
mod tests;
