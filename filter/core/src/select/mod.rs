//! Chooses the pods of one request: gate (step 0), fast paths (1, 2), band (2b), scores
//! (3, 4), pair (5).
//!
//! Pure: the same query gives the same answer, whatever the order of the pods. Pods never leave
//! their roleset: prefill and decode pod of a pair always come from the same one. Exact ties are
//! decided by a random word, or by pod id. Choosing changes nothing; the caller charges.

mod combined;
mod explain;
mod fast_path;
mod gate;
mod one_leg;
mod pair;
mod problem;
mod refusal;
mod selector;
mod settings;
mod solve;
mod tie;

pub use explain::{DecodeImbalance, Explanation, LISTED, Reason, Scored};
pub use refusal::Refusal;
pub use selector::{Selector, SelectorError};
pub use settings::Settings;

use crate::fleet::ModelFleet;
use crate::ledger::Amounts;

/// Everything a choice depends on. Pods are named by their position in [`ModelFleet::pods`],
/// rolesets by their position in [`ModelFleet::rolesets`].
#[derive(Clone, Copy)]
pub struct Query<'a> {
    /// The model's pods.
    pub fleet: &'a ModelFleet,
    /// Charges of all VMs, by pod; a missing entry is zero.
    pub loads: &'a [Amounts],
    /// Settings in force for the request.
    pub settings: &'a Settings,
    /// Profile of the request; pods that lack it use their default profile.
    pub profile: Option<&'a str>,
    /// Shared monotonic clock, in ms.
    pub now_ms: u64,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Length of the message text, in bytes; the prompt length of `conductor`.
    pub text_bytes: u64,
    /// Part of the prompt in each pod's prefix cache, in percent, by pod; a missing entry is 0.
    pub match_percent: &'a [u8],
    /// False for pods this request may not use: filtered out by the client, or ejected.
    pub allowed: &'a dyn Fn(u16) -> bool,
    /// Rolesets already tried for this request.
    pub excluded_rolesets: &'a [u16],
    /// Pairs (prefill, decode) that are ejected together.
    pub blocked_pairs: &'a [(u16, u16)],
    /// Roleset that adaptive buckets prefer for the prompt's length: it alone is scored when it
    /// has candidates left and leads to a pair.
    pub banded_roleset: Option<u16>,
    /// Random word that decides exact ties.
    pub tie: u64,
    /// What the request needs.
    pub shape: Shape,
    /// Most scored pods of one kind that the explanation lists.
    pub listed: usize,
}

/// What a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Strategy `pd`, and the KV cache can be handed over.
    Pair,
    /// Strategy `pd`, but the KV cache cannot be handed over (several prompts or answers): a
    /// combined pod, else a decode pod.
    OneLeg,
    /// Another strategy, or a path without phases: a standard pod, else a decode pod.
    Plain(Strategy),
}

/// How a pod is chosen when phases do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Any pod.
    Random,
    /// The pod with the fewest requests.
    LeastRequest,
    /// The pod with the longest known prefix, unless it has far more requests than the others.
    PrefixCache,
    /// The pod of the session, else by the session's key, else the one with the fewest requests.
    Affinity {
        /// Pod that answered the session before.
        pod: Option<u16>,
        /// Hash of the session key: the same key prefers the same pod.
        key: Option<u64>,
    },
}

/// The pods that serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Prefill on one pod, decode on another one of the same roleset.
    Pair(Pair),
    /// Both phases on a combined pod.
    Combined(u16),
    /// Both phases on a standard or decode pod.
    OneLeg(u16),
}

/// A prefill pod and a decode pod of the same roleset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Prefill pod.
    pub prefill: u16,
    /// Decode pod.
    pub decode: u16,
    /// Their roleset.
    pub roleset: u16,
}

/// A choice and why it was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The pods.
    pub target: Target,
    /// Facts behind the choice.
    pub explanation: Explanation,
}

/// Chooses the pods of one request.
///
/// # Errors
/// [`Refusal`] says why no pod can serve it.
pub fn select(query: &Query<'_>) -> Result<Decision, Refusal> {
    match query.shape {
        Shape::Pair => pair::choose(query),
        Shape::OneLeg => one_leg::without_hand_over(query),
        Shape::Plain(strategy) => one_leg::plain(query, strategy),
    }
}
