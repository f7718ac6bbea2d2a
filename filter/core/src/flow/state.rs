//! The states of a request; each holds only what it needs.

use super::abort::Aborting;
use super::doubt::Doubt;
use super::sse::Opening;
use super::timers::Watch;
use super::{Attempt, Call};
use crate::engine::{Engine, KvReference, Legs};
use crate::fleet::{FleetPod, ModelFleet};
use crate::ledger::ChargeId;
use crate::prefix::Chain;
use crate::request::patch::Lead;
use pd_wire::knobs::{Knobs, Strategy};
use std::rc::Rc;
use std::sync::Arc;

/// Where a request stands.
#[derive(Debug)]
pub(super) enum State {
    /// The body is arriving.
    Receiving {
        /// When to look whether the body is hidden from the filter.
        probe_at: Option<u64>,
    },
    /// The body is complete, no snapshot has arrived yet.
    Awaiting {
        /// When the body was complete.
        since: u64,
        /// When to look for the snapshot again.
        look_at: u64,
    },
    /// A prefill leg failed; the body is read again for another pair.
    Rereading(Attempt),
    /// The legs of a pair are ready but for what is being asked of the prefill pod.
    Preparing(Preparing),
    /// The prefill leg is out.
    Prefilling(Prefilling),
    /// The client's own request is at the decode pod (or the only pod).
    Decoding(Decoding),
    /// The client left while the prefill leg is out.
    Orphaned(Orphan),
    /// The call that frees an orphan's KV is out.
    Freeing(Freeing),
    /// Pods are being told to drop the request.
    Aborting(Aborting),
    /// Nothing more will happen.
    Ended,
}

/// The pods chosen for a request and what is charged to them.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) fleet: Rc<ModelFleet>,
    /// Absent for one leg.
    pub(super) prefill: Option<u16>,
    pub(super) decode: u16,
    pub(super) charge: ChargeId,
    /// The client asked for a stream.
    pub(super) streams: bool,
    /// Name of the request at engines that can be told to drop it, once they were given it.
    pub(super) rid: Option<Rc<str>>,
    /// When they were chosen, in ms of the shared clock.
    pub(super) chosen_at_ms: u64,
    /// Settings in force for the request.
    pub(super) knobs: Arc<Knobs>,
    /// How they were chosen, told to the client.
    pub(super) strategy: Strategy,
    /// Profile chosen by the request's size, told to the client.
    pub(super) auto_profile: Option<String>,
    /// Value of the `x-pd-decision` response header, when asked for.
    pub(super) decision: Option<String>,
}

/// A prefill leg that is out.
#[derive(Debug)]
pub(super) struct Prefilling {
    pub(super) choice: Choice,
    pub(super) legs: Legs,
    /// The client's body up to and including its `{`.
    pub(super) lead: Lead,
    pub(super) call: PrefillCall,
    pub(super) attempt: Attempt,
}

/// The legs of a chosen pair, before any is sent.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) choice: Choice,
    pub(super) legs: Legs,
    pub(super) lead: Lead,
    /// The prefill leg.
    pub(super) call: Call,
    /// Prompt blocks.
    pub(super) chain: Option<Chain>,
    /// Bytes of the prompt's text, to learn how many make a token; 0 = nothing to learn.
    pub(super) learns_from: u64,
    /// How long the prefill leg may take, in ms.
    pub(super) timeout_ms: u64,
    pub(super) attempt: Attempt,
}

/// A look-up that legs wait for.
#[derive(Debug)]
pub(super) struct Preparing {
    pub(super) prepared: Prepared,
    /// The look-up is this request's own; else another one's result is awaited.
    pub(super) asks: bool,
    /// When an own look-up is too late, or to see what became of another's.
    pub(super) deadline: u64,
}

/// The call of a prefill leg.
#[derive(Debug)]
pub(super) struct PrefillCall {
    /// Prompt blocks, learnt when it succeeds.
    pub(super) chain: Option<Chain>,
    /// Bytes of the prompt's text, to learn how many make a token; 0 = nothing to learn.
    pub(super) learns_from: u64,
    /// The timeout in force, in ms, and when it ends.
    pub(super) timeout_ms: u64,
    pub(super) deadline: u64,
}

