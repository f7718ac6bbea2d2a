//! What a metrics page of each engine says, in one vocabulary.

mod vllm;

/// Engines whose pages are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// vLLM.
    Vllm,
}

/// The numbers of one page. Counters are as the engine counts them, summed over its series.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Requests running.
    pub running: Option<f64>,
    /// Requests waiting.
    pub waiting: Option<f64>,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Counter: tokens generated.
    pub generation_tokens: Option<f64>,
    /// Counter: requests finished.
    pub finished: Option<f64>,
    /// Counter: time spent in prefill, in seconds.
    pub prefill_seconds: Option<f64>,
    /// Counter: requests that `prefill_seconds` is the sum of.
    pub prefills: Option<f64>,
}

impl Engine {
    /// The engine of a pod label; `None` when its pages are not understood.
    pub fn of(label: &str) -> Option<Self> {
        match label {
            "vllm" => Some(Self::Vllm),
            _ => None,
        }
    }

    /// Path of the metrics page.
    pub fn path(self) -> &'static str {
        match self {
            Self::Vllm => vllm::PATH,
        }
    }

    /// Reads a page; `None` when nothing on it is this engine's.
    pub fn read(self, page: &str) -> Option<Reading> {
        let reading = match self {
            Self::Vllm => vllm::read(page),
        };
        (reading != Reading::default()).then_some(reading)
    }
}
