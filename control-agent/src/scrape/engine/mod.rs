//! What a metrics page of each engine says, in one vocabulary.

mod sglang;
mod trtllm;
mod vllm;

use super::rates::{self, Window};

/// Engines whose pages are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
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
    /// Tokens generated per second as the engine says itself; used without a counter.
    pub generation_throughput: Option<f64>,
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
            "sglang" => Some(Self::Sglang),
            "trtllm" => Some(Self::Trtllm),
            _ => None,
        }
    }

    /// Path of the metrics page.
    pub fn path(self) -> &'static str {
        match self {
            Self::Vllm => vllm::PATH,
            Self::Sglang => sglang::PATH,
            Self::Trtllm => trtllm::PATH,
        }
    }

    /// How the rate of generated tokens is measured: an engine that counts them only when a
    /// request ends needs a longer look back.
    pub fn throughput_window(self) -> Window {
        match self {
            Self::Vllm | Self::Sglang => rates::THROUGHPUT,
            Self::Trtllm => rates::FINISHED_THROUGHPUT,
        }
    }

    /// Reads a page; `None` when nothing on it is this engine's.
    pub fn read(self, page: &str) -> Option<Reading> {
        let reading = match self {
            Self::Vllm => vllm::read(page),
            Self::Sglang => sglang::read(page),
            Self::Trtllm => trtllm::read(page),
        };
        (reading != Reading::default()).then_some(reading)
    }
}

/// Adds to a sum that may not have begun.
fn add(sum: &mut Option<f64>, value: f64) {
    *sum = Some(sum.unwrap_or(0.0) + value);
}

/// The mean of a gauge's series.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1.0;
    }

    fn get(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}
