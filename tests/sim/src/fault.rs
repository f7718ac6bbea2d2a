//! Faults a test asks for, and the draw of the one that hits a request.
//!
//! Faults are drawn in the order they were armed; at most one hits a request. A fault with a
//! probability draws from its own seeded generator, so a run repeats as long as requests arrive in
//! the same order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::core::Words;

/// Faults armed at once; more are refused.
const MOST_ARMED: usize = 64;

/// A fault and when it strikes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// How many requests it hits.
    #[serde(default)]
    pub next: Times,
    /// Which requests.
    #[serde(default)]
    pub on: On,
    /// What happens to them.
    pub kind: FaultKind,
    /// Chance that a matching request is hit, 0 to 1.
    #[serde(default = "certain")]
    pub probability: f64,
    /// Seed of the draws.
    #[serde(default)]
    pub seed: u64,
}

/// How many requests a fault hits: a JSON number, or `"all"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Times {
    /// This many, then it is gone.
    Count(u64),
    /// Every one until cleared.
    All(Every),
}

/// The word `"all"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Every {
    /// No limit.
    All,
}

/// The requests a fault applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum On {
    /// Requests that leave KV for another engine.
    Prefill,
    /// All other generation requests.
    Decode,
    /// Both.
    #[default]
    Any,
    /// `GET /metrics` (TensorRT-LLM's `/prometheus/metrics`) and `GET /health`.
    Scrape,
    /// SGLang's `POST /abort_request`. [`FaultKind::Status`] with 200 is an abort that is
    /// acknowledged and not done.
    Abort,
    /// TensorRT-LLM's `GET /server_info`.
    Info,
}

/// How a connection is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cut {
    /// TCP reset.
    #[default]
    Rst,
    /// Orderly close of the socket in the middle of whatever was going on.
    Fin,
}

/// What a fault does. Times are milliseconds; a stall without `ms` lasts until the client leaves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultKind {
    /// Answers this without doing anything.
    Status {
        /// HTTP status.
        code: u16,
        /// Body; default: the engine's error object.
        #[serde(default)]
        body: Option<String>,
        /// More headers.
        #[serde(default)]
        headers: BTreeMap<String, String>,
    },
    /// Answers this status after a while: a prefill that fails when its decode leg is at work.
    LateStatus {
        /// HTTP status.
        code: u16,
        /// Body.
        body: String,
        /// Waits this long first.
        after_ms: u64,
        /// Does the work before that.
        #[serde(default)]
        after_work: bool,
    },
    /// Cuts the connection instead of answering.
    ResetBeforeHeaders {
        /// How.
        #[serde(default)]
        how: Cut,
        /// Waits this long first.
        #[serde(default)]
        after_ms: u64,
        /// Does the work first, so that a prefill leaves KV behind.
        #[serde(default)]
        after_work: bool,
    },
    /// Sends nothing for a while, then goes on.
    StallBeforeHeaders {
        /// For how long.
        #[serde(default)]
        ms: Option<u64>,
        /// Does the work first. Of a stream that is the prompt's.
        #[serde(default)]
        after_work: bool,
    },
    /// Stops in the body after this many content chunks (half a body that is not streamed).
    StallMidStream {
        /// Content chunks sent before.
        after_chunks: u32,
        /// For how long.
        #[serde(default)]
        ms: Option<u64>,
    },
    /// Cuts the connection in the body after this many content chunks.
    ResetMidStream {
        /// Content chunks sent before.
        after_chunks: u32,
        /// How.
        #[serde(default)]
        how: Cut,
    },
    /// Sends the engine's error event in a stream after this many content chunks.
    ErrorMidStream {
        /// Content chunks sent before.
        after_chunks: u32,
    },
    /// Waits, then goes on.
    Slow {
        /// For how long.
        ms: u64,
    },
    /// Answers 200 with half of its JSON.
    BadJson,
    /// Answers without hand-over parameters (`null`), though it holds the KV. SGLang answers none.
    NoKvParams,
    /// Answers with changed hand-over parameters.
    KvParams {
        /// Members set over the true ones.
        #[serde(default)]
        merge: Map<String, Value>,
        /// Members left out.
        #[serde(default)]
        remove: Vec<String>,
    },
    /// The engine dies at once: its port closes, all its connections break.
    Die,
    /// Stops listening now (whatever `next` and `on` say) until resumed.
    RefuseConnections {
        /// Leaves open connections alone.
        #[serde(default)]
        keep_open: bool,
    },
    /// Listens again, now.
    ResumeConnections,
}

/// The armed faults of an engine.
#[derive(Default)]
pub(crate) struct FaultTable {
    any: AtomicBool,
    armed: Mutex<Vec<Armed>>,
}

struct Armed {
    fault: Fault,
    words: Words,
}

fn certain() -> f64 {
    1.0
}

