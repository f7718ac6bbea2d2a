//! The snapshot as one VM holds it: refreshed when the head moved, models decoded when asked for.

use super::snapshot::{
    IndexedModel, KEY_HEAD, KEY_SAMPLES, KEY_TOPOLOGY, ModelBody, SamplesIndex, TopologyIndex,
    TopologyParts,
};
use super::{FleetPod, ModelFleet};
use crate::ledger::record::u64_at;
use crate::ledger::{KeyHasher, PodKey};
use crate::port::SharedStore;
use pd_wire::control::{ModelStatus, SnapshotStatus};
use pd_wire::profile::ModelConfig;
use pd_wire::samples::PodSample;
use std::collections::BTreeMap;
use std::hash::BuildHasherDefault;
use std::rc::Rc;

type Positions = hashbrown::HashMap<PodKey, u16, BuildHasherDefault<KeyHasher>>;

/// What one VM knows of the fleet.
#[derive(Debug, Default)]
pub struct FleetCache {
    head: Vec<u8>,
    topology: Option<HeldTopology>,
    samples: Option<HeldSamples>,
    /// Raised with every new set of samples.
    round: u64,
    decoded: BTreeMap<u16, Decoded>,
    /// Summary of the topology, made when it is first asked for.
    summary: Option<Vec<ModelStatus>>,
}

#[derive(Debug)]
struct HeldTopology {
    index: TopologyIndex,
    bytes: Vec<u8>,
    /// Where the bodies start.
    bodies: usize,
    /// Position in the index by name.
    names: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct HeldSamples {
    index: SamplesIndex,
    bytes: Vec<u8>,
    /// Where the samples start.
    bodies: usize,
}

#[derive(Debug)]
struct Decoded {
    fleet: Rc<ModelFleet>,
    positions: Positions,
    round: u64,
}

// === impl FleetCache ===

impl FleetCache {
    /// Nothing held.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks whether something newer was pushed and takes it over. One small read when not.
    /// True when something changed.
    pub fn refresh<S: SharedStore + ?Sized>(&mut self, store: &S) -> bool {
        let Some(head) = store.get(KEY_HEAD).filter(|head| head.bytes != self.head) else {
            return false;
        };
        self.head = head.bytes;
        let topology = self.refresh_topology(store);
        let samples = self.refresh_samples(store);
        topology || samples
    }

    /// True when a topology is held.
    pub fn ready(&self) -> bool {
        self.topology.is_some()
    }

    /// A model with the newest samples of its pods; `None` when the topology does not name it.
    pub fn model(&mut self, name: &str) -> Option<Rc<ModelFleet>> {
        let held = self.topology.as_ref()?;
        let entry = held.index.models.get(*held.names.get(name)?)?;
        let decoded = match self.decoded.remove(&entry.slot) {
            Some(decoded) if decoded.round == self.round => decoded,
            Some(stale) => stale.resampled(self.samples.as_ref(), self.round),
            None => {
                let body = entry.body(held.bytes.get(held.bodies..)?)?;
                Decoded::new(entry, body).resampled(self.samples.as_ref(), self.round)
            }
        };
        let fleet = Rc::clone(&decoded.fleet);
        self.decoded.insert(entry.slot, decoded);
        Some(fleet)
    }

    /// Names of all models, sorted.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.topology
            .iter()
            .flat_map(|held| held.names.keys().map(String::as_str))
    }

    /// Slots of all models, in the order they were pushed.
    pub fn slots(&self) -> impl Iterator<Item = u16> {
        let models = self.topology.iter().flat_map(|held| &held.index.models);
        models.map(|model| model.slot)
    }

    /// Name of the model that owns a ledger slot or, having left, owned it last.
    pub fn name_of_slot(&self, slot: u16) -> Option<&str> {
        let index = &self.topology.as_ref()?.index;
        let live = index
            .models
            .iter()
            .map(|model| (model.name.as_str(), model.slot));
        let left = index
            .retired
            .iter()
            .map(|(name, slot)| (name.as_str(), *slot));
        live.chain(left)
            .find(|(_, owned)| *owned == slot)
            .map(|(name, _)| name)
    }

    /// Live gateway replicas, at least 1.
    pub fn replicas(&self) -> u32 {
        self.topology
            .as_ref()
            .map_or(1, |held| held.index.replicas.max(1))
    }

    /// The models of the topology held, for the status page. Their pods are looked through once
    /// per topology, and not kept.
    pub fn summary(&mut self) -> &[ModelStatus] {
        let held = self.topology.as_ref();
        self.summary.get_or_insert_with(|| {
            let models = held.map(HeldTopology::summary);
            models.unwrap_or_default()
        })
    }

    /// The topology held, for the status page.
    pub fn topology_status(&self, now_ms: u64) -> Option<SnapshotStatus> {
        let index = &self.topology.as_ref()?.index;
        let pods = index.models.iter().map(|model| u64::from(model.pods)).sum();
        Some(index.origin.status(pods, now_ms))
    }

    /// The samples held, for the status page.
    pub fn samples_status(&self, now_ms: u64) -> Option<SnapshotStatus> {
        let index = &self.samples.as_ref()?.index;
        Some(index.origin.status(u64::from(index.pods), now_ms))
    }

