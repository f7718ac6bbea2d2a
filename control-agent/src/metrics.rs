//! Every metric of the agent, by name; ages and mirrored ledgers are filled in when read.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pd_wire::control::{Ledgers, Status};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::time::Instant;

use crate::bands::BandGauges;
use crate::snapshot::Fleet;
use crate::token_load::TokenLoad;

type FloatGauge = Gauge<f64, AtomicU64>;

/// Result of a scrape or of reading a ledger.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

/// One Envoy.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TargetLabels {
    target: String,
}

/// One kind of push to one Envoy.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PushLabels {
    target: String,
    kind: &'static str,
}

/// Result of a push.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PushResultLabels {
    target: String,
    kind: &'static str,
    result: String,
}

/// What one Envoy has acknowledged, for the age gauges.
#[derive(Clone, Debug)]
pub struct AckAge {
    /// The Envoy.
    pub target: String,
    /// `topology` or `samples`.
    pub kind: &'static str,
    /// Time since the last acknowledgement.
    pub age: Duration,
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    scrapes: Family<ResultLabels, Counter>,
    scrape_duration: Histogram,
    scrape_pods: Gauge,
    scrape_interval: FloatGauge,
    samples: Gauge,
    oldest_sample: FloatGauge,
    models: Gauge,
    pods: Gauge,
    ready_pods: Gauge,
    pod_warnings: Gauge,
    pods_file_failures: Counter,
    pushes: Family<PushResultLabels, Counter>,
    push_duration: Family<PushLabels, Histogram>,
    takeovers: Family<TargetLabels, Counter>,
    ack_age: Family<PushLabels, FloatGauge>,
    ledger_reads: Family<ResultLabels, Counter>,
    status_reads: Family<ResultLabels, Counter>,
    bands: BandGauges,
    /// Held while the families that mirror state are refilled and encoded.
    load: Mutex<TokenLoad>,
}

