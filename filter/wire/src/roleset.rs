//! Rolesets: groups of prefill and decode pods that may be paired with each other.
//!
//! A roleset is named by namespace and the value of the roleset label; an empty value is a name
//! like any other. Two namespaces never share one.

use crate::topology::{Pod, Role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Prefill and decode pods that may be paired with each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Roleset {
    /// Namespace of its pods.
    pub namespace: String,
    /// Value of the roleset label.
    pub name: String,
    /// Usable prefill pods, by position in the list of pods.
    pub prefill: Vec<u16>,
    /// Usable decode pods, by position in the list of pods.
    pub decode: Vec<u16>,
}

/// The rolesets of one model's pods that have pods of both phases, usable or not, sorted by
/// namespace and name.
pub fn group(pods: &[Pod]) -> Vec<Roleset> {
    #[derive(Default)]
    struct Group {
        usable: Roleset,
        has_prefill: bool,
        has_decode: bool,
    }
    let mut groups: BTreeMap<(&str, &str), Group> = BTreeMap::new();
    for (position, pod) in (0_u16..).zip(pods) {
        let Some(name) = pod.roleset.as_deref() else {
            continue;
        };
        if pod.role == Role::Standard {
            continue;
        }
        let group = groups.entry((&pod.namespace, name)).or_default();
        let positions = if pod.role == Role::Prefill {
            group.has_prefill = true;
            &mut group.usable.prefill
        } else {
            group.has_decode = true;
            &mut group.usable.decode
        };
        if pod.usable() {
            positions.push(position);
        }
    }
    groups
        .into_iter()
        .filter(|(_, group)| group.has_prefill && group.has_decode)
        .map(|((namespace, name), group)| Roleset {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            ..group.usable
        })
        .collect()
}

// === impl Roleset ===

impl Roleset {
    /// At least one usable pod of each phase.
    pub fn serves(&self) -> bool {
        !self.prefill.is_empty() && !self.decode.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, roleset: Option<&str>, role: Role) -> Pod {
        Pod {
            namespace: namespace.to_owned(),
            name: String::new(),
            uid: String::new(),
            address: String::new(),
            role,
            roleset: roleset.map(str::to_owned),
            engine: String::new(),
            kv_connector: None,
            bootstrap_port: None,
            restarts: 0,
            config: None,
            ready: true,
            draining: false,
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn rolesets_are_told_apart_by_namespace_and_need_both_phases() {
        let pods = [
            pod("b", Some("r"), Role::Decode),
            pod("a", Some("r"), Role::Prefill),
            pod("a", Some("r"), Role::Decode),
            pod("a", Some("r"), Role::Standard),
            pod("a", None, Role::Decode),
            pod("a", Some(""), Role::Prefill),
        ];
        let groups = group(&pods);
        let expected = Roleset {
            namespace: "a".to_owned(),
            name: "r".to_owned(),
            prefill: vec![1],
            decode: vec![2],
        };
        assert_eq!(groups, [expected]);
    }

    #[test]
    fn a_roleset_whose_pods_are_not_ready_or_drain_is_one_that_serves_nothing() {
        let mut draining = pod("a", Some("r"), Role::Prefill);
        draining.draining = true;
        let mut starting = pod("a", Some("r"), Role::Prefill);
        starting.ready = false;
        let groups = group(&[draining, starting, pod("a", Some("r"), Role::Decode)]);
        assert_eq!(groups.len(), 1);
        assert!(groups[0].prefill.is_empty() && !groups[0].serves());
    }
}
