//! Counters of the host, defined on first use and remembered.

use hashbrown::HashMap;
use pd_core::meters::Count;
use proxy_wasm::hostcalls;
use proxy_wasm::types::MetricType;

/// Ids of the counters defined so far. Bounded like the labels: constants, status codes, and
/// the models of the snapshot.
#[derive(Debug, Default)]
pub struct Meters {
    ids: HashMap<Count, u32>,
}

/// Most counters one VM defines; more label sets than that are not counted.
const LIMIT: usize = 8192;

impl Meters {
    /// Adds one.
    pub fn count(&mut self, count: Count) {
        let id = match self.ids.get(&count) {
            Some(id) => *id,
            None if self.ids.len() >= LIMIT => return,
            None => {
                let Ok(id) = hostcalls::define_metric(MetricType::Counter, &count.metric()) else {
                    return;
                };
                self.ids.insert(count, id);
                id
            }
        };
        if let Err(status) = hostcalls::increment_metric(id, 1) {
            log::warn!("a counter was refused: {status:?}");
        }
    }
}
