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

/// The rolesets of one model's pods, sorted by namespace and name, also those without a usable
/// pod of one phase.
pub fn group(pods: &[Pod]) -> Vec<Roleset> {
    let mut groups: BTreeMap<(&str, &str), Roleset> = BTreeMap::new();
    for (position, pod) in (0_u16..).zip(pods) {
        let Some(name) = pod.roleset.as_deref() else {
            continue;
        };
        if pod.role == Role::Standard {
            continue;
        }
        let group = groups
            .entry((&pod.namespace, name))
            .or_insert_with(|| Roleset {
                namespace: pod.namespace.clone(),
                name: name.to_owned(),
                ..Roleset::default()
            });
        match pod.role {
            _ if !pod.usable() => {}
            Role::Prefill => group.prefill.push(position),
            Role::Decode => group.decode.push(position),
            Role::Standard => {}
        }
    }
    groups.into_values().collect()
}

// === impl Roleset ===

impl Roleset {
    /// At least one usable pod of each phase.
    pub fn complete(&self) -> bool {
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
        let names: Vec<_> = groups
            .iter()
            .map(|group| {
                (
                    group.namespace.as_str(),
                    group.name.as_str(),
                    group.complete(),
                )
            })
            .collect();
        assert_eq!(
            names,
            [("a", "", false), ("a", "r", true), ("b", "r", false)]
        );
        assert_eq!(
            (&*groups[1].prefill, &*groups[1].decode),
            (&[1][..], &[2][..])
        );
    }

    #[test]
    fn a_pod_that_is_not_ready_or_drains_completes_nothing() {
        let mut draining = pod("a", Some("r"), Role::Prefill);
        draining.draining = true;
        let mut starting = pod("a", Some("r"), Role::Prefill);
        starting.ready = false;
        let groups = group(&[draining, starting, pod("a", Some("r"), Role::Decode)]);
        assert_eq!(groups.len(), 1);
        assert!(!groups[0].complete());
    }
}
