//! vLLM's metric names, types, labels and buckets. What the simulation does not model is there
//! with its resting value, so that scrapers meet every family.

use std::time::Duration;

use crate::core::{Count, Counters};
use crate::measure::{Histogram, Page};

const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const INTER_TOKEN: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
const XFER: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0,
];
const POST: &[f64] = &[0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];
const BYTES: &[f64] = &[
    65_536.0,
    1_048_576.0,
    16_777_216.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
];
const COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
];

const SECONDS: f64 = 1e6;
const WHOLE: f64 = 1.0;

/// Bytes of KV in a block, as measured with a small model.
const BLOCK_BYTES: u64 = 65_536;

/// How a request ended, as `request_success_total` counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Stop,
    Length,
}

/// Where a prompt's KV came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Computed,
    Transferred,
}

/// When a request did what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timings {
    /// Arrival to the start of work.
    pub(super) queue: Duration,
    /// Start of work to the first token.
    pub(super) prefill: Duration,
    /// Arrival to the first token.
    pub(super) first_token: Duration,
    /// Arrival to the last token.
    pub(super) whole: Duration,
}

/// All that the engine measures about requests.
pub(super) struct Meters {
    prompt_computed: Count,
    prompt_transferred: Count,
    generated: Count,
    stop: Count,
    length: Count,
    error: Count,
    admission_rejections: Count,
    failed_transfers: Count,
    failed_notifications: Count,
    pub(super) expired: Count,
    pub(super) after_expiry: Count,
    xfer_time: Histogram,
    post_time: Histogram,
    bytes: Histogram,
    descriptors: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    kv_computed_tokens: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

/// The numbers of the moment a page needs.
pub(super) struct Gauges<'a> {
    pub(super) counters: &'a Counters,
    pub(super) model: &'a str,
    pub(super) used_blocks: u64,
    pub(super) capacity: u32,
    pub(super) block_size: u32,
}

// === impl Meters ===

impl Meters {
    pub(super) fn new() -> Self {
        let seconds = |bounds| Histogram::new(bounds, SECONDS);
        let whole = |bounds| Histogram::new(bounds, WHOLE);
        Self {
            prompt_computed: Count::default(),
            prompt_transferred: Count::default(),
            generated: Count::default(),
            stop: Count::default(),
            length: Count::default(),
            error: Count::default(),
            admission_rejections: Count::default(),
            failed_transfers: Count::default(),
            failed_notifications: Count::default(),
            expired: Count::default(),
            after_expiry: Count::default(),
            xfer_time: seconds(XFER),
            post_time: seconds(POST),
            bytes: whole(BYTES),
            descriptors: whole(COUNTS),
            prompt_tokens: whole(COUNTS),
            generation_tokens: whole(COUNTS),
            kv_computed_tokens: whole(COUNTS),
            first_token: seconds(TTFT),
            inter_token: seconds(INTER_TOKEN),
            per_token: seconds(INTER_TOKEN),
            e2e: seconds(REQUEST),
            queue: seconds(REQUEST),
            inference: seconds(REQUEST),
            prefill: seconds(REQUEST),
            decode: seconds(REQUEST),
        }
    }

    /// A pull of this many blocks succeeded.
    pub(super) fn pulled(&self, blocks: usize, took: Duration) {
        self.xfer_time.observe(took.as_secs_f64());
        self.post_time.observe(0.0);
        self.bytes
            .observe((blocks as u64).saturating_mul(BLOCK_BYTES) as f64);
        self.descriptors.observe(blocks as f64);
    }

    /// A pull failed.
    pub(super) fn pull_failed(&self) {
        self.failed_transfers.up();
    }

    /// A request was refused for a full queue.
    pub(super) fn rejected(&self) {
        self.admission_rejections.up();
    }

    /// A request ended without text.
    pub(super) fn failed(&self) {
        self.error.up();
    }

    /// A request was answered.
    pub(super) fn answered(
        &self,
        origin: Origin,
        prompt_tokens: u32,
        generated: u32,
        finish: Finish,
        timings: Timings,
    ) {
        let source = match origin {
            Origin::Computed => &self.prompt_computed,
            Origin::Transferred => &self.prompt_transferred,
        };
        source.add(u64::from(prompt_tokens));
        self.generated.add(u64::from(generated));
        match finish {
            Finish::Stop => self.stop.up(),
            Finish::Length => self.length.up(),
        }
        self.prompt_tokens.observe(f64::from(prompt_tokens));
        self.kv_computed_tokens.observe(f64::from(prompt_tokens));
        self.generation_tokens.observe(f64::from(generated));
        let decode = timings.whole.saturating_sub(timings.first_token);
        self.first_token.observe(timings.first_token.as_secs_f64());
        self.e2e.observe(timings.whole.as_secs_f64());
        self.queue.observe(timings.queue.as_secs_f64());
        self.prefill.observe(timings.prefill.as_secs_f64());
        self.decode.observe(decode.as_secs_f64());
        let inference = timings.whole.saturating_sub(timings.queue);
        self.inference.observe(inference.as_secs_f64());
        if generated > 1 {
            let each = decode.as_secs_f64() / f64::from(generated - 1);
            self.inter_token.observe(each);
            self.per_token.observe(each);
        }
    }

