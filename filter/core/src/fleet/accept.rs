//! Accepting a push: check, compile, and store when it is newer than what is held.
//!
//! Whatever is refused leaves the snapshot held as it is. Stamps are compared inside the
//! compare-and-swap, so two pushes accepted by two VMs at once end with the newer one stored.

use super::build;
use super::snapshot::{
    Head, KEY_HEAD, KEY_SAMPLES, KEY_TOPOLOGY, Origin, SamplesIndex, TopologyIndex, TopologyParts,
};
use crate::ledger::record;
use crate::port::{SharedStore, StoreError};
use pd_wire::control::PushReply;
use pd_wire::samples::{Samples, SamplesError};
use pd_wire::topology::{Stamp, Topology, TopologyError};

/// Most tries of one compare-and-swap.
const MAX_TRIES: u32 = 8;

/// Why a push was refused, as a status of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushStatus {
    /// The message is wrong.
    BadRequest,
    /// Not newer than what is held, or of another topology than the one held.
    Conflict,
    /// Over a limit.
    TooLarge,
    /// Of a wire version this filter does not read.
    UnknownVersion,
    /// The store refused the write or too many races were lost; the same push may work later.
    Unavailable,
}

/// A refused push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Status of the answer.
    pub status: PushStatus,
    /// Body of the answer: what is wrong, what to do, and what is held.
    pub reply: PushReply,
}

/// Epoch and sequence held of each kind, and the sender.
#[derive(Clone, Debug, Default)]
struct Held {
    topology: Option<Origin>,
    samples: Option<Origin>,
}

/// Which of the two messages a reply is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Topology,
    Samples,
}

// === impl PushStatus ===

impl PushStatus {
    /// HTTP status code.
    pub fn code(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Conflict => 409,
            Self::TooLarge => 413,
            Self::UnknownVersion => 426,
            Self::Unavailable => 503,
        }
    }
}

/// Takes a pushed topology (JSON) over into the store.
///
/// # Errors
/// [`Refusal`] with the status to answer; what is held stays whole.
pub fn accept_topology<S: SharedStore + ?Sized>(
    store: &S,
    bytes: &[u8],
    now_ms: u64,
) -> Result<PushReply, Refusal> {
    let refuse = |status, error: String| Held::read(store).refuse(Kind::Topology, status, error);
    let topology = Topology::parse(bytes).map_err(|error| {
        let status = match error {
            TopologyError::TooLarge { .. } => PushStatus::TooLarge,
            TopologyError::Version { .. } => PushStatus::UnknownVersion,
            TopologyError::Malformed(_) | TopologyError::Mistakes(_) => PushStatus::BadRequest,
        };
        refuse(status, error.to_string())
    })?;
    let (stamp, replicas) = (topology.stamp.clone(), topology.replicas);
    let Some(compiled) = build::compile(topology) else {
        return Err(refuse(
            PushStatus::BadRequest,
            "a model cannot be encoded".to_owned(),
        ));
    };
    for _ in 0..MAX_TRIES {
        let stored = store.get(KEY_TOPOLOGY);
        let held = stored
            .as_ref()
            .and_then(|stored| TopologyParts::parse(&stored.bytes))
            .map(|parts| parts.index);
        if let Some(held) = held
            .as_ref()
            .filter(|held| !stamp.replaces(&held.origin.stamp()))
        {
            return Err(refuse(
                PushStatus::Conflict,
                not_newer(&stamp, &held.origin),
            ));
        }
        let mut index = TopologyIndex {
            origin: Origin::of(&stamp, now_ms),
            replicas,
            models: compiled.models.clone(),
            retired: Vec::new(),
        };
        let empty = |slot| record::is_idle(store, slot);
        index.retired = build::assign_slots(&mut index.models, &held.unwrap_or_default(), empty);
        let encoded = TopologyParts::encode(&index, &compiled.keys, &compiled.bodies);
        let Some(encoded) = encoded else {
            return Err(refuse(
                PushStatus::TooLarge,
                "the compiled form is too large".to_owned(),
            ));
        };
        match store.replace(KEY_TOPOLOGY, stored.as_ref(), &encoded) {
            Ok(()) => {
                let topology = (stamp.epoch, stamp.sequence);
                announce(
                    store,
                    Head {
                        topology,
                        ..Head::default()
                    },
                );
                let held = Held {
                    topology: Some(index.origin),
                    samples: None,
                };
                return Ok(held.reply(Kind::Topology, String::new()));
            }
            Err(StoreError::Raced) => {}
            Err(StoreError::Refused) => break,
        }
    }
    Err(refuse(PushStatus::Unavailable, UNAVAILABLE.to_owned()))
}

