//! Index → models with their pods, in the order every push and every sample counts by.
//!
//! Models are sorted by name and pods by namespace and name, so equal pods give an equal fleet
//! whatever the order of events. Limits of the wire format are applied here, visibly: what
//! does not fit is left out from the end of that order and reported.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use pd_wire::names;
use pd_wire::profile::ModelConfig;
use pd_wire::topology::{MAX_MODELS, MAX_PODS, Model, Pod};

use super::pairs::{self, Half};
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
        let mut halves: BTreeMap<&str, Vec<Half<'_>>> = BTreeMap::new();
        let mut pods = 0_usize;
        for (name, entry) in index.entries() {
            warnings.extend(
                entry
                    .warnings
                    .iter()
                    .map(|warning| format!("pod {name}: {warning}")),
            );
            pods += 1;
            match &entry.reading {
                Reading::Serving { model, record } => {
                    models.entry(model).or_default().push(record);
                }
                // A model without any reachable pod still exists: its requests get a 503, not
                // a 404.
                Reading::Unreachable { model, .. } => {
                    models.entry(model).or_default();
                }
                Reading::Foreign | Reading::Worker { .. } => {}
            }
            if let Some((model, half)) = Half::of(&name.namespace, &entry.reading) {
                halves.entry(model).or_default().push(half);
            }
        }
        if pods == 0 {
            warnings.push(
                "no pod was found: requests for any model get a 404; list pods under `items`"
                    .to_owned(),
            );
        }
        // Beside pods that serve a model, others are none of ours.
        if pods > 0 && models.is_empty() {
            warnings.push(format!(
                "none of {pods} pods has the label (or annotation) {}: requests for any model get \
                 a 404; give it to those that serve a model",
                names::LABEL_MODEL
            ));
        }
        for (model, halves) in halves.iter().take(MAX_MODELS) {
            warnings.extend(pairs::warnings(model, halves));
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

    /// The fleet of a pods file.
    fn of_file(text: &str) -> Fleet {
        crate::pods::file::load(text).unwrap().1
    }

    /// A pod of model `m` as a line of YAML.
    fn half(name: &str, role: &str, roleset: &str, status: &str) -> String {
        format!(
            "- {{metadata: {{name: {name}, labels: {{model.aibrix.ai/name: m, role-name: {role}, \
             roleset-name: {roleset}}}}}, status: {{{status}}}}}\n"
        )
    }

    #[test]
    fn a_file_without_pods_says_so() {
        let no_pod =
            ["no pod was found: requests for any model get a 404; list pods under `items`"];
        assert_eq!(of_file("items: []").warnings, no_pod);
        assert_eq!(
            of_file("{kind: Service, metadata: {name: s}}").warnings,
            no_pod
        );
    }

    #[test]
    fn pods_without_a_model_are_told_where_no_other_is() {
        let foreign: String = (0..9)
            .map(|n| format!("- metadata: {{name: f{n}}}\n"))
            .collect();
        let ours = half("ours", "all", "r", "podIP: 10.0.0.1");
        let none = "none of 9 pods has the label (or annotation) model.aibrix.ai/name: requests for \
                    any model get a 404; give it to those that serve a model";
        assert_eq!(of_file(&foreign).warnings, [none]);
        let beside = of_file(&(foreign + &ours)).warnings;
        assert_eq!(beside, Vec::<String>::new());
    }

    #[test]
    fn halves_that_cannot_be_paired_are_told_whatever_their_state() {
        let up = "podIP: 10.0.0.1";
        let prefill = half("p", "prefill", "a", up);
        let fix =
            "give a role-name prefill and a decode pod of one namespace the same roleset-name";
        let split = format!(
            "model m: no request is split into prefill and decode: roleset default/a has no \
             decode pod, roleset default/b has no prefill pod; {fix}"
        );
        let about_pairs = |decode: &str| {
            let mut warnings = of_file(&format!("{prefill}{decode}")).warnings;
            warnings.retain(|warning| !warning.contains("status.podIP"));
            warnings
        };
        let states = [
            up,
            "podIP: 10.0.0.1, conditions: [{type: Ready, status: \"False\"}]",
            "podIP: \"\"",
        ];
        for state in states {
            assert_eq!(
                about_pairs(&half("d", "decode", "b", state)),
                [split.as_str()]
            );
            assert_eq!(
                about_pairs(&half("d", "decode", "a", state)),
                Vec::<String>::new(),
                "{state}"
            );
        }
        // The misspelt role is no half at all.
        let warnings = about_pairs(&half("d", "decod", "a", up));
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("pod default/d: label role-name is \"decod\""));
        assert!(warnings[1].starts_with("model m: ") && warnings[1].contains("no decode pod;"));
    }
}