/// A prefill leg that nobody waits for.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) choice: Choice,
    pub(super) legs: Legs,
    pub(super) deadline: u64,
    /// Its end tells the ejections nothing: they know it, or the other leg is to blame.
    pub(super) judged: bool,
}

/// The client's own request at its pod.
#[derive(Debug)]
pub(super) struct Decoding {
    pub(super) choice: Choice,
    /// The protocol of its pair; `None` for one leg.
    pub(super) legs: Option<Legs>,
    /// The KV reference given to the decode pod, until it has taken the KV over.
    pub(super) kv: Option<KvReference>,
    /// Prompt blocks, learnt when the pod answers well.
    pub(super) chain: Option<Chain>,
    /// The call of a prefill leg that is out at the same time.
    pub(super) prefill: Option<PrefillCall>,
    /// The decode pod was to take KV over.
    pub(super) took_kv: bool,
    /// How long the pod may be silent.
    pub(super) watch: Watch,
    /// Status of the engine's answer.
    pub(super) status: Option<u16>,
    /// The stream is held until this knows what it is.
    pub(super) opening: Option<Opening>,
    /// Response headers are held until a body chunk comes.
    pub(super) held: bool,
    /// The leg has failed, and the client is not told yet.
    pub(super) doubt: Option<Doubt>,
}

/// A call that frees an orphan's KV.
#[derive(Debug)]
pub(super) struct Freeing {
    pub(super) charge: ChargeId,
    pub(super) deadline: u64,
}

// === impl State ===

impl State {
    pub(super) fn deadline(&self) -> Option<u64> {
        match self {
            Self::Receiving { probe_at } => *probe_at,
            Self::Awaiting { look_at, .. } => Some(*look_at),
            Self::Prefilling(leg) => Some(leg.call.deadline),
            Self::Orphaned(leg) => Some(leg.deadline),
            Self::Preparing(leg) => Some(leg.deadline),
            Self::Decoding(leg) => Some(leg.deadline()),
            Self::Freeing(leg) => Some(leg.deadline),
            Self::Aborting(leg) => Some(leg.deadline),
            Self::Rereading(_) | Self::Ended => None,
        }
    }
}

// === impl Decoding ===

impl Decoding {
    /// Some of the answer has reached the client.
    pub(super) fn started(&self) -> bool {
        self.status.is_some() && self.opening.is_none() && !self.held
    }

    fn deadline(&self) -> u64 {
        let decode = self.watch.deadline();
        let prefill = self.prefill.as_ref().map(|call| call.deadline);
        let doubt = self.doubt.map(|doubt| doubt.until);
        let others = [prefill, doubt].into_iter().flatten();
        others.fold(decode, u64::min)
    }
}

// === impl Prepared ===

impl Prepared {
    /// Splits off the prefill call, which leaves now.
    pub(super) fn prefill_call(&mut self, now_ms: u64) -> PrefillCall {
        PrefillCall {
            chain: self.chain.take(),
            learns_from: self.learns_from,
            timeout_ms: self.timeout_ms,
            deadline: now_ms.saturating_add(self.timeout_ms),
        }
    }
}

// === impl Choice ===

impl Choice {
    pub(super) fn decode_pod(&self) -> Option<&FleetPod> {
        self.fleet.pod(self.decode)
    }

    /// The engine of the pod that answers.
    pub(super) fn engine(&self) -> Engine {
        Engine::of_label(self.decode_pod().map_or("", |pod| pod.engine.as_str()))
    }

    pub(super) fn prefill_pod(&self) -> Option<&FleetPod> {
        self.fleet.pod(self.prefill?)
    }

    /// Another decode pod of the pair's roleset.
    pub(super) fn other_decode_pod(&self) -> Option<&FleetPod> {
        let set = self.fleet.rolesets.iter().find(|set| {
            set.decode.contains(&self.decode)
                && self.prefill.is_some_and(|pod| set.prefill.contains(&pod))
        })?;
        let other = set.decode.iter().find(|pod| **pod != self.decode)?;
        self.fleet.pod(*other)
    }
}
