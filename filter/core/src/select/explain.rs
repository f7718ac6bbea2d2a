//! Why a choice was made: kept with every decision, rendered only when somebody asks.

/// Most pods of one kind that an explanation lists.
pub(super) const LISTED: usize = 16;

/// Facts behind a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// What decided.
    pub reason: Reason,
    /// Scored prefill pods, at most 16.
    pub prefill: Vec<Scored>,
    /// Scored decode or one-leg pods, at most 16.
    pub decode: Vec<Scored>,
    /// Prefix match of the chosen prefill pod as it was scored, in percent; `None` when the
    /// prefill policy does not read the prefix index.
    pub match_percent: Option<u8>,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Step 1 fired.
    pub prefill_imbalance: bool,
    /// Check of step 2 that fired.
    pub decode_imbalance: Option<DecodeImbalance>,
    /// Prefill pods left out because they have far more requests than their peers.
    pub skipped: u32,
    /// Pods left out because their score was not a finite number.
    pub ineligible: u32,
}

/// One scored pod.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The pod, by position in the model's pods.
    pub pod: u16,
    /// Its score; lower is better.
    pub score: f64,
}

/// What decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// Steps 3 to 5, after a fast path if one fired.
    #[default]
    Score,
    /// Step 0: all rolesets are for other prompt lengths.
    Length,
    /// Step 0: a combined pod is idle while pairs are congested.
    UnderLoad,
    /// All pairs are full.
    Capacity,
    /// No roleset is complete.
    NoPair,
    /// No prefill pod can serve.
    Fallback,
    /// The KV cache cannot be handed over.
    OneLeg,
    /// So little of the prompt is missing that the decode pod computes it.
    LocalPrefill,
    /// Strategy without phases.
    Strategy,
    /// The session's pod.
    Affinity,
}

/// Check of step 2 that fired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeImbalance {
    /// Request counts.
    Requests,
    /// Throughputs.
    Throughput,
    /// Drain times.
    Drain,
}
