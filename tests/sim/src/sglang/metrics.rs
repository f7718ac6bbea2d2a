//! SGLang's metric names, types and labels. The scheduler's series are there once per rank, with
//! the requests spread over the data-parallel ones; the tokenizer's carry no rank. What the
//! simulation does not model is there with its resting value.
//!
//! Unlike the real page, whose gauges are of the scheduler's last report (up to 30 s old when it
//! idles), this one is of now.

use super::Sglang;
use crate::config::Role;
use crate::measure::Page;

impl Sglang {
    /// The page of `GET /metrics`.
    pub(super) fn metrics(&self) -> String {
        let (config, meters) = (&self.core.config, &self.meters);
        let model = &config.model;
        let mut page = Page::new(format!("model_name=\"{model}\""));
        let usage =
            self.capacity.kv.usage().2 as f64 / f64::from(self.capacity.kv.capacity().max(1));
        let tokens = self
            .capacity
            .kv
            .usage()
            .2
            .saturating_mul(config.block_size.into());
        let queues = &self.queues;
        let running = self.core.counters.running.get();
        // Requests in a queue of their own are not in the waiting queue.
        let apart = [
            &queues.bootstrap,
            &queues.inflight,
            &queues.prealloc,
            &queues.transfer,
        ];
        let apart = apart.iter().map(|queue| queue.get()).sum::<u64>();
        let waiting = self.core.counters.waiting.get().saturating_sub(apart);
        for (name, value) in [
            ("num_running_reqs", running),
            ("num_queue_reqs", waiting),
            ("num_grammar_queue_reqs", 0),
            ("num_used_tokens", tokens),
            ("num_retracted_reqs", 0),
            ("num_prefill_bootstrap_queue_reqs", queues.bootstrap.get()),
            ("num_prefill_inflight_queue_reqs", queues.inflight.get()),
            ("num_decode_prealloc_queue_reqs", queues.prealloc.get()),
            ("num_decode_transfer_queue_reqs", queues.transfer.get()),
        ] {
            self.spread(&mut page, name, "gauge", "", value);
        }
        for (name, value) in [
            ("token_usage", usage),
            ("full_token_usage", usage),
            ("cache_hit_rate", 0.0),
            ("utilization", 0.0),
        ] {
            self.ranks(&mut page, name, "gauge", |_| value);
        }
        let throughput = meters.throughput() / f64::from(config.dp_size.max(1));
        self.ranks(&mut page, "gen_throughput", "gauge", |_| throughput);
        self.spread(
            &mut page,
            "realtime_tokens_total",
            "counter",
            "mode=\"decode\",",
            meters.decoded.get(),
        );
        for (name, count) in [
            ("num_bootstrap_failed_reqs_total", &queues.bootstrap_failed),
            ("num_transfer_failed_reqs_total", &queues.transfer_failed),
        ] {
            self.spread(&mut page, name, "counter", "", count.get());
        }
        let finished = meters.stop.get().saturating_add(meters.length.get());
        for (name, value) in [
            ("prompt_tokens_total", meters.prompt_tokens.get()),
            ("generation_tokens_total", meters.generated.get()),
            ("cached_tokens_total", 0),
            ("num_requests_total", finished),
            ("num_aborted_requests_total", meters.aborted.get()),
        ] {
            page.counter(&format!("sglang:{name}"), value);
        }
        page.histogram("sglang:time_to_first_token_seconds", &meters.first_token);
        page.histogram("sglang:inter_token_latency_seconds", &meters.per_token);
        page.histogram("sglang:e2e_request_latency_seconds", &meters.e2e);
        page.histogram("sglang:queue_time_seconds", &meters.queue);
        let stage = "stage=\"prefill_forward\",";
        page.histogram_of(
            "sglang:per_stage_req_latency_seconds",
            stage,
            &meters.prefill,
        );
        page.finish()
    }

    /// A series of each rank, whose value is its replica's.
    fn ranks(&self, page: &mut Page, name: &str, kind: &str, value: impl Fn(u64) -> f64) {
        self.series(page, name, kind, "", value);
    }

    /// Requests or tokens, spread over the replicas.
    fn spread(&self, page: &mut Page, name: &str, kind: &str, more: &str, total: u64) {
        let replicas = u64::from(self.core.config.dp_size.max(1));
        self.series(page, name, kind, more, |replica| {
            let rest = u64::from(replica < total % replicas);
            (total / replicas).saturating_add(rest) as f64
        });
    }

    fn series(
        &self,
        page: &mut Page,
        name: &str,
        kind: &str,
        more: &str,
        value: impl Fn(u64) -> f64,
    ) {
        let config = &self.core.config;
        let name = format!("sglang:{name}");
        let engine_type = match config.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "unified",
        };
        page.family(&name, kind);
        for replica in 0..config.dp_size {
            // A single replica has no rank.
            let dp = if config.dp_size > 1 {
                format!("dp_rank=\"{replica}\",")
            } else {
                String::new()
            };
            for rank in 0..config.tp_size {
                let rank = replica.saturating_mul(config.tp_size).saturating_add(rank);
                let labels = format!(
                    "{dp}engine_type=\"{engine_type}\",{more}pp_rank=\"0\",tp_rank=\"{rank}\","
                );
                page.sample(&name, &labels, value(u64::from(replica)));
            }
        }
    }
}
