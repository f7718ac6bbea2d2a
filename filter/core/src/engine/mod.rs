//! What each engine wants to see: the bodies of both legs, their order, and what is taken from
//! the prefill reply.

mod hand_over;
mod legs;
mod limits;
pub mod sglang;
pub mod trtllm;
pub mod usage;
pub mod vllm;

pub use hand_over::{HandOver, Unusable};
pub use legs::{Dispatch, KvReference, Legs, Number};

use crate::fleet::ModelFleet;
use crate::request::Endpoint;
use pd_wire::knobs::excerpt;

/// How the pods of a model can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Prefill first, KV handed over by `kv_transfer_params`.
    Vllm,
    /// Both legs at once, KV fetched by way of a room.
    Sglang,
    /// Context first or generation first.
    Trtllm,
    /// Pods of several engines, which cannot be paired with each other.
    Mixed,
    /// An engine whose protocol is not known: its pods are used in one leg.
    Unknown(String),
}

impl Engine {
    /// The engine of a label's value.
    #[must_use]
    pub fn of_label(label: &str) -> Self {
        match label {
            "vllm" => Self::Vllm,
            "sglang" => Self::Sglang,
            "trtllm" => Self::Trtllm,
            other => Self::Unknown(excerpt(other)),
        }
    }

    /// Its pods drop a request when `/abort_request` names it.
    #[must_use]
    pub fn aborts(&self) -> bool {
        *self == Self::Sglang
    }

    /// Its decode pod owes an answer once the prefill has succeeded, whatever its load: the prefill
    /// returns only when the decode pod has taken the KV over. So silence from then on is a fault,
    /// and the decode timers run without being asked for.
    #[must_use]
    pub fn answers_after_prefill(&self) -> bool {
        self.aborts()
    }

    /// The engine of a model's pairs as far as a request may use them. A label that is not known
    /// decides for all.
    #[must_use]
    pub fn of_pairs(fleet: &ModelFleet, allowed: impl Fn(u16) -> bool) -> Self {
        let members = fleet
            .rolesets
            .iter()
            .flat_map(|set| set.prefill.iter().chain(&set.decode));
        let mut labels = members
            .filter(|position| allowed(**position))
            .filter_map(|position| fleet.pod(*position))
            .map(|pod| pod.engine.as_str());
        let Some(first) = labels.next() else {
            return Self::Vllm;
        };
        let mut engine = Self::of_label(first);
        for label in labels.filter(|label| *label != first) {
            match Self::of_label(label) {
                _ if matches!(engine, Self::Unknown(_)) => break,
                unknown @ Self::Unknown(_) => engine = unknown,
                _ => engine = Self::Mixed,
            }
        }
        engine
    }

    /// True when a request to this API can be split into two legs.
    #[must_use]
    pub fn pairs_on(&self, endpoint: Endpoint) -> bool {
        match self {
            Self::Vllm => endpoint != Endpoint::Other,
            Self::Sglang | Self::Trtllm => {
                matches!(endpoint, Endpoint::Chat | Endpoint::Completions)
            }
            Self::Mixed | Self::Unknown(_) => false,
        }
    }

    /// True when a decode pod answers a request that no prefill pod has seen.
    #[must_use]
    pub fn decodes_alone(&self) -> bool {
        *self != Self::Sglang
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{model, pod};

    #[test]
    fn pods_of_one_engine_are_paired_and_one_of_an_unknown_engine_decides_for_all() {
        let fleet = |prefill, decode| {
            let prefill = pod("ns/p").prefill().roleset("r").engine(prefill);
            let decode = pod("ns/d").decode().roleset("r").engine(decode);
            model("m").pod(prefill).pod(decode).fleet()
        };
        let of = |prefill, decode| Engine::of_pairs(&fleet(prefill, decode), |_| true);
        let mine = Engine::Unknown("mine".to_owned());
        assert_eq!(of("vllm", "vllm"), Engine::Vllm);
        assert_eq!(of("sglang", "sglang"), Engine::Sglang);
        assert_eq!(of("trtllm", "trtllm"), Engine::Trtllm);
        assert_eq!(of("vllm", "sglang"), Engine::Mixed);
        assert_eq!(of("mine", "sglang"), mine);
        assert_eq!(of("sglang", "mine"), mine);
        // The decode pod comes first by name.
        assert_eq!(
            Engine::of_pairs(&fleet("vllm", "mine"), |pod| pod > 0),
            Engine::Vllm
        );
        assert_eq!(Engine::of_pairs(&fleet("a", "b"), |_| false), Engine::Vllm);
    }
}
