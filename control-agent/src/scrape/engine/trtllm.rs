//! TensorRT-LLM's metric names (`trtllm-serve` with `return_perf_metrics`; names of its metrics
//! collector).
//!
//! The page is `/prometheus/metrics`. Never `/metrics`: that one lists the iterations since the
//! last reader as JSON and forgets them, so reading it takes them away from whoever else does.
//! 1.3.0rc8 has requests, times and the cache usage; queue lengths and token counters came later
//! and are read when they are there. The collector runs in several processes, whose gauges have
//! a series each (`pid`): requests are summed, the cache usage is averaged.

use super::{Mean, Reading, add};
use crate::scrape::text;

/// Path of the metrics page.
pub(super) const PATH: &str = "/prometheus/metrics";

/// Reads a page.
pub(super) fn read(page: &str) -> Reading {
    let mut reading = Reading::default();
    let mut usage = Mean::default();
    for (name, value) in text::samples(page) {
        let sum = match name {
            "trtllm_num_requests_running" => &mut reading.running,
            "trtllm_num_requests_waiting" => &mut reading.waiting,
            // Grows when a request ends, by all of its tokens.
            "trtllm_generation_tokens_total" => &mut reading.generation_tokens,
            // One series per finished_reason.
            "trtllm_request_success_total" => &mut reading.finished,
            "trtllm_request_prefill_time_seconds_sum" => &mut reading.prefill_seconds,
            "trtllm_request_prefill_time_seconds_count" => &mut reading.prefills,
            "trtllm_kv_cache_utilization" => {
                usage.add(value);
                continue;
            }
            _ => continue,
        };
        add(sum, value);
    }
    reading.kv_usage = usage.get();
    reading
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_1_3_0rc8_gives_requests_and_cache_usage() {
        let page = r#"
# HELP trtllm_request_success_total Count of successfully processed requests.
# TYPE trtllm_request_success_total counter
trtllm_request_success_total{engine_type="undefined",finished_reason="length",model_name="undefined"} 5.0
trtllm_request_success_total{engine_type="undefined",finished_reason="stop",model_name="undefined"} 95.0
# TYPE trtllm_e2e_request_latency_seconds histogram
trtllm_e2e_request_latency_seconds_sum{engine_type="undefined",model_name="undefined"} 240.5
trtllm_e2e_request_latency_seconds_bucket{engine_type="undefined",le="0.3",model_name="undefined"} 8.0
trtllm_e2e_request_latency_seconds_count{engine_type="undefined",model_name="undefined"} 100.0
# TYPE trtllm_kv_cache_hit_rate gauge
trtllm_kv_cache_hit_rate{engine_type="undefined",model_name="undefined",pid="117"} 0.38
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{engine_type="undefined",model_name="undefined",pid="117"} 0.62
"#;
        let expected = Reading {
            finished: Some(100.0),
            kv_usage: Some(0.62),
            ..Reading::default()
        };
        assert_eq!(read(page), expected);
    }

    #[test]
    fn a_later_page_has_queues_tokens_and_prefill_times_too() {
        let page = r#"
trtllm_num_requests_running{engine_type="undefined",model_name="m",pid="117"} 3.0
trtllm_num_requests_running{engine_type="undefined",model_name="m",pid="118"} 2.0
trtllm_num_requests_waiting{engine_type="undefined",model_name="m",pid="117"} 1.0
trtllm_max_num_active_requests{engine_type="undefined",model_name="m",pid="117"} 64.0
trtllm_generation_tokens_total{engine_type="undefined",model_name="m"} 12345.0
trtllm_request_prefill_time_seconds_sum{engine_type="undefined",model_name="m"} 4.0
trtllm_request_prefill_time_seconds_count{engine_type="undefined",model_name="m"} 20.0
trtllm_kv_cache_utilization{engine_type="undefined",model_name="m",pid="117"} 0.5
trtllm_kv_cache_utilization{engine_type="undefined",model_name="m",pid="118"} 0.25
"#;
        let expected = Reading {
            running: Some(5.0),
            waiting: Some(1.0),
            kv_usage: Some(0.375),
            generation_tokens: Some(12345.0),
            prefill_seconds: Some(4.0),
            prefills: Some(20.0),
            ..Reading::default()
        };
        assert_eq!(read(page), expected);
    }

    #[test]
    fn the_iteration_list_is_no_page() {
        assert_eq!(
            read(r#"[{"iter":7,"numActiveRequests":2,"kvCacheStats":{"usedNumBlocks":3}}]"#),
            Reading::default()
        );
    }
}