fn durations() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    ])
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let load = Mutex::new(TokenLoad::registered(&mut registry));
        let bands = BandGauges::registered(&mut registry);
        let mut metrics = Self {
            registry,
            bands,
            scrapes: Family::default(),
            scrape_duration: durations(),
            scrape_pods: Gauge::default(),
            scrape_interval: FloatGauge::default(),
            samples: Gauge::default(),
            oldest_sample: FloatGauge::default(),
            models: Gauge::default(),
            pods: Gauge::default(),
            ready_pods: Gauge::default(),
            pod_warnings: Gauge::default(),
            pods_file_failures: Counter::default(),
            pushes: Family::default(),
            push_duration: Family::new_with_constructor(durations),
            takeovers: Family::default(),
            ack_age: Family::default(),
            ledger_reads: Family::default(),
            status_reads: Family::default(),
            load,
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&mut self) {
        let agent = self.registry.sub_registry_with_prefix("pd_agent");
        agent.register("models", "Models known", self.models.clone());
        agent.register("pods", "Pods with an address known", self.pods.clone());
        agent.register("ready_pods", "Pods that are ready", self.ready_pods.clone());
        agent.register(
            "pod_warnings",
            "What is wrong with pods now",
            self.pod_warnings.clone(),
        );
        agent.register(
            "pods_file_failures",
            "Times the pods file could not be used",
            self.pods_file_failures.clone(),
        );
        agent.register(
            "scrapes",
            "Scrapes of engines by result",
            self.scrapes.clone(),
        );
        agent.register_with_unit(
            "scrape_duration",
            "Time one scrape took",
            Unit::Seconds,
            self.scrape_duration.clone(),
        );
        agent.register(
            "scrape_pods",
            "Pods that are scraped",
            self.scrape_pods.clone(),
        );
        agent.register_with_unit(
            "scrape_interval",
            "Time between two scrapes of a pod, stretched when the budget asks for it",
            Unit::Seconds,
            self.scrape_interval.clone(),
        );
        agent.register("samples", "Pods with a sample", self.samples.clone());
        agent.register_with_unit(
            "oldest_sample_age",
            "Age of the oldest sample",
            Unit::Seconds,
            self.oldest_sample.clone(),
        );
        agent.register(
            "pushes",
            "Pushes by Envoy, kind and result",
            self.pushes.clone(),
        );
        agent.register_with_unit(
            "push_duration",
            "Time one push took",
            Unit::Seconds,
            self.push_duration.clone(),
        );
        agent.register(
            "takeovers",
            "Times another agent's snapshot was found in an Envoy",
            self.takeovers.clone(),
        );
        agent.register_with_unit(
            "acknowledged_age",
            "Time since an Envoy last acknowledged a push of this kind",
            Unit::Seconds,
            self.ack_age.clone(),
        );
        agent.register(
            "ledger_reads",
            "Reads of the filters' ledgers by result",
            self.ledger_reads.clone(),
        );
        agent.register(
            "status_reads",
            "Reads of the filters' state by result",
            self.status_reads.clone(),
        );
    }

    /// The pods file could not be used.
    pub fn pods_file_failed(&self) {
        self.pods_file_failures.inc();
    }

    /// Pods were loaded.
    pub fn pods_loaded(&self, fleet: &Fleet) {
        let ready = fleet.members.iter().filter(|member| member.ready).count();
        self.models.set(count(fleet.models.len()));
        self.pods.set(count(fleet.members.len()));
        self.ready_pods.set(count(ready));
        self.pod_warnings.set(count(fleet.warnings.len()));
    }

    /// The set of scraped pods changed.
    pub fn scrape_plan(&self, pods: usize, interval: Duration) {
        self.scrape_pods.set(count(pods));
        self.scrape_interval.set(interval.as_secs_f64());
    }

    /// A scrape ended; the error is its kind.
    pub fn scraped(&self, result: Result<(), &'static str>, took: Duration) {
        let result = result.err().unwrap_or("ok");
        self.scrapes.get_or_create(&ResultLabels { result }).inc();
        self.scrape_duration.observe(took.as_secs_f64());
    }

    /// A push was answered or failed; `result` is a status or the kind of a failure.
    pub fn pushed(&self, target: &str, kind: &'static str, result: String, took: Duration) {
        let target = target.to_owned();
        let labels = PushLabels {
            target: target.clone(),
            kind,
        };
        self.push_duration
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
        self.pushes
            .get_or_create(&PushResultLabels {
                target,
                kind,
                result,
            })
            .inc();
    }

    /// Another agent's snapshot was found.
    pub fn takeover(&self, target: &str) {
        self.takeovers
            .get_or_create(&TargetLabels {
                target: target.to_owned(),
            })
            .inc();
    }

    /// Ledgers of an Envoy were read, or could not be.
    pub fn ledger_read(&self, result: &'static str) {
        self.ledger_reads
            .get_or_create(&ResultLabels { result })
            .inc();
    }

    /// The state of an Envoy's filter was read, or could not be.
    pub fn status_read(&self, result: &'static str) {
        self.status_reads
            .get_or_create(&ResultLabels { result })
            .inc();
    }

    /// Everything as OpenMetrics text: `ledgers` and `statuses` are those of all Envoys that
    /// answered, read now.
    pub fn render(
        &self,
        samples: (usize, Option<Duration>),
        acks: &[AckAge],
        ledgers: &[Ledgers],
        statuses: &[(String, Status)],
        now: Instant,
    ) -> Result<String, std::fmt::Error> {
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        self.samples.set(count(samples.0));
        self.oldest_sample
            .set(samples.1.unwrap_or_default().as_secs_f64());
        for AckAge { target, kind, age } in acks {
            let labels = PushLabels {
                target: target.clone(),
                kind,
            };
            self.ack_age.get_or_create(&labels).set(age.as_secs_f64());
        }
        load.show(ledgers, now);
        self.bands.show(statuses);
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

fn count(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