    /// A new process starts at zero.
    pub(super) fn reset(&self) {
        for count in [
            &self.prompt_computed,
            &self.prompt_transferred,
            &self.generated,
            &self.stop,
            &self.length,
            &self.error,
            &self.admission_rejections,
            &self.failed_transfers,
            &self.failed_notifications,
            &self.expired,
            &self.after_expiry,
        ] {
            count.reset();
        }
        for (_, histogram) in self.histograms() {
            histogram.reset();
        }
    }

    fn histograms(&self) -> [(&'static str, &Histogram); 15] {
        [
            ("nixl_xfer_time_seconds", &self.xfer_time),
            ("nixl_post_time_seconds", &self.post_time),
            ("nixl_bytes_transferred", &self.bytes),
            ("nixl_num_descriptors", &self.descriptors),
            ("request_prompt_tokens", &self.prompt_tokens),
            ("request_generation_tokens", &self.generation_tokens),
            (
                "request_prefill_kv_computed_tokens",
                &self.kv_computed_tokens,
            ),
            ("time_to_first_token_seconds", &self.first_token),
            ("inter_token_latency_seconds", &self.inter_token),
            ("request_time_per_output_token_seconds", &self.per_token),
            ("e2e_request_latency_seconds", &self.e2e),
            ("request_queue_time_seconds", &self.queue),
            ("request_inference_time_seconds", &self.inference),
            ("request_prefill_time_seconds", &self.prefill),
            ("request_decode_time_seconds", &self.decode),
        ]
    }

    /// The exposition text.
    pub(super) fn page(&self, gauges: &Gauges<'_>) -> String {
        let model = gauges.model.replace('\\', "\\\\").replace('"', "\\\"");
        let mut page = Page::new(format!("engine=\"0\",model_name=\"{model}\""));
        let waiting = gauges.counters.waiting.get() as f64;
        page.gauge(
            "vllm:num_requests_running",
            gauges.counters.running.get() as f64,
        );
        page.gauge("vllm:num_requests_waiting", waiting);
        labelled(
            &mut page,
            "vllm:num_requests_waiting_by_reason",
            "gauge",
            "reason",
            &[("capacity", waiting), ("deferred", 0.0)],
        );
        labelled(
            &mut page,
            "vllm:num_requests_kv_fetch_by_stage",
            "gauge",
            "stage",
            &[
                ("waiting_to_start", 0.0),
                ("in_progress", 0.0),
                ("completed_waiting", 0.0),
            ],
        );
        let usage = gauges.used_blocks as f64 / f64::from(gauges.capacity.max(1));
        page.gauge("vllm:kv_cache_usage_perc", usage);
        self.counters(&mut page);
        for (name, histogram) in self.histograms() {
            page.histogram(&format!("vllm:{name}"), histogram);
        }
        page.family("vllm:cache_config_info", "gauge");
        let info = format!(
            "block_size=\"{}\",num_gpu_blocks=\"{}\",",
            gauges.block_size,
            u64::from(gauges.capacity) + 1
        );
        page.sample("vllm:cache_config_info", &info, 1.0);
        page.finish()
    }

    fn counters(&self, page: &mut Page) {
        let computed = self.prompt_computed.get();
        let transferred = self.prompt_transferred.get();
        let prompt = computed.saturating_add(transferred);
        for (name, value) in [
            (
                "nixl_num_failed_transfers_total",
                self.failed_transfers.get(),
            ),
            (
                "nixl_num_failed_notifications_total",
                self.failed_notifications.get(),
            ),
            ("nixl_num_kv_expired_reqs_total", self.expired.get()),
            (
                "nixl_num_notifications_after_expiry_total",
                self.after_expiry.get(),
            ),
            ("prefix_cache_queries_total", prompt),
            ("prefix_cache_hits_total", 0),
            ("external_prefix_cache_queries_total", prompt),
            ("external_prefix_cache_hits_total", transferred),
            ("mm_cache_queries_total", 0),
            ("mm_cache_hits_total", 0),
            ("num_preemptions_total", 0),
            ("prompt_tokens_total", prompt),
            ("prompt_tokens_cached_total", 0),
            ("generation_tokens_total", self.generated.get()),
        ] {
            page.counter(&format!("vllm:{name}"), value);
        }
        labelled(
            page,
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "source",
            &[
                ("local_compute", computed as f64),
                ("local_cache_hit", 0.0),
                ("external_kv_transfer", transferred as f64),
            ],
        );
        labelled(
            page,
            "vllm:request_success_total",
            "counter",
            "finished_reason",
            &[
                ("stop", self.stop.get() as f64),
                ("length", self.length.get() as f64),
                ("abort", 0.0),
                ("error", self.error.get() as f64),
                ("repetition", 0.0),
            ],
        );
        labelled(
            page,
            "vllm:admission_rejections_total",
            "counter",
            "reason",
            &[
                (
                    "max_num_queued_reqs",
                    self.admission_rejections.get() as f64,
                ),
                ("max_num_queued_tokens", 0.0),
            ],
        );
    }
}

fn labelled(page: &mut Page, name: &str, kind: &str, label: &str, values: &[(&str, f64)]) {
    page.family(name, kind);
    for (reason, value) in values {
        page.sample(name, &format!("{label}=\"{reason}\","), *value);
    }
}
