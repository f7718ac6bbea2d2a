//! Why no pod can serve a request, in words for the client.

/// Why no pod can serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The model has no usable pod that fits the request.
    #[error("no pod of this model is ready; start one or retry later")]
    NoPods,
    /// Decode pods are there, prefill pods are not.
    #[error("prefill pods are not ready: 0 prefill, {decode} decode pods usable; retry later")]
    NoPrefill {
        /// Usable decode pods.
        decode: u32,
    },
    /// Prefill pods are there, decode pods are not.
    #[error("decode pods are not ready: {prefill} prefill, 0 decode pods usable; retry later")]
    NoDecode {
        /// Usable prefill pods.
        prefill: u32,
    },
    /// No roleset has both.
    #[error(
        "no roleset has both a usable prefill and a usable decode pod ({prefill} prefill, \
         {decode} decode pods usable); check the roleset-name labels or retry later"
    )]
    NoPair {
        /// Usable prefill pods.
        prefill: u32,
        /// Usable decode pods.
        decode: u32,
    },
    /// All rolesets were tried already.
    #[error("every roleset that could serve the request was tried; retry later")]
    Exhausted,
    /// All pods that could serve the request are at their configured capacity.
    #[error("all pods of this model are at capacity; retry later")]
    AtCapacity,
    /// No pod takes prompts of this length.
    #[error("no pod of this model takes a prompt of about {prompt_tokens} tokens; shorten it")]
    OutsideBuckets {
        /// Length of the prompt.
        prompt_tokens: u64,
    },
    /// Every candidate's score was not a finite number.
    #[error("no pod could be scored ({ineligible} ineligible); check the gateway's settings")]
    NoScore {
        /// Pods left out.
        ineligible: u32,
    },
}

impl Refusal {
    /// True when waiting helps: the client is told when to come back (429).
    #[must_use]
    pub fn at_capacity(self) -> bool {
        self == Self::AtCapacity
    }
}
