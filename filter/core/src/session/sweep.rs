//! The once-a-minute round over the session table: what is too old goes, what is left is counted.
//!
//! Lookups never return what is too old, so a round that comes late is only late memory. Some
//! buckets are read at every tick, so that no request waits for a round.

use super::bucket::swept;
use super::{bucket_key, buckets, seconds};
use crate::FORMAT;
use crate::port::SharedStore;

/// Time between the beginnings of two rounds, in ms.
const ROUND_MS: u64 = 60_000;
/// Buckets read at a tick: a table of 100,000 sessions takes 5 s, one of 10 million 8 minutes.
const BUCKETS_PER_TICK: u64 = 32;

/// Where the round is. The VM that sweeps is the only one to need it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sweep {
    /// When the last round began.
    began_ms: Option<u64>,
    /// Next bucket of the round; none between rounds.
    next: Option<u64>,
    /// Sessions counted in this round.
    counted: u64,
    /// Most buckets there were: a table that became smaller leaves some behind.
    most_buckets: u64,
}

// === impl Sweep ===

impl Sweep {
    /// Goes on with the round, or begins one when it is time. Call at every tick of one VM.
    pub fn tick<S: SharedStore + ?Sized>(&mut self, store: &S, max_sessions: u64, now_ms: u64) {
        let mut next = match self.next {
            Some(next) => next,
            None if self.is_time(now_ms) => {
                self.began_ms = Some(now_ms);
                self.counted = 0;
                0
            }
            None => return,
        };
        let reached = buckets(max_sessions);
        self.most_buckets = self.most_buckets.max(reached);
        let end = next.saturating_add(BUCKETS_PER_TICK).min(self.most_buckets);
        while next < end {
            let live = sweep(store, next, seconds(now_ms));
            // Nothing is found any more in a bucket that was left behind.
            if next < reached {
                self.counted = self.counted.saturating_add(live);
            }
            next = next.saturating_add(1);
        }
        self.next = (next < self.most_buckets).then_some(next);
        if self.next.is_none() {
            publish(store, self.counted);
        }
    }

    fn is_time(&self, now_ms: u64) -> bool {
        self.began_ms
            .is_none_or(|began_ms| now_ms.saturating_sub(began_ms) >= ROUND_MS)
    }
}

/// Sessions remembered at the end of the last round.
pub fn remembered<S: SharedStore + ?Sized>(store: &S) -> u64 {
    store
        .get(&count_key())
        .and_then(|stored| Some(u64::from_le_bytes(stored.bytes.try_into().ok()?)))
        .unwrap_or(0)
}

/// Sweeps one bucket and counts what is left.
fn sweep<S: SharedStore + ?Sized>(store: &S, bucket: u64, now_s: u32) -> u64 {
    let key = bucket_key(bucket);
    let Some(stored) = store.get(&key) else {
        return 0;
    };
    let (live, smaller) = swept(&stored.bytes, now_s);
    if let Some(smaller) = smaller {
        // Lost to a turn, which drops what is too old itself.
        let _written = store.swap(&key, &smaller, stored.cas);
    }
    u64::try_from(live).unwrap_or(u64::MAX)
}

fn publish<S: SharedStore + ?Sized>(store: &S, counted: u64) {
    let key = count_key();
    let bytes = counted.to_le_bytes();
    // A count that is lost comes again with the next round.
    let _written = match store.get(&key) {
        Some(stored) if stored.bytes == bytes => Ok(()),
        Some(stored) => store.swap(&key, &bytes, stored.cas),
        None if counted == 0 => Ok(()),
        None => store.create(&key, &bytes),
    };
}

fn count_key() -> String {
    format!("pd{FORMAT}.sessions")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::SessionTable;
    use crate::testkit::MemoryStore;

    const MAX: u64 = 5_000;

    fn fill(store: &MemoryStore, sessions: u64, ttl_ms: u64, now_ms: u64) {
        let table = SessionTable::new(MAX, ttl_ms);
        for session in 0..sessions {
            let turn = table.recall(store, "m", session, now_ms);
            assert!(table.remember(store, turn, 1, now_ms));
        }
    }

    fn round(sweep: &mut Sweep, store: &MemoryStore, now_ms: u64) {
        for tick in 0..buckets(MAX).div_ceil(BUCKETS_PER_TICK) {
            sweep.tick(store, MAX, now_ms + tick * 100);
        }
    }

    #[test]
    fn a_round_counts_what_is_remembered_and_forgets_the_rest() {
        let store = MemoryStore::new();
        fill(&store, 2_000, 30_000, 0);
        fill(&store, 500, 200_000, 0);
        let mut sweep = Sweep::default();
        round(&mut sweep, &store, 10_000);
        assert_eq!(remembered(&store), 2_000);
        let bytes = |store: &MemoryStore| -> usize {
            let keys = store.keys();
            let buckets = keys.iter().filter(|key| key.contains(".session."));
            buckets.map(|key| store.get(key).unwrap().bytes.len()).sum()
        };
        let before = bytes(&store);
        round(&mut sweep, &store, 70_000);
        assert_eq!(remembered(&store), 500);
        assert_eq!(before - bytes(&store), 1_500 * 16);
        round(&mut sweep, &store, 300_000);
        assert_eq!(remembered(&store), 0);
    }

    #[test]
    fn a_tick_reads_a_bounded_number_of_buckets_and_none_between_rounds() {
        let store = MemoryStore::new();
        let mut sweep = Sweep::default();
        let reads = |sweep: &mut Sweep, now_ms| {
            let before = store.calls();
            sweep.tick(&store, MAX, now_ms);
            let after = store.calls();
            assert_eq!(after.1, before.1, "nothing is written for an empty table");
            after.0 - before.0
        };
        assert_eq!(buckets(MAX), 79);
        assert_eq!(reads(&mut sweep, 1_000), 32);
        assert_eq!(reads(&mut sweep, 1_100), 32);
        // The rest, and the count.
        assert_eq!(reads(&mut sweep, 1_200), 15 + 1);
        assert_eq!(reads(&mut sweep, 1_300), 0);
        assert_eq!(reads(&mut sweep, 60_999), 0);
        assert_eq!(reads(&mut sweep, 61_000), 32);
    }

    #[test]
    fn buckets_that_a_smaller_table_left_behind_are_emptied_and_not_counted() {
        let store = MemoryStore::new();
        fill(&store, 3_000, 100_000, 0);
        let mut sweep = Sweep::default();
        round(&mut sweep, &store, 0);
        for tick in 0..3 {
            sweep.tick(&store, 64, 60_000 + tick * 100);
        }
        assert!(remembered(&store) <= 64, "{}", remembered(&store));
        for tick in 0..3 {
            sweep.tick(&store, 64, 120_000 + tick * 100);
        }
        assert_eq!(remembered(&store), 0);
        for key in store.keys().iter().filter(|key| key.contains(".session.")) {
            assert_eq!(store.get(key).unwrap().bytes, [FORMAT]);
        }
    }
}
