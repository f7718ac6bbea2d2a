//! Why a choice was made: kept with every decision, rendered only when somebody asks.

use crate::fleet::ModelFleet;
use std::fmt::Write as _;

/// Pods of one kind that an explanation lists unless somebody asks for all.
pub const LISTED: usize = 16;
/// Length at which a rendered explanation stops naming pods, in bytes: it becomes a header.
const RENDERED: usize = 4096;

/// Facts behind a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// What decided.
    pub reason: Reason,
    /// Scored prefill pods, the first [`Query::listed`](super::Query::listed).
    pub prefill: Vec<Scored>,
    /// Scored decode or one-leg pods, as many.
    pub decode: Vec<Scored>,
    /// Prefix match of the pod that computes the prompt as it was scored, in percent; `None` when
    /// nothing in the choice reads the prefix index.
    pub match_percent: Option<u8>,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Step 1 fired.
    pub prefill_imbalance: bool,
    /// Check of step 2 that fired.
    pub decode_imbalance: Option<DecodeImbalance>,
    /// Step 2b left the other rolesets out.
    pub banded: bool,
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

// === impl Explanation ===

impl Explanation {
    /// The facts on one line of printable ASCII, for a header or a log:
    /// `reason=score; prompt_tokens=812; match=66; prefill=ns/p-0:3.4,ns/p-1:10; decode=…`.
    /// Lower scores are better; absent facts are left out.
    #[must_use]
    pub fn render(&self, fleet: &ModelFleet) -> String {
        let mut out = format!(
            "reason={}; prompt_tokens={}",
            self.reason.name(),
            self.prompt_tokens
        );
        if let Some(percent) = self.match_percent {
            push(&mut out, format_args!("; match={percent}"));
        }
        if self.prefill_imbalance {
            out.push_str("; prefill_imbalance=requests");
        }
        if let Some(check) = self.decode_imbalance {
            push(
                &mut out,
                format_args!("; decode_imbalance={}", check.name()),
            );
        }
        if self.banded {
            out.push_str("; band=length");
        }
        for (label, pods) in [("skipped", self.skipped), ("ineligible", self.ineligible)] {
            if pods > 0 {
                push(&mut out, format_args!("; {label}={pods}"));
            }
        }
        for (label, scored) in [("prefill", &self.prefill), ("decode", &self.decode)] {
            let mut separator = "; ";
            for Scored { pod, score } in scored {
                let Some(pod) = fleet.pod(*pod) else { continue };
                if out.len() + pod.namespace.len() + pod.name.len() > RENDERED {
                    break;
                }
                out.push_str(separator);
                if separator == "; " {
                    push(&mut out, format_args!("{label}="));
                }
                // Four digits tell apart what differs in practice.
                let score = libm::round(score * 1e4) / 1e4;
                push(
                    &mut out,
                    format_args!("{}/{}:{score}", pod.namespace, pod.name),
                );
                separator = ",";
            }
        }
        out
    }
}

fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

// === impl Reason ===

impl Reason {
    /// Name in explanations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Score => "score",
            Self::Length => "prompt_length",
            Self::UnderLoad => "overflow",
            Self::Capacity => "capacity",
            Self::NoPair => "no_pair",
            Self::Fallback => "prefill_fallback",
            Self::OneLeg => "no_hand_over",
            Self::LocalPrefill => "local_prefill",
            Self::Strategy => "strategy",
            Self::Affinity => "session",
        }
    }
}

// === impl DecodeImbalance ===

impl DecodeImbalance {
    /// Name in explanations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Throughput => "throughput",
            Self::Drain => "drain",
        }
    }
}
