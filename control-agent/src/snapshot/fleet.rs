//! Index → models with their pods, in the order every push and every sample counts by.
//!
//! Models are sorted by name and pods by namespace and name, so equal pods give an equal fleet
//! whatever the order of events. Limits of the wire format are applied here, visibly: what
//! does not fit is left out from the end of that order and reported.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use pd_wire::profile::ModelConfig;
use pd_wire::topology::{MAX_MODELS, MAX_PODS, Model, Pod};

use crate::pods::index::Index;
use crate::pods::settings::{Reading, Record};

/// One pod object: a recreated one has another UID and so other counters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberKey {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Kubernetes UID.
    pub uid: String,
}

/// What the agent itself needs of a pod: where to scrape it.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Which pod object.
    pub key: MemberKey,
    /// Value of its engine label.
    pub engine: String,
    /// Address of its metrics page.
    pub metrics: SocketAddr,
    /// Only ready pods are scraped.
    pub ready: bool,
}

/// All models and pods, ready to be stamped and pushed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fleet {
    /// Models by name.
    pub models: Vec<Model>,
    /// The pods of all models, in the same order: a position is a sample's ordinal.
    pub members: Vec<Member>,
    /// What is wrong with pods, and what did not fit.
    pub warnings: Vec<String>,
}

impl Fleet {
    /// Builds the fleet of an index.
    pub fn of(index: &Index) -> Self {
        let mut warnings = Vec::new();
        let mut models: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for (name, entry) in index.entries() {
            warnings.extend(
                entry
                    .warnings
                    .iter()
                    .map(|warning| format!("pod {name}: {warning}")),
            );
            match &entry.reading {
                Reading::Serving { model, record } => {
                    models.entry(model).or_default().push(record);
                }
                // A model without any reachable pod still exists: its requests get a 503, not
                // a 404.
                Reading::Unreachable { model } => {
                    models.entry(model).or_default();
                }
                Reading::Foreign | Reading::Worker { .. } => {}
            }
        }
        if models.len() > MAX_MODELS {
            warnings.push(format!(
                "{} models, only the first {MAX_MODELS} are kept",
                models.len()
            ));
        }
        let mut fleet = Self::default();
        let mut refused = 0;
        for (name, records) in models.into_iter().take(MAX_MODELS) {
            let room = MAX_PODS.saturating_sub(fleet.members.len());
            refused += records.len().saturating_sub(room);
            fleet.add(name, records.into_iter().take(room));
        }
        if refused > 0 {
            warnings.push(format!("more than {MAX_PODS} pods: {refused} are left out"));
        }
        fleet.warnings = warnings;
        fleet
    }

    fn add<'a>(&mut self, name: &str, records: impl Iterator<Item = &'a Record>) {
        let mut texts: Vec<&str> = Vec::new();
        let mut configs: Vec<ModelConfig> = Vec::new();
        let mut pods = Vec::new();
        for record in records {
            let config = record.config.as_ref().map(|(text, config)| {
                texts
                    .iter()
                    .position(|known| known == text)
                    .unwrap_or_else(|| {
                        texts.push(text);
                        configs.push(config.clone());
                        texts.len() - 1
                    })
            });
            let pod = &record.pod;
            self.members.push(Member {
                key: MemberKey {
                    namespace: pod.namespace.clone(),
                    name: pod.name.clone(),
                    uid: pod.uid.clone(),
                },
                engine: pod.engine.clone(),
                metrics: record.metrics,
                ready: pod.ready,
            });
            let config = config.and_then(|position| u32::try_from(position).ok());
            pods.push(Pod {
                config,
                ..pod.clone()
            });
        }
        self.models.push(Model {
            name: name.to_owned(),
            configs,
            pods,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::document;
    use crate::pods::settings::{PodName, Source};
    use k8s_openapi::api::core::v1::Pod as ApiPod;

    fn pod(name: &str, model: &str) -> (PodName, ApiPod) {
        let text = format!(
            "{{\"metadata\": {{\"name\": \"{name}\", \"labels\": \
             {{\"model.aibrix.ai/name\": \"{model}\"}}}}, \"status\": {{\"podIP\": \"10.0.0.1\"}}}}"
        );
        document::parse(&text).unwrap().pods.remove(0)
    }

    fn fleet(pods: impl Iterator<Item = (PodName, ApiPod)>) -> Fleet {
        let mut index = Index::new(Source::File);
        for (name, pod) in pods {
            index.apply(name, &pod);
        }
        Fleet::of(&index)
    }

    #[test]
    fn the_order_of_events_does_not_matter() {
        let pods = [pod("b", "m"), pod("a", "m"), pod("c", "l")];
        let forth = fleet(pods.iter().cloned());
        assert_eq!(forth, fleet(pods.iter().rev().cloned()));
        let names: Vec<_> = forth
            .members
            .iter()
            .map(|member| member.key.name.as_str())
            .collect();
        assert_eq!(names, ["c", "a", "b"], "models first, then names");
    }

    #[test]
    fn what_the_wire_cannot_hold_is_left_out_and_reported() {
        let models = (0..=MAX_MODELS).map(|n| pod(&format!("p{n:03}"), &format!("m{n:03}")));
        let fleet_of_models = fleet(models);
        assert_eq!(fleet_of_models.models.len(), MAX_MODELS);
        assert_eq!(
            fleet_of_models.warnings,
            ["201 models, only the first 200 are kept"]
        );

        let pods = (0..MAX_PODS + 3).map(|n| pod(&format!("p{n:05}"), "m"));
        let fleet_of_pods = fleet(pods.chain([pod("q", "z")]));
        assert_eq!(fleet_of_pods.members.len(), MAX_PODS);
        assert_eq!(
            fleet_of_pods.warnings,
            ["more than 8192 pods: 4 are left out"]
        );
        assert_eq!(
            fleet_of_pods.models.len(),
            2,
            "a model without room for pods is still known"
        );
    }
}
