//! Stored forms of what was pushed, under keys and layouts that old and new filters share.
//!
//! `pd.topology` is: version `u8`, length of the index `u32`, number of pods `u32`, the index
//! (postcard), then the pod keys (`u64` each, in the order of the pushed lists, so that samples can
//! be attributed without decoding a model), then one postcard body per model. `pd.samples` is:
//! version `u8`, length of the index `u32`, the index (postcard), then per pod its key and the
//! pushed form of its sample, grouped by model. `pd.head` is: version `u8`, then epoch and sequence
//! of the topology and of the samples, `u64` each.
//!
//! Samples are stored by pod key and not by position, so a new topology does not lose them.

use super::{FleetPod, Roleset};
use crate::ledger::PodKey;
use crate::ledger::record::{u32_at, u64_at};
use crate::{FORMAT, OTHER_FORMAT};
use pd_wire::topology::{Stamp, WIRE_VERSION};
use serde::{Deserialize, Serialize};

/// Key of the compiled topology.
pub const KEY_TOPOLOGY: &str = "pd.topology";
/// Key of the samples.
pub const KEY_SAMPLES: &str = "pd.samples";
/// Key of the hint by which VMs find that something changed.
pub const KEY_HEAD: &str = "pd.head";

/// Who sent a stored message, and when it was stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Sender.
    pub agent: String,
    /// Epoch.
    pub epoch: u64,
    /// Sequence.
    pub sequence: u64,
    /// When it was stored, in ms of the shared monotonic clock.
    pub stored_at_ms: u64,
}

/// What is known of a topology without decoding a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyIndex {
    /// Sender and time.
    pub origin: Origin,
    /// Live gateway replicas.
    pub replicas: u32,
    /// Models in the order they were pushed.
    pub models: Vec<IndexedModel>,
    /// Models that left, last first, and the ledger slots their charges are in.
    pub retired: Vec<(String, u16)>,
}

/// Where a model is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexedModel {
    /// Name.
    pub name: String,
    /// Number of its ledger record.
    pub slot: u16,
    /// Number of its pods.
    pub pods: u32,
    /// Where its body starts, after the pod keys.
    pub offset: u32,
    /// Length of its body.
    pub len: u32,
}

/// Body of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelBody {
    /// Pods, sorted by namespace and name.
    pub pods: Vec<FleetPod>,
    /// Complete rolesets, with their usable pods.
    pub rolesets: Vec<Roleset>,
    /// Config annotations, JSON each.
    pub configs: Vec<String>,
    /// The request-level config.
    pub config: Option<u32>,
}

/// What is known of samples without decoding them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplesIndex {
    /// Sender and time.
    pub origin: Origin,
    /// Topology whose ordinals the pushed message used.
    pub topology_sequence: u64,
    /// Pods with a sample.
    pub pods: u32,
    /// Ledger slot of a model, where its samples start, and how many bytes they take.
    pub models: Vec<(u16, u32, u32)>,
}

/// Epoch and sequence of what is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Of the topology.
    pub topology: (u64, u64),
    /// Of the samples.
    pub samples: (u64, u64),
}

/// Index of a stored topology, its pod keys and its bodies.
#[derive(Debug)]
pub struct TopologyParts<'a> {
    /// The index.
    pub index: TopologyIndex,
    keys: &'a [u8],
    /// Bodies of the models, see [`IndexedModel::body`].
    pub bodies: &'a [u8],
}

// === impl Origin ===

impl Origin {
    /// Origin of a message that is stored now.
    pub fn of(stamp: &Stamp, stored_at_ms: u64) -> Self {
        let Stamp {
            version: _,
            agent,
            epoch,
            sequence,
        } = stamp.clone();
        Self {
            agent,
            epoch,
            sequence,
            stored_at_ms,
        }
    }

    /// The stamp the message was pushed with.
    pub fn stamp(&self) -> Stamp {
        Stamp {
            version: WIRE_VERSION,
            agent: self.agent.clone(),
            epoch: self.epoch,
            sequence: self.sequence,
        }
    }
}

// === impl TopologyParts ===

