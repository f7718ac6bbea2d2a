//! TensorRT-LLM's metric names, types and labels: the page of `/prometheus/metrics`, and the
//! iterations that `/metrics` tells once.
//!
//! Unlike the real page, whose gauges are of the iteration in which the last request ended, this
//! one is of now.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::json as value;

use super::Trtllm;
use crate::measure::Page;

/// Iterations remembered for their reader.
const MOST_ITERATIONS: u64 = 1000;

/// The iterations since somebody asked.
#[derive(Default)]
pub(super) struct Iterations(Mutex<Told>);

#[derive(Default)]
struct Told {
    next: u64,
    untold: u64,
}

impl Iterations {
    /// One more.
    pub(super) fn count(&self) {
        let mut told = self.lock();
        told.next = told.next.saturating_add(1);
        told.untold = told.untold.saturating_add(1).min(MOST_ITERATIONS);
    }

    /// Tells them, and forgets.
    pub(super) fn drain(&self) -> String {
        let mut told = self.lock();
        let first = told.next.saturating_sub(told.untold);
        let iterations: Vec<_> = (first..told.next)
            .map(|iter| value!({ "iter": iter, "iterLatencyMS": 1.0 }))
            .collect();
        told.untold = 0;
        value!(iterations).to_string()
    }

    /// A new process.
    pub(super) fn reset(&self) {
        *self.lock() = Told::default();
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trtllm {
    /// The page of `GET /prometheus/metrics`.
    pub(super) fn metrics(&self) -> String {
        let (meters, counters) = (&self.meters, &self.core.counters);
        let used = self.capacity.kv.usage().2;
        let capacity = u64::from(self.capacity.kv.capacity());
        // 1.3.0rc8 names neither.
        let labels = "engine_type=\"undefined\",model_name=\"undefined\"";
        let mut page = Page::new(labels.to_owned());
        let success = "trtllm_request_success_total";
        page.family(success, "counter");
        for (reason, count) in [("length", &meters.length), ("stop", &meters.stop)] {
            let label = format!("finished_reason=\"{reason}\",");
            page.sample(success, &label, count.get() as f64);
        }
        for (name, histogram) in [
            ("e2e_request_latency_seconds", &meters.e2e),
            ("time_to_first_token_seconds", &meters.first_token),
            ("time_per_output_token_seconds", &meters.per_token),
            ("request_queue_time_seconds", &meters.queue),
            ("request_prefill_time_seconds", &meters.prefill),
            ("request_decode_time_seconds", &meters.decode),
        ] {
            page.histogram(&format!("trtllm_{name}"), histogram);
        }
        for (name, value) in [
            ("prompt_tokens_total", meters.prompt_tokens.get()),
            ("generation_tokens_total", meters.generated.get()),
        ] {
            page.counter(&format!("trtllm_{name}"), value);
        }
        let utilization = used as f64 / capacity.max(1) as f64;
        for (name, value) in [
            ("kv_cache_hit_rate", 0.0),
            ("kv_cache_utilization", utilization),
            ("num_requests_running", counters.running.get() as f64),
            ("num_requests_waiting", counters.waiting.get() as f64),
            ("kv_cache_max_blocks", capacity as f64),
            ("kv_cache_used_blocks", used as f64),
            ("kv_cache_free_blocks", capacity.saturating_sub(used) as f64),
        ] {
            let name = format!("trtllm_{name}");
            page.family(&name, "gauge");
            page.sample(&name, "pid=\"1\",", value);
        }
        page.finish()
    }
}
