//! Pods and variables as AIBrix's documentation writes them: pieces of YAML, taken as they stand.

use std::collections::BTreeMap;

use pd_engine_sim::Role;
use pd_wire::names;
use serde_norway::Value;

use crate::pods::Pod;

/// The variables of a piece of a Deployment (`env:`) or of Helm values (`envs:`).
pub fn variables(piece: &str) -> BTreeMap<String, String> {
    let piece = parse(piece);
    let mut found = strings(&piece["gatewayPlugin"]["container"]["envs"]);
    for entry in piece["env"].as_sequence().into_iter().flatten() {
        let text = |member: &str| entry[member].as_str().unwrap_or_default().to_owned();
        found.insert(text("name"), text("value"));
    }
    assert!(!found.is_empty(), "no variables in {piece:?}");
    found
}

// === impl Pod ===

impl Pod {
    /// The pod of a pod template's `metadata:`, and of `annotations:` to be added to it. Only its
    /// address is the simulated engine's own: the port label gives way.
    pub fn documented(name: &str, pieces: &[&str]) -> Self {
        let (mut labels, mut annotations) = (BTreeMap::new(), BTreeMap::new());
        for piece in pieces {
            let piece = parse(piece);
            let metadata = piece.get("metadata").unwrap_or(&piece);
            let (more_labels, more) = (
                strings(&metadata["labels"]),
                strings(&metadata["annotations"]),
            );
            assert!(
                !more_labels.is_empty() || !more.is_empty(),
                "nothing for a pod in {piece:?}"
            );
            labels.extend(more_labels);
            annotations.extend(more);
        }
        let label = |name: &str| labels.get(name).map_or("", String::as_str);
        let role = match label(names::LABEL_ROLE) {
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            _ => Role::Both,
        };
        let roleset = labels.get(names::LABEL_ROLESET).map(String::as_str);
        let pod = Self::new(label(names::LABEL_ROLE), role, roleset);
        let mut pod = pod.named(name).model(label(names::LABEL_MODEL));
        (pod.labels, pod.annotations) = (labels, annotations);
        pod
    }

    /// Another roleset.
    pub fn in_roleset(mut self, roleset: &str) -> Self {
        self.roleset = Some(roleset.to_owned());
        self
    }
}

fn parse(piece: &str) -> Value {
    match serde_norway::from_str(piece) {
        Ok(value) => value,
        Err(error) => panic!("{error} in {piece}"),
    }
}

/// The members of a mapping whose values are text; none for anything else.
fn strings(mapping: &Value) -> BTreeMap<String, String> {
    let members = mapping.as_mapping().into_iter().flatten();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    members
        .filter_map(|(name, value)| Some((text(name)?, text(value)?)))
        .collect()
}
