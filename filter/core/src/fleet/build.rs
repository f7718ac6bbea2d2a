//! Compiles a pushed topology: sorts pods, groups rolesets, encodes each model by itself, and gives
//! every model its ledger slot.

use super::FleetPod;
use super::snapshot::{IndexedModel, ModelBody, TopologyIndex};
use crate::ledger::{MODEL_SLOTS, PodKey};
use pd_wire::roleset;
use pd_wire::topology::{Model, Pod, Topology};
use std::collections::{BTreeMap, BTreeSet};

/// A topology that only lacks its ledger slots.
#[derive(Debug, Default)]
pub struct Compiled {
    /// Models in the order they were pushed; slots are 0.
    pub models: Vec<IndexedModel>,
    /// Keys of all pods, in the order of the pushed lists.
    pub keys: Vec<PodKey>,
    /// Bodies of all models.
    pub bodies: Vec<u8>,
}

/// Compiles all models; `None` when a model cannot be encoded.
pub fn compile(topology: Topology) -> Option<Compiled> {
    let mut out = Compiled::default();
    for model in topology.models {
        out.keys.extend(model.pods.iter().map(key));
        let offset = u32::try_from(out.bodies.len()).ok()?;
        let pods = u32::try_from(model.pods.len()).ok()?;
        let name = model.name.clone();
        let body = postcard::to_allocvec(&body(model)?).ok()?;
        out.bodies.extend_from_slice(&body);
        let len = u32::try_from(body.len()).ok()?;
        out.models.push(IndexedModel {
            name,
            slot: 0,
            pods,
            offset,
            len,
        });
    }
    Some(out)
}

/// Compiles one model; `None` when a config cannot be encoded.
pub fn body(mut model: Model) -> Option<ModelBody> {
    model
        .pods
        .sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    let configs: Result<Vec<String>, _> = model.configs.iter().map(serde_json::to_string).collect();
    Some(ModelBody {
        config: model.pods.iter().find_map(|pod| pod.config),
        rolesets: roleset::group(&model.pods),
        configs: configs.ok()?,
        pods: model.pods.into_iter().map(fleet_pod).collect(),
    })
}

/// Gives every model a ledger slot: the one it had, also when it was away for a while, else the
/// lowest free one, preferring slots whose record is empty. Sharing a slot with the charges of a
/// model that left is harmless, since cells name pods, so this never fails.
///
/// Models that left stay known by name (`retired`) until their slot is given away.
pub fn assign_slots(
    models: &mut [IndexedModel],
    held: &TopologyIndex,
    record_is_empty: impl Fn(u16) -> bool,
) -> Vec<(String, u16)> {
    let mut known: BTreeMap<&str, u16> = BTreeMap::new();
    let before: Vec<(&str, u16)> = held
        .models
        .iter()
        .map(|model| (model.name.as_str(), model.slot))
        .chain(
            held.retired
                .iter()
                .map(|(name, slot)| (name.as_str(), *slot)),
        )
        .collect();
    for (name, slot) in &before {
        known.entry(name).or_insert(*slot);
    }
    let mut taken = BTreeSet::new();
    let mut new = Vec::new();
    for model in models.iter_mut() {
        match known.get(model.name.as_str()) {
            Some(slot) if *slot < MODEL_SLOTS && taken.insert(*slot) => model.slot = *slot,
            _ => new.push(model),
        }
    }
    if !new.is_empty() {
        let old: BTreeSet<u16> = before.iter().map(|(_, slot)| *slot).collect();
        let mut free: Vec<u16> = (0..MODEL_SLOTS)
            .filter(|slot| !taken.contains(slot))
            .collect();
        free.sort_by_cached_key(|slot| (!record_is_empty(*slot), old.contains(slot)));
        for (model, slot) in new.into_iter().zip(free) {
            taken.insert(slot);
            model.slot = slot;
        }
    }
    let mut retired: Vec<(String, u16)> = Vec::new();
    for (name, slot) in before {
        if slot < MODEL_SLOTS && taken.insert(slot) {
            retired.push((name.to_owned(), slot));
        }
    }
    retired
}

fn key(pod: &Pod) -> PodKey {
    PodKey::of(&pod.namespace, &pod.name, &pod.uid)
}

fn fleet_pod(pod: Pod) -> FleetPod {
    FleetPod {
        key: key(&pod),
        usable: pod.usable(),
        namespace: pod.namespace,
        name: pod.name,
        address: pod.address,
        role: pod.role,
        engine: pod.engine,
        kv_connector: pod.kv_connector,
        bootstrap_port: pod.bootstrap_port,
        restarts: pod.restarts,
        config: pod.config,
        labels: pod.labels.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(names: &[&str]) -> Vec<IndexedModel> {
        names
            .iter()
            .map(|name| IndexedModel {
                name: (*name).to_owned(),
                ..IndexedModel::default()
            })
            .collect()
    }

    fn push(names: &[&str], held: &TopologyIndex, busy: &[u16]) -> TopologyIndex {
        let mut models = models(names);
        let retired = assign_slots(&mut models, held, |slot| !busy.contains(&slot));
        TopologyIndex {
            models,
            retired,
            ..TopologyIndex::default()
        }
    }

    fn slots(index: &TopologyIndex) -> Vec<u16> {
        index.models.iter().map(|model| model.slot).collect()
    }

    #[test]
    fn a_model_keeps_its_slot_over_pushes_and_absence() {
        let first = push(&["a", "b", "c"], &TopologyIndex::default(), &[]);
        assert_eq!(slots(&first), [0, 1, 2]);
        let second = push(&["c", "a"], &first, &[]);
        assert_eq!(slots(&second), [2, 0]);
        assert_eq!(second.retired, [("b".to_owned(), 1)]);
        let third = push(&["d", "c", "a"], &second, &[]);
        assert_eq!(slots(&third), [3, 2, 0]);
        let fourth = push(&["b", "d"], &third, &[]);
        assert_eq!(slots(&fourth), [1, 3]);
    }

    #[test]
    fn slots_with_an_empty_record_are_given_away_first() {
        let names: Vec<String> = (0..MODEL_SLOTS).map(|at| format!("m{at}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let full = push(&names, &TopologyIndex::default(), &[]);
        let one = push(&names[..1], &full, &[]);
        assert_eq!(one.retired.len(), 255);
        let busy: Vec<u16> = (1..255).collect();
        let two = push(&["m0", "new", "newer"], &one, &busy);
        assert_eq!(slots(&two), [0, 255, 1]);
        assert_eq!(two.retired.len(), 253);
        assert!(
            two.retired
                .iter()
                .all(|(_, slot)| *slot != 255 && *slot != 1)
        );
    }

    #[test]
    fn slots_are_never_shared_by_two_models_of_one_topology() {
        let mut held = push(&["a", "b"], &TopologyIndex::default(), &[]);
        held.models[1].slot = 0;
        held.retired.push(("c".to_owned(), u16::MAX));
        let next = push(&["a", "b", "c"], &held, &[]);
        assert_eq!(slots(&next), [0, 1, 2]);
    }
}
