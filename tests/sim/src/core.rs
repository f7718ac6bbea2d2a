//! What every engine has whatever protocol it speaks: pace, faults, log, counters, life and death.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::config::{EngineConfig, Pace};
use crate::fault::FaultTable;
use crate::journal::Journal;
use crate::state::Held;

/// Deaths remembered.
const MOST_DEATHS: usize = 64;

/// The protocol-independent part of an engine.
pub(crate) struct Core {
    pub(crate) config: EngineConfig,
    pub(crate) faults: FaultTable,
    pub(crate) journal: Journal,
    pub(crate) counters: Counters,
    pub(crate) words: Words,
    pub(crate) gate: watch::Sender<Gate>,
    pace: RwLock<Pace>,
    deaths: Mutex<Vec<Death>>,
}

/// Whether the engine listens, and which connections may live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gate {
    pub(crate) open: bool,
    /// Connections accepted under an older epoch are reset.
    pub(crate) epoch: u64,
    /// The engine is going away for good.
    pub(crate) stopped: bool,
}

/// An engine's end, which a test caused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    /// What the engine died of.
    pub cause: String,
    /// When, in Unix milliseconds.
    pub unix_ms: u64,
}

/// A number that requests move.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

/// Counts something while it lasts.
pub(crate) struct Within<'a>(&'a Count);

/// Counts of requests and connections.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) requests_total: Count,
    pub(crate) running: Count,
    pub(crate) waiting: Count,
    pub(crate) aborted: Count,
    pub(crate) connections_open: Count,
    pub(crate) connections_total: Count,
}

/// A stream of pseudo-random words shared by threads: splitmix64 over an atomic counter.
pub(crate) struct Words(AtomicU64);

// === impl Core ===

impl Core {
    pub(crate) fn new(config: EngineConfig, journal: Journal) -> Arc<Self> {
        let gate = Gate {
            open: true,
            epoch: 0,
            stopped: false,
        };
        Arc::new(Self {
            faults: FaultTable::default(),
            journal,
            counters: Counters::default(),
            words: Words::seeded(uuid::Uuid::new_v4().as_u64_pair().0),
            gate: watch::Sender::new(gate),
            pace: RwLock::new(config.pace()),
            deaths: Mutex::default(),
            config,
        })
    }

    /// The current delays.
    pub(crate) fn pace(&self) -> Pace {
        *self.pace.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is held now; the protocol knows of KV and rooms.
    pub(crate) fn held(&self, kv_held: u64, rooms_open: u64) -> Held {
        Held {
            running: self.counters.running.get(),
            waiting: self.counters.waiting.get(),
            kv_held,
            rooms_open,
        }
    }

    /// Takes the time to compute a prompt of this many bytes.
    pub(crate) async fn compute(&self, prompt_bytes: usize) {
        let time = self.pace().prefill(prompt_bytes);
        if !time.is_zero() {
            tokio::time::sleep(time).await;
        }
    }

    /// Sets the delays.
    pub(crate) fn set_pace(&self, pace: Pace) {
        *self.pace.write().unwrap_or_else(PoisonError::into_inner) = pace;
    }

    /// Closes the port; also resets every connection unless `keep_open`.
    pub(crate) fn refuse(&self, keep_open: bool) {
        self.gate.send_modify(|gate| {
            gate.open = false;
            if !keep_open {
                gate.epoch = gate.epoch.wrapping_add(1);
            }
        });
    }

    /// Opens the port again.
    pub(crate) fn resume(&self) {
        self.gate.send_modify(|gate| gate.open = true);
    }

    /// Closes everything for good.
    pub(crate) fn stop(&self) {
        self.gate.send_modify(|gate| {
            gate.open = false;
            gate.stopped = true;
            gate.epoch = gate.epoch.wrapping_add(1);
        });
    }

    /// The engine process ends: port closed, connections reset.
    pub(crate) fn die(&self, cause: &str) {
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        if deaths.len() < MOST_DEATHS {
            deaths.push(Death {
                cause: cause.to_owned(),
                unix_ms: unix_ms(),
            });
        }
        drop(deaths);
        self.refuse(false);
    }

    /// The deaths so far.
    pub(crate) fn deaths(&self) -> Vec<Death> {
        let deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.clone()
    }

    /// Zeroes what counts events; gauges stay.
    pub(crate) fn reset_counters(&self) {
        self.counters.requests_total.reset();
        self.counters.aborted.reset();
        self.counters.connections_total.reset();
        let mut deaths = self.deaths.lock().unwrap_or_else(PoisonError::into_inner);
        deaths.clear();
    }
}

// === impl Count ===

impl Count {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn up(&self) {
        self.add(1);
    }

    pub(crate) fn down(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Up now, down when dropped.
    pub(crate) fn within(&self) -> Within<'_> {
        self.up();
        Within(self)
    }

    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.down();
    }
}

// === impl Words ===

impl Words {
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// The next word.
    pub(crate) fn next(&self) -> u64 {
        const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self
            .0
            .fetch_add(GAMMA, Ordering::Relaxed)
            .wrapping_add(GAMMA);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next word as a number of [0, 1).
    pub(crate) fn unit(&self) -> f64 {
        // 53 bits are what a double holds exactly.
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Now, in Unix milliseconds.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or(Duration::ZERO).as_millis()).unwrap_or(u64::MAX)
}