impl<'a> TopologyParts<'a> {
    /// Reads the stored form; `None` when it is of an unknown version or damaged.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let rest = known_version(bytes)?;
        let (lengths, rest) = rest.split_at_checked(8)?;
        let (index, rest) = rest.split_at_checked(usize::try_from(u32_at(lengths, 0)).ok()?)?;
        let keys = usize::try_from(u32_at(lengths, 4)).ok()?.checked_mul(8)?;
        let (keys, bodies) = rest.split_at_checked(keys)?;
        Some(Self {
            index: postcard::from_bytes(index).ok()?,
            keys,
            bodies,
        })
    }

    /// Writes the stored form; `None` when a part has 4 GiB or more.
    pub fn encode(index: &TopologyIndex, keys: &[PodKey], bodies: &[u8]) -> Option<Vec<u8>> {
        let index = postcard::to_allocvec(index).ok()?;
        let mut out = Vec::with_capacity(index.len() + keys.len() * 8 + bodies.len() + 9);
        out.push(FORMAT);
        for len in [index.len(), keys.len()] {
            out.extend_from_slice(&u32::try_from(len).ok()?.to_le_bytes());
        }
        out.extend_from_slice(&index);
        keys.iter()
            .for_each(|key| out.extend_from_slice(&key.0.to_le_bytes()));
        out.extend_from_slice(bodies);
        Some(out)
    }

    /// Keys of all pods, in the order of the pushed lists.
    pub fn keys(&self) -> impl Iterator<Item = PodKey> + use<'a> {
        self.keys.chunks_exact(8).map(|raw| PodKey(u64_at(raw, 0)))
    }
}

// === impl IndexedModel ===

impl IndexedModel {
    /// Reads the model's body out of all bodies; `None` when it is damaged.
    pub fn body(&self, bodies: &[u8]) -> Option<ModelBody> {
        let offset = usize::try_from(self.offset).ok()?;
        let len = usize::try_from(self.len).ok()?;
        postcard::from_bytes(bodies.get(offset..)?.get(..len)?).ok()
    }
}

// === impl SamplesIndex ===

impl SamplesIndex {
    /// Reads the index and returns the samples behind it; `None` when the version is unknown or
    /// the form damaged.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let rest = known_version(bytes)?;
        let (len, rest) = rest.split_at_checked(4)?;
        let (index, bodies) = rest.split_at_checked(usize::try_from(u32_at(len, 0)).ok()?)?;
        Some((postcard::from_bytes(index).ok()?, bodies))
    }

    /// Writes the stored form; `None` when the index has 4 GiB or more.
    pub fn encode(&self, bodies: &[u8]) -> Option<Vec<u8>> {
        let index = postcard::to_allocvec(self).ok()?;
        let mut out = Vec::with_capacity(index.len() + bodies.len() + 5);
        out.push(FORMAT);
        out.extend_from_slice(&u32::try_from(index.len()).ok()?.to_le_bytes());
        out.extend_from_slice(&index);
        out.extend_from_slice(bodies);
        Some(out)
    }
}

// === impl Head ===

impl Head {
    /// Reads the stored form; nothing stored when it is of an unknown version or damaged.
    pub fn parse(bytes: &[u8]) -> Self {
        let Some(words) = known_version(bytes).filter(|words| words.len() == 32) else {
            return Self::default();
        };
        Self {
            topology: (u64_at(words, 0), u64_at(words, 8)),
            samples: (u64_at(words, 16), u64_at(words, 24)),
        }
    }

    /// The stored form.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![FORMAT];
        for word in [
            self.topology.0,
            self.topology.1,
            self.samples.0,
            self.samples.1,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// The newer of both, for each kind of message.
    pub fn newest(self, other: Self) -> Self {
        Self {
            topology: self.topology.max(other.topology),
            samples: self.samples.max(other.samples),
        }
    }
}

fn known_version(bytes: &[u8]) -> Option<&[u8]> {
    let (version, rest) = bytes.split_first()?;
    (*version == FORMAT || *version == OTHER_FORMAT).then_some(rest)
}
