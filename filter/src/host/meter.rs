//! Counters of the host, defined on first use and remembered.
//!
//! Counts are gathered here and told to the host at every tick: one host call for many requests.

use hashbrown::HashMap;
use pd_core::meters::{Count, Gauge};
use proxy_wasm::hostcalls;
use proxy_wasm::types::MetricType;

/// The counters defined so far. Bounded like the labels: constants, status codes, and the models
/// of the snapshot.
#[derive(Debug, Default)]
pub struct Meters {
    counters: HashMap<Count, Counter>,
    gauges: HashMap<Gauge, u32>,
}

/// A counter of the host.
#[derive(Debug)]
struct Counter {
    id: u32,
    /// What the host was not told yet.
    untold: i64,
}

/// Most counters one VM defines; more label sets than that are not counted.
const LIMIT: usize = 8192;

impl Meters {
    /// Sets a gauge.
    pub fn set(&mut self, gauge: Gauge, value: u64) {
        let id = match self.gauges.get(&gauge) {
            Some(id) => *id,
            None => {
                let Ok(id) = hostcalls::define_metric(MetricType::Gauge, gauge.name()) else {
                    return;
                };
                self.gauges.insert(gauge, id);
                id
            }
        };
        if let Err(status) = hostcalls::record_metric(id, value) {
            log::warn!("a gauge was refused: {status:?}");
        }
    }

    /// Adds one, which the host sees after the next [`Meters::flush`].
    pub fn count(&mut self, count: Count) {
        self.add(count, 1);
    }

    /// Adds `untold` at once.
    pub fn add(&mut self, count: Count, untold: u32) {
        let untold = i64::from(untold);
        if let Some(counter) = self.counters.get_mut(&count) {
            counter.untold = counter.untold.saturating_add(untold);
        } else if self.counters.len() < LIMIT
            && let Ok(id) = hostcalls::define_metric(MetricType::Counter, &count.metric())
        {
            self.counters.insert(count, Counter { id, untold });
        }
    }

    /// Tells the host what was counted.
    pub fn flush(&mut self) {
        for counter in self.counters.values_mut() {
            let untold = std::mem::take(&mut counter.untold);
            if untold > 0
                && let Err(status) = hostcalls::increment_metric(counter.id, untold)
            {
                log::warn!("a counter was refused: {status:?}");
            }
        }
    }
}
