//! vLLM's metric names (taken from the page of a running 0.32 server).
//!
//! A server with data-parallel ranks has one series per rank (`engine="0"`, `engine="1"`):
//! requests and counters are summed over them, the cache usage is averaged.

use super::{Mean, Reading, add};
use crate::scrape::text;

/// Path of the metrics page.
pub(super) const PATH: &str = "/metrics";

/// Reads a page.
pub(super) fn read(page: &str) -> Reading {
    let mut reading = Reading::default();
    let mut usage = Mean::default();
    let mut old_usage = Mean::default();
    for (name, value) in text::samples(page) {
        let sum = match name {
            "vllm:num_requests_running" => &mut reading.running,
            "vllm:num_requests_waiting" => &mut reading.waiting,
            "vllm:generation_tokens_total" => &mut reading.generation_tokens,
            // One series per finished_reason.
            "vllm:request_success_total" => &mut reading.finished,
            "vllm:request_prefill_time_seconds_sum" => &mut reading.prefill_seconds,
            "vllm:request_prefill_time_seconds_count" => &mut reading.prefills,
            "vllm:kv_cache_usage_perc" => {
                usage.add(value);
                continue;
            }
            // Name of the same number before 0.10.
            "vllm:gpu_cache_usage_perc" => {
                old_usage.add(value);
                continue;
            }
            _ => continue,
        };
        add(sum, value);
    }
    reading.kv_usage = usage.get().or(old_usage.get());
    reading
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_summed_and_their_cache_usage_is_averaged() {
        let page = r#"
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 8.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 8.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
"#;
        let expected = Reading {
            running: Some(7.0),
            waiting: Some(1.0),
            kv_usage: Some(0.3),
            generation_tokens: Some(1000.0),
            finished: Some(8.0),
            prefill_seconds: Some(2.0),
            prefills: Some(8.0),
            ..Reading::default()
        };
        assert_eq!(read(page), expected);
    }

    #[test]
    fn what_the_page_lacks_stays_absent() {
        assert_eq!(read("http_requests_total 5\n"), Reading::default());
        let old = read("vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.25\n");
        assert_eq!(
            old,
            Reading {
                kv_usage: Some(0.25),
                ..Reading::default()
            }
        );
    }
}