    fn refresh_topology<S: SharedStore + ?Sized>(&mut self, store: &S) -> bool {
        let Some(stored) = store.get(KEY_TOPOLOGY) else {
            return false;
        };
        // What cannot be read, as after a downgrade, leaves what is held in force.
        let Some(parts) = TopologyParts::parse(&stored.bytes) else {
            return false;
        };
        let bodies = stored.bytes.len().saturating_sub(parts.bodies.len());
        let index = parts.index;
        if self
            .topology
            .as_ref()
            .is_some_and(|held| held.index == index)
        {
            return false;
        }
        let names = index
            .models
            .iter()
            .enumerate()
            .map(|(at, model)| (model.name.clone(), at))
            .collect();
        self.topology = Some(HeldTopology {
            index,
            bytes: stored.bytes,
            bodies,
            names,
        });
        self.decoded.clear();
        self.summary = None;
        true
    }

    fn refresh_samples<S: SharedStore + ?Sized>(&mut self, store: &S) -> bool {
        let Some(stored) = store.get(KEY_SAMPLES) else {
            return false;
        };
        let Some((index, bodies)) = SamplesIndex::parse(&stored.bytes) else {
            return false;
        };
        let bodies = stored.bytes.len().saturating_sub(bodies.len());
        if self
            .samples
            .as_ref()
            .is_some_and(|held| held.index == index)
        {
            return false;
        }
        self.samples = Some(HeldSamples {
            index,
            bytes: stored.bytes,
            bodies,
        });
        self.round = self.round.wrapping_add(1);
        true
    }
}

// === impl HeldTopology ===

impl HeldTopology {
    fn summary(&self) -> Vec<ModelStatus> {
        let bodies = self.bytes.get(self.bodies..).unwrap_or_default();
        let models = self.names.values().filter_map(|at| {
            let entry = self.index.models.get(*at)?;
            let body = entry.body(bodies).unwrap_or_default();
            let usable = body.pods.iter().filter(|pod| pod.usable).count();
            let serving = body.rolesets.iter().filter(|set| set.serves()).count();
            Some(ModelStatus {
                name: entry.name.clone(),
                pods: u64::from(entry.pods),
                usable: u64::try_from(usable).unwrap_or(u64::MAX),
                rolesets: u64::try_from(serving).unwrap_or(u64::MAX),
            })
        });
        models.collect()
    }
}

// === impl Decoded ===

impl Decoded {
    /// A model without samples.
    fn new(entry: &IndexedModel, body: ModelBody) -> Self {
        // Written by a filter that had read it; one of another release may know more. Better the
        // defaults than no model.
        let configs: Vec<ModelConfig> = body
            .configs
            .iter()
            .map(|json| serde_json::from_str(json).unwrap_or_default())
            .collect();
        let pods: Rc<[FleetPod]> = body.pods.into();
        let positions = (0_u16..)
            .zip(&*pods)
            .map(|(at, pod)| (pod.key, at))
            .collect();
        let fleet = ModelFleet {
            name: entry.name.as_str().into(),
            slot: entry.slot,
            rolesets: body.rolesets.into(),
            configs: configs.into(),
            config: body.config,
            samples: vec![None; pods.len()].into(),
            pods,
        };
        Self {
            fleet: Rc::new(fleet),
            positions,
            round: 0,
        }
    }

    fn resampled(mut self, held: Option<&HeldSamples>, round: u64) -> Self {
        let mut samples = vec![None; self.fleet.pods.len()];
        held.and_then(|held| held.read(self.fleet.slot, &self.positions, &mut samples));
        self.fleet = Rc::new(ModelFleet {
            samples: samples.into(),
            ..(*self.fleet).clone()
        });
        self.round = round;
        self
    }
}

// === impl HeldSamples ===

impl HeldSamples {
    /// Fills in the samples of one model, each at its pod's position; stops where the stored form
    /// is damaged.
    fn read(
        &self,
        slot: u16,
        positions: &Positions,
        into: &mut [Option<(PodSample, u64)>],
    ) -> Option<()> {
        let (_, offset, len) = self
            .index
            .models
            .iter()
            .find(|(owner, ..)| *owner == slot)?;
        let mut rest = self
            .bytes
            .get(self.bodies..)?
            .get(usize::try_from(*offset).ok()?..)?
            .get(..usize::try_from(*len).ok()?)?;
        while !rest.is_empty() {
            let key = PodKey(u64_at(rest, 0));
            let (mut sample, after) = PodSample::decode_from(rest.get(8..)?).ok()?;
            rest = after;
            let Some(position) = positions.get(&key) else {
                continue;
            };
            sample.ordinal = u32::from(*position);
            let taken_at_ms = self
                .index
                .origin
                .stored_at_ms
                .saturating_sub(u64::from(sample.age_ms));
            *into.get_mut(usize::from(*position))? = Some((sample, taken_at_ms));
        }
        Some(())
    }
}

// === impl Origin ===

impl super::snapshot::Origin {
    fn status(&self, pods: u64, now_ms: u64) -> SnapshotStatus {
        SnapshotStatus {
            agent: self.agent.clone(),
            epoch: self.epoch,
            sequence: self.sequence,
            age_ms: now_ms.saturating_sub(self.stored_at_ms),
            pods,
        }
    }
}

#[cfg(test)]
mod tests;
