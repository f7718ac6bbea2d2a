//! What each engine wants to see: the bodies of both legs and what is taken from the prefill
//! reply.

pub mod usage;
pub mod vllm;

use crate::fleet::ModelFleet;
use pd_wire::knobs::excerpt;

/// How the pods of a model can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Prefill first, KV handed over by `kv_transfer_params`.
    Vllm,
    /// An engine whose protocol is not known: its pods are used in one leg.
    Unknown(String),
    /// An engine whose decode pods cannot answer alone, and whose hand-over is not built in.
    Unsupported(String),
}

impl Engine {
    /// The engine of a label's value.
    #[must_use]
    pub fn of_label(label: &str) -> Self {
        match label {
            "vllm" => Self::Vllm,
            "sglang" | "trtllm" => Self::Unsupported(label.to_owned()),
            other => Self::Unknown(excerpt(other)),
        }
    }

    /// Its pods drop a request when `/abort_request` names it.
    #[must_use]
    pub fn aborts(&self) -> bool {
        matches!(self, Self::Unsupported(label) if label == "sglang")
    }

    /// Its decode pod owes an answer once the prefill has succeeded, whatever its load: the prefill
    /// returns only when the decode pod has taken the KV over. So silence from then on is a fault,
    /// and the decode timers run without being asked for.
    #[must_use]
    pub fn answers_after_prefill(&self) -> bool {
        self.aborts()
    }

    /// The engine of a model's pairs as far as a request may use them: the first that is not
    /// vLLM, if there is one, for a pair of two engines cannot work.
    #[must_use]
    pub fn of_pairs(fleet: &ModelFleet, allowed: impl Fn(u16) -> bool) -> Self {
        let members = fleet
            .rolesets
            .iter()
            .flat_map(|set| set.prefill.iter().chain(&set.decode));
        members
            .filter(|position| allowed(**position))
            .filter_map(|position| fleet.pod(*position))
            .map(|pod| pod.engine.as_str())
            .find(|label| *label != "vllm")
            .map_or(Self::Vllm, Self::of_label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{model, pod};

    #[test]
    fn one_pod_of_another_engine_decides_for_the_whole_model() {
        let fleet = |engine| {
            let prefill = pod("ns/p").prefill().roleset("r");
            let decode = pod("ns/d").decode().roleset("r").engine(engine);
            model("m").pod(prefill).pod(decode).fleet()
        };
        let pair = |engine| Engine::of_pairs(&fleet(engine), |_| true);
        assert_eq!(pair("vllm"), Engine::Vllm);
        assert_eq!(pair("sglang"), Engine::Unsupported("sglang".to_owned()));
        assert_eq!(pair("mine"), Engine::Unknown("mine".to_owned()));
        // The decode pod comes first by name.
        assert_eq!(
            Engine::of_pairs(&fleet("mine"), |pod| pod > 0),
            Engine::Vllm
        );
    }
}
