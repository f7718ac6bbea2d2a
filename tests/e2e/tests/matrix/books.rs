//! The gateway's counters and ledger, read for all cells together.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pd_e2e::Envoy;
use pd_failure_matrix::{Counter, Expect};
use pd_wire::control::Ledgers;
use tokio::sync::Mutex;

/// A page this old is still good.
const FRESH: Duration = Duration::from_millis(50);

const SUCCESS: &str = "gateway_request_model_success_total";
const FAIL: &str = "gateway_request_model_fail_total";

/// The counters by model.
#[derive(Default)]
pub(super) struct Counted(HashMap<String, Vec<Sample>>);

struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: u64,
}

/// A page that is fetched when it is old, once for all who ask.
struct Page<T>(Mutex<Option<(Instant, Arc<T>)>>);

/// The pages of one gateway.
pub(super) struct Books {
    counters: Page<Counted>,
    ledgers: Page<Ledgers>,
}

// === impl Page, Books ===

impl<T> Page<T> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    async fn get(&self, fetch: impl Future<Output = Result<T>>) -> Result<Arc<T>> {
        let mut held = self.0.lock().await;
        if let Some((at, page)) = &*held
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(page));
        }
        let page = Arc::new(fetch.await?);
        *held = Some((Instant::now(), Arc::clone(&page)));
        Ok(page)
    }
}

impl Books {
    pub(super) fn new() -> Self {
        Self {
            counters: Page::new(),
            ledgers: Page::new(),
        }
    }

    /// The counters.
    pub(super) async fn counters(&self, envoy: &Envoy) -> Result<Arc<Counted>> {
        let fetch = async { Counted::parse(&envoy.metrics().await?) };
        self.counters.get(fetch).await
    }

    /// What is charged for a model; empty for nothing.
    pub(super) async fn charged(&self, envoy: &Envoy, model: &str) -> Result<String> {
        let ledgers = self.ledgers.get(envoy.ledgers()).await?;
        let mut models = ledgers.models.iter();
        let charged = models.find(|ledger| ledger.model == model);
        Ok(charged.map_or_else(String::new, |ledger| format!("{:?}", ledger.pods)))
    }
}

// === impl Counted ===

impl Counted {
    fn parse(page: &str) -> Result<Self> {
        let mut counted = Self::default();
        for line in page.lines().filter(|line| line.starts_with("gateway_")) {
            let (series, value) = line.rsplit_once(' ').context("a sample without a value")?;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels.trim_end_matches('}').split(',');
            let pairs = labels.filter_map(|label| label.split_once('='));
            let labels: BTreeMap<String, String> = pairs
                .map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()))
                .collect();
            let model = labels.get("model").cloned().unwrap_or_default();
            counted.0.entry(model).or_default().push(Sample {
                name: name.to_owned(),
                labels,
                value: value.parse().with_context(|| line.to_owned())?,
            });
        }
        Ok(counted)
    }

    fn sum(&self, model: &str, name: &str, labels: &[(&str, String)]) -> u64 {
        let samples = self.0.get(model).into_iter().flatten();
        let meant = samples.filter(|sample| {
            let has = |(name, value): &(&str, String)| sample.labels.get(*name) == Some(value);
            sample.name == name && labels.iter().all(has)
        });
        meant.map(|sample| sample.value).sum()
    }

    /// How many requests of a model ended; of no model with an empty name.
    pub(super) fn endings(&self, model: &str) -> u64 {
        self.sum(model, SUCCESS, &[]) + self.sum(model, FAIL, &[])
    }

    /// How many requests of no model ended with their client gone.
    pub(super) fn unnamed_left(&self) -> u64 {
        let left = [
            ("status", "client_gone".to_owned()),
            ("status_code", "499".to_owned()),
        ];
        self.sum("", FAIL, &left)
    }

    /// What is not as expected of a model's one request.
    pub(super) fn wrong(&self, model: &str, expect: &Expect) -> Vec<String> {
        let mut wrong = Vec::new();
        let endings = self.endings(model);
        let mut labels = vec![("status", expect.ending.status.to_owned())];
        let code = expect.ending.code.map(|code| code.to_string());
        labels.extend(code.map(|code| ("status_code", code)));
        let meant = self.sum(model, expect.ending.counter(), &labels);
        if (endings, meant) != (1, 1) {
            let seen = self.show(model, &[SUCCESS, FAIL]);
            wrong.push(format!("ending {labels:?} wanted, counted: {seen}"));
        }
        for counter in &expect.counters {
            let Counter {
                name,
                labels,
                count,
            } = counter;
            let number = self.sum(model, name, labels);
            if !count.holds(number) {
                let seen = self.show(model, &[name]);
                wrong.push(format!("{name}{labels:?}: {count:?}, counted: {seen}"));
            }
        }
        wrong
    }

    fn show(&self, model: &str, names: &[&str]) -> String {
        let samples = self.0.get(model).into_iter().flatten();
        let meant = samples.filter(|sample| names.contains(&sample.name.as_str()));
        let shown = meant.map(|sample| {
            let labels = sample.labels.iter().filter(|(name, _)| *name != "model");
            let labels: Vec<String> = labels
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            format!("{} {{{}}}", sample.value, labels.join(","))
        });
        let shown: Vec<String> = shown.collect();
        if shown.is_empty() {
            "nothing".to_owned()
        } else {
            shown.join(", ")
        }
    }
}
