//! SGLang's metric names (`--enable-metrics`; names of its metrics collectors, 0.4.6 to 0.5).
//!
//! The scheduler's series carry the rank they come from. Ranks of one data-parallel replica
//! (`tp_rank`, `pp_rank`, `moe_ep_rank`) speak of the same requests and, with
//! `--enable-metrics-for-all-schedulers`, all report them: of those the largest counts. Replicas
//! (`dp_rank`) have requests of their own: those are summed and their cache usage averaged. With
//! priority scheduling there is one more series per priority beside the total (`priority=""`).
//! The tokenizer's series (requests finished) have no rank and are summed.
//!
//! Waiting are also the requests that wait for their other leg (`prefill_bootstrap`, before 0.5.9
//! `prefill_prealloc`, and `decode_prealloc`): AIBrix's load of a pod counts them.

use std::collections::BTreeMap;

use super::{Mean, Reading, add};
use crate::scrape::text::{self, label};

/// Path of the metrics page.
pub(super) const PATH: &str = "/metrics";

/// The largest value of each data-parallel replica.
#[derive(Default)]
struct Replicas<'a>(BTreeMap<&'a str, f64>);

impl<'a> Replicas<'a> {
    fn add(&mut self, labels: &'a str, value: f64) {
        if label(labels, "priority").is_some_and(|priority| !priority.is_empty()) {
            return;
        }
        let rank = label(labels, "dp_rank").unwrap_or_default();
        let largest = self.0.entry(rank).or_insert(value);
        *largest = largest.max(value);
    }

    fn sum(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.values().sum())
    }

    fn mean(&self) -> Option<f64> {
        let mut mean = Mean::default();
        self.0.values().for_each(|value| mean.add(*value));
        mean.get()
    }
}

/// Reads a page.
pub(super) fn read(page: &str) -> Reading {
    let mut reading = Reading::default();
    let mut running = Replicas::default();
    let mut queued = Replicas::default();
    let mut bootstrapping = Replicas::default();
    let mut preallocating = Replicas::default();
    let mut awaiting_kv = Replicas::default();
    let mut usage = Replicas::default();
    let mut throughput = Replicas::default();
    let mut decoded = Replicas::default();
    for sample in text::series(page) {
        let replicas = match sample.name {
            "sglang:num_running_reqs" => &mut running,
            "sglang:num_queue_reqs" => &mut queued,
            "sglang:num_prefill_bootstrap_queue_reqs" => &mut bootstrapping,
            "sglang:num_prefill_prealloc_queue_reqs" => &mut preallocating,
            "sglang:num_decode_prealloc_queue_reqs" => &mut awaiting_kv,
            "sglang:token_usage" => &mut usage,
            "sglang:gen_throughput" => &mut throughput,
            "sglang:realtime_tokens_total" => {
                if label(sample.labels, "mode") != Some("decode") {
                    continue;
                }
                &mut decoded
            }
            "sglang:num_requests_total" => {
                add(&mut reading.finished, sample.value);
                continue;
            }
            // All ranks count alike, so their number does not change the mean.
            "sglang:per_stage_req_latency_seconds_sum" if is_prefill(sample.labels) => {
                add(&mut reading.prefill_seconds, sample.value);
                continue;
            }
            "sglang:per_stage_req_latency_seconds_count" if is_prefill(sample.labels) => {
                add(&mut reading.prefills, sample.value);
                continue;
            }
            _ => continue,
        };
        replicas.add(sample.labels, sample.value);
    }
    reading.running = running.sum();
    reading.waiting = queued.sum().map(|queued| {
        let bootstrapping = bootstrapping.sum().or(preallocating.sum());
        queued + bootstrapping.unwrap_or(0.0) + awaiting_kv.sum().unwrap_or(0.0)
    });
    reading.kv_usage = usage.mean();
    // Grows with every step, where `generation_tokens_total` waits for the request's end.
    reading.generation_tokens = decoded.sum();
    // The gauge keeps its last value for up to 30 s after the last request.
    reading.generation_throughput = match reading.running {
        Some(0.0) => throughput.sum().map(|_| 0.0),
        _ => throughput.sum(),
    };
    reading
}

fn is_prefill(labels: &str) -> bool {
    label(labels, "stage") == Some("prefill_forward")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_one_scheduler() {
        let page = r#"
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 1.0
sglang:num_grammar_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 7.0
sglang:num_prefill_bootstrap_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 0.0
sglang:num_decode_prealloc_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:num_decode_transfer_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 9.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:full_token_usage{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 0.99
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 86.50814177726902
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="m"} 40.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 2.0
sglang:num_requests_created{model_name="m"} 1.7e+09
sglang:generation_tokens_total{model_name="m"} 7557572.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 12.5
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_forward",tp_rank="0"} 4.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_forward",tp_rank="0"} 20.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="decode_transferred",tp_rank="0"} 99.0
"#;
        let expected = Reading {
            running: Some(3.0),
            waiting: Some(3.0),
            kv_usage: Some(0.28),
            generation_throughput: Some(86.508_141_777_269_02),
            finished: Some(42.0),
            prefill_seconds: Some(4.0),
            prefills: Some(20.0),
            ..Reading::default()
        };
        assert_eq!(read(page), expected);
    }

    #[test]
    fn replicas_are_summed_and_ranks_of_one_replica_are_not() {
        let page = r#"
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="2"} 5.0
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="3"} 4.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="",tp_rank="0"} 4.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",priority="-1",tp_rank="0"} 9.0
sglang:num_prefill_prealloc_queue_reqs{dp_rank="1",model_name="m",tp_rank="2"} 1.0
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.2
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="1"} 0.2
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="2"} 0.6
sglang:gen_throughput{dp_rank="0",model_name="m",tp_rank="0"} 100.0
sglang:gen_throughput{dp_rank="1",model_name="m",tp_rank="2"} 50.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",model_name="m",tp_rank="0"} 700.0
sglang:realtime_tokens_total{dp_rank="0",mode="decode",model_name="m",tp_rank="1"} 700.0
sglang:realtime_tokens_total{dp_rank="1",mode="decode",model_name="m",tp_rank="2"} 40.0
sglang:realtime_tokens_total{dp_rank="1",mode="prefill_compute",model_name="m",tp_rank="2"} 9999.0
"#;
        let expected = Reading {
            running: Some(8.0),
            waiting: Some(5.0),
            kv_usage: Some(0.4),
            generation_tokens: Some(740.0),
            generation_throughput: Some(150.0),
            ..Reading::default()
        };
        assert_eq!(read(page), expected);
    }

    #[test]
    fn an_idle_engine_has_no_throughput_whatever_the_gauge_still_says() {
        let page = "sglang:num_running_reqs{model_name=\"m\"} 0.0\nsglang:gen_throughput{model_name=\"m\"} 86.5\n";
        let reading = read(page);
        assert_eq!(reading.generation_throughput, Some(0.0));
        assert_eq!(read("vllm:num_requests_running 9\n"), Reading::default());
    }
}