// === impl Fault ===

impl Fault {
    /// A fault that hits every request of this kind until cleared.
    pub fn every(on: On, kind: FaultKind) -> Self {
        Self {
            next: Times::All(Every::All),
            on,
            kind,
            probability: certain(),
            seed: 0,
        }
    }

    /// A fault that hits the next requests of this kind.
    pub fn next(count: u64, on: On, kind: FaultKind) -> Self {
        Self {
            next: Times::Count(count),
            ..Self::every(on, kind)
        }
    }
}

// === impl Times, On ===

impl Default for Times {
    fn default() -> Self {
        Self::Count(1)
    }
}

impl On {
    fn covers(self, leg: On) -> bool {
        match self {
            Self::Any => matches!(leg, Self::Prefill | Self::Decode),
            one => one == leg,
        }
    }
}

// === impl FaultTable ===

impl FaultTable {
    /// Arms a fault; false when the table is full.
    pub(crate) fn arm(&self, fault: Fault) -> bool {
        if fault.next == Times::Count(0) {
            return true;
        }
        let mut armed = self.lock();
        if armed.len() >= MOST_ARMED {
            return false;
        }
        let words = Words::seeded(fault.seed);
        armed.push(Armed { fault, words });
        self.any.store(true, Ordering::Release);
        true
    }

    /// Disarms all.
    pub(crate) fn clear(&self) {
        self.lock().clear();
        self.any.store(false, Ordering::Release);
    }

    /// The armed faults.
    pub(crate) fn list(&self) -> Vec<Fault> {
        self.lock().iter().map(|a| a.fault.clone()).collect()
    }

    /// The fault that hits a request of this leg, if any.
    pub(crate) fn draw(&self, leg: On) -> Option<FaultKind> {
        // Faults are rare and this is asked by every request.
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut armed = self.lock();
        let at = armed.iter_mut().position(|a| {
            a.fault.on.covers(leg)
                && (a.fault.probability >= 1.0 || a.words.unit() < a.fault.probability)
        })?;
        let hit = armed.get_mut(at)?;
        let kind = hit.fault.kind.clone();
        if let Times::Count(left) = &mut hit.fault.next {
            *left = left.saturating_sub(1);
            if *left == 0 {
                armed.remove(at);
            }
        }
        self.any.store(!armed.is_empty(), Ordering::Release);
        Some(kind)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Armed>> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counted_fault_is_gone_after_its_hits_and_misses_the_other_leg() {
        let table = FaultTable::default();
        assert!(table.arm(Fault::next(2, On::Prefill, FaultKind::BadJson)));
        assert_eq!(table.draw(On::Decode), None);
        assert_eq!(table.draw(On::Prefill), Some(FaultKind::BadJson));
        assert_eq!(table.draw(On::Prefill), Some(FaultKind::BadJson));
        assert_eq!(table.draw(On::Prefill), None);
        assert!(table.list().is_empty());
    }

    #[test]
    fn any_does_not_reach_scrapes() {
        let table = FaultTable::default();
        assert!(table.arm(Fault::every(On::Any, FaultKind::BadJson)));
        assert_eq!(table.draw(On::Scrape), None);
        assert_eq!(table.draw(On::Decode), Some(FaultKind::BadJson));
    }

    #[test]
    fn a_seeded_probability_repeats_and_hits_about_its_share() {
        let hits = |seed| {
            let table = FaultTable::default();
            let mut fault = Fault::every(On::Any, FaultKind::BadJson);
            fault.probability = 0.25;
            fault.seed = seed;
            assert!(table.arm(fault));
            (0..1000)
                .map(|_| table.draw(On::Decode).is_some())
                .collect::<Vec<_>>()
        };
        let first = hits(7);
        assert_eq!(first, hits(7));
        assert_ne!(first, hits(8));
        let share = first.iter().filter(|hit| **hit).count();
        assert!((200..300).contains(&share), "{share} of 1000");
    }

    #[test]
    fn the_json_of_a_fault_is_as_documented() {
        let text = r#"{"next":"all","on":"decode","probability":0.5,"seed":3,
            "kind":{"type":"reset_mid_stream","after_chunks":2,"how":"fin"}}"#;
        let fault: Fault = serde_json::from_str(text).unwrap();
        assert_eq!(fault.next, Times::All(Every::All));
        let kind = FaultKind::ResetMidStream {
            after_chunks: 2,
            how: Cut::Fin,
        };
        assert_eq!(fault.kind, kind);
        let short: Fault = serde_json::from_str(r#"{"kind":{"type":"bad_json"}}"#).unwrap();
        assert_eq!(short, Fault::next(1, On::Any, FaultKind::BadJson));
        assert!(serde_json::from_str::<Fault>(r#"{"kind":{"type":"bad"}}"#).is_err());
    }
}
