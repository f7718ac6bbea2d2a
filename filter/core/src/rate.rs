//! `requestsPerSecond` of a profile, counted over all VMs of this Envoy.
//!
//! As in AIBrix requests are counted per model in fixed windows, those alone whose profile sets a
//! limit, and each is judged by the limit of its own profile. Every replica of the gateway enforces
//! its share, limit / replicas. A share that is no whole number of requests is exact over time:
//! window `k` takes `⌊(k+1)·l·share⌋ − ⌊k·l·share⌋` requests. A window lasts `l = 1` second, or, when
//! the share is below one request a second, as many as it takes to come to one: a share that was
//! rounded down would refuse everything, one rounded up would multiply the limit.
//!
//! One record per model, `pd{format}.rate.{slot}`: format `u8`, start of the window in seconds of the
//! shared clock `u64`, requests admitted in it `u32`. It is written by compare-and-swap. A VM that
//! loses [`MAX_TRIES`] races judges by what it read last and what it admitted unwritten, and writes
//! that with its next request, so a lost race loses no count. During an upgrade the two formats
//! count apart.

use crate::FORMAT;
use crate::port::{SharedStore, StoreError};
use std::collections::BTreeMap;

/// Attempts to write a count.
const MAX_TRIES: u32 = 8;
/// Bytes of a record.
const RECORD: usize = 13;

/// Limit of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Requests per second over all replicas, above 0.
    pub per_second: u32,
    /// Live replicas of the gateway.
    pub replicas: u32,
}

/// A request that was counted, so that it can be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    slot: u16,
    start_s: u64,
}

/// The limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Time until the next window, in seconds, at least 1.
    pub retry_after_s: u64,
}

/// What one VM has counted and not written, by model. Bounded by the number of ledger slots.
#[derive(Debug, Default)]
pub struct RateCounts {
    unwritten: BTreeMap<u16, Unwritten>,
}

/// Requests of one window that the record lacks; negative when some were given back.
#[derive(Clone, Copy, Debug, Default)]
struct Unwritten {
    start_s: u64,
    requests: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    start_s: u64,
    length_s: u64,
    quota: i64,
}

// === impl RateCounts ===

impl RateCounts {
    /// Counts a request of the model with this ledger slot, if its window takes one more.
    ///
    /// # Errors
    /// The window is full.
    pub fn admit<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        slot: u16,
        limit: RateLimit,
        now_ms: u64,
    ) -> Result<Admission, Refused> {
        let key = format!("pd{FORMAT}.rate.{slot}");
        let mut tries = 0;
        loop {
            let stored = store.get(&key);
            let mut window = Window::at(limit, now_ms / 1000);
            let mut admitted = 0;
            if let Some((start_s, count)) = stored.as_ref().and_then(|stored| read(&stored.bytes)) {
                // Of the next window: another VM read the clock a moment later.
                if start_s == window.start_s.saturating_add(window.length_s) {
                    window = Window::at(limit, start_s);
                }
                if start_s == window.start_s {
                    admitted = i64::from(count);
                }
            }
            let own = self.unwritten.entry(slot).or_default();
            if own.start_s != window.start_s {
                *own = Unwritten {
                    start_s: window.start_s,
                    requests: 0,
                };
            }
            let with_own = admitted.saturating_add(own.requests);
            if with_own >= window.quota {
                return Err(window.refusal(now_ms));
            }
            let admission = Admission {
                slot,
                start_s: window.start_s,
            };
            let bytes = record(window.start_s, with_own.saturating_add(1));
            let written = store.replace(&key, stored.as_ref(), &bytes);
            tries += 1;
            match written {
                Ok(()) => own.requests = 0,
                Err(StoreError::Raced) if tries < MAX_TRIES => continue,
                Err(StoreError::Raced | StoreError::Refused) => {
                    own.requests = own.requests.saturating_add(1);
                }
            }
            return Ok(admission);
        }
    }

    /// Takes back a request that no pod could serve. Nothing happens once its window is over.
    pub fn give_back(&mut self, admission: Admission) {
        if let Some(own) = self.unwritten.get_mut(&admission.slot)
            && own.start_s == admission.start_s
        {
            own.requests = own.requests.saturating_sub(1);
        }
    }
}

// === impl Window ===

impl Window {
    /// The window that this second lies in.
    fn at(limit: RateLimit, second: u64) -> Self {
        let rate = u64::from(limit.per_second.max(1));
        let replicas = u64::from(limit.replicas.max(1));
        let length_s = replicas.div_ceil(rate);
        let start_s = second - second % length_s;
        let taken_until =
            |second: u64| u128::from(second) * u128::from(rate) / u128::from(replicas);
        let end_s = start_s.saturating_add(length_s);
        let quota = taken_until(end_s).saturating_sub(taken_until(start_s));
        Self {
            start_s,
            length_s,
            quota: i64::try_from(quota).unwrap_or(i64::MAX),
        }
    }

    fn refusal(&self, now_ms: u64) -> Refused {
        let end_ms = self
            .start_s
            .saturating_add(self.length_s)
            .saturating_mul(1000);
        Refused {
            retry_after_s: end_ms.saturating_sub(now_ms).div_ceil(1000).max(1),
        }
    }
}

fn record(start_s: u64, count: i64) -> [u8; RECORD] {
    let mut out = [FORMAT; RECORD];
    let count = u32::try_from(count.max(0)).unwrap_or(u32::MAX);
    let values = start_s.to_le_bytes().into_iter().chain(count.to_le_bytes());
    for (place, byte) in out.iter_mut().skip(1).zip(values) {
        *place = byte;
    }
    out
}

/// Window start and count; `None` when the record is damaged or of another format.
fn read(bytes: &[u8]) -> Option<(u64, u32)> {
    let (format, rest) = bytes.split_first()?;
    let (start_s, count) = rest.split_first_chunk()?;
    let count = count.try_into().ok()?;
    (*format == FORMAT).then_some((u64::from_le_bytes(*start_s), u32::from_le_bytes(count)))
}

#[cfg(test)]
mod tests;