/// Takes pushed samples (binary) over into the store.
///
/// # Errors
/// [`Refusal`] with the status to answer; what is held stays whole.
pub fn accept_samples<S: SharedStore + ?Sized>(
    store: &S,
    bytes: &[u8],
    now_ms: u64,
) -> Result<PushReply, Refusal> {
    let refuse = |status, error: String| Held::read(store).refuse(Kind::Samples, status, error);
    let samples = Samples::decode(bytes).map_err(|error| {
        let status = match error {
            SamplesError::TooLarge { .. } => PushStatus::TooLarge,
            SamplesError::Version { .. } => PushStatus::UnknownVersion,
            SamplesError::Magic
            | SamplesError::Truncated(_)
            | SamplesError::Trailing(_)
            | SamplesError::Invalid { .. } => PushStatus::BadRequest,
        };
        refuse(status, error.to_string())
    })?;
    let stamp = &samples.stamp;
    for _ in 0..MAX_TRIES {
        let topology = store.get(KEY_TOPOLOGY);
        let parts = topology
            .as_ref()
            .and_then(|stored| TopologyParts::parse(&stored.bytes));
        let Some(parts) = parts.filter(|parts| {
            let origin = &parts.index.origin;
            origin.epoch == stamp.epoch
                && origin.agent == stamp.agent
                && origin.sequence == samples.topology_sequence
        }) else {
            let error = format!(
                "these samples index topology {} of epoch {}, which is not held: push the \
                 topology first",
                samples.topology_sequence, stamp.epoch
            );
            return Err(refuse(PushStatus::Conflict, error));
        };
        let stored = store.get(KEY_SAMPLES);
        let held = stored
            .as_ref()
            .and_then(|stored| SamplesIndex::parse(&stored.bytes));
        if let Some((held, _)) = held.filter(|(held, _)| !stamp.replaces(&held.origin.stamp())) {
            return Err(refuse(PushStatus::Conflict, not_newer(stamp, &held.origin)));
        }
        let Some(encoded) = compile_samples(&samples, &parts, now_ms) else {
            let error = "a pod's ordinal is not in the topology it names".to_owned();
            return Err(refuse(PushStatus::BadRequest, error));
        };
        match store.replace(KEY_SAMPLES, stored.as_ref(), &encoded) {
            Ok(()) => {
                let topology = parts.index.origin;
                announce(
                    store,
                    Head {
                        topology: (topology.epoch, topology.sequence),
                        samples: (stamp.epoch, stamp.sequence),
                    },
                );
                let samples = Some(Origin::of(stamp, now_ms));
                let held = Held {
                    topology: Some(topology),
                    samples,
                };
                return Ok(held.reply(Kind::Samples, String::new()));
            }
            Err(StoreError::Raced) => {}
            Err(StoreError::Refused) => break,
        }
    }
    Err(refuse(PushStatus::Unavailable, UNAVAILABLE.to_owned()))
}

const UNAVAILABLE: &str = "the shared store did not take the message: push it again";

/// The stored form of samples; `None` when an ordinal is not in the topology.
fn compile_samples(
    samples: &Samples,
    topology: &TopologyParts<'_>,
    now_ms: u64,
) -> Option<Vec<u8>> {
    let mut index = SamplesIndex {
        origin: Origin::of(&samples.stamp, now_ms),
        topology_sequence: samples.topology_sequence,
        pods: u32::try_from(samples.pods.len()).ok()?,
        models: Vec::new(),
    };
    let mut bodies = Vec::new();
    let mut keys = (0_u32..).zip(topology.keys());
    let mut pods = samples.pods.iter().peekable();
    let mut end = 0_u32;
    for model in &topology.index.models {
        end = end.checked_add(model.pods)?;
        let start = bodies.len();
        // Both run through the ordinals upwards.
        while let Some(pod) = pods.next_if(|pod| pod.ordinal < end) {
            let (_, key) = keys.find(|(ordinal, _)| *ordinal == pod.ordinal)?;
            bodies.extend_from_slice(&key.0.to_le_bytes());
            pod.encode_into(&mut bodies);
        }
        let len = u32::try_from(bodies.len().checked_sub(start)?).ok()?;
        if len > 0 {
            index
                .models
                .push((model.slot, u32::try_from(start).ok()?, len));
        }
    }
    if pods.peek().is_some() {
        None
    } else {
        index.encode(&bodies)
    }
}

fn not_newer(stamp: &Stamp, held: &Origin) -> String {
    format!(
        "epoch {} sequence {} of agent {} does not replace epoch {} sequence {} of agent {}: \
         continue with a higher epoch",
        stamp.epoch, stamp.sequence, stamp.agent, held.epoch, held.sequence, held.agent
    )
}

/// Raises the head to what was stored, so that other VMs look. A head that cannot be written now
/// is raised by the next push.
fn announce<S: SharedStore + ?Sized>(store: &S, now: Head) {
    for _ in 0..MAX_TRIES {
        let stored = store.get(KEY_HEAD);
        let before = stored
            .as_ref()
            .map_or_else(Head::default, |it| Head::parse(&it.bytes));
        let head = before.newest(now);
        if stored.is_some() && head == before {
            return;
        }
        if store.replace(KEY_HEAD, stored.as_ref(), &head.encode()) != Err(StoreError::Raced) {
            return;
        }
    }
}

// === impl Held ===

impl Held {
    fn read<S: SharedStore + ?Sized>(store: &S) -> Self {
        let topology = store.get(KEY_TOPOLOGY);
        let samples = store.get(KEY_SAMPLES);
        Self {
            topology: topology
                .and_then(|stored| TopologyParts::parse(&stored.bytes).map(|it| it.index.origin)),
            samples: samples
                .and_then(|stored| SamplesIndex::parse(&stored.bytes).map(|(it, _)| it.origin)),
        }
    }

    fn refuse(&self, kind: Kind, status: PushStatus, error: String) -> Refusal {
        Refusal {
            status,
            reply: self.reply(kind, error),
        }
    }

    fn reply(&self, kind: Kind, error: String) -> PushReply {
        let origin = match kind {
            Kind::Topology => &self.topology,
            Kind::Samples => &self.samples,
        };
        let topology = self.topology.as_ref();
        // The agent continues above this epoch, so it has to be the highest of both: samples can
        // be of a later one when the topology could not be read and was pushed anew.
        let epochs = topology
            .into_iter()
            .chain(origin)
            .map(|origin| origin.epoch);
        PushReply {
            error,
            epoch: epochs.max().unwrap_or_default(),
            sequence: origin.as_ref().map_or(0, |origin| origin.sequence),
            topology_sequence: topology.map_or(0, |topology| topology.sequence),
            agent: topology
                .map(|topology| topology.agent.clone())
                .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
