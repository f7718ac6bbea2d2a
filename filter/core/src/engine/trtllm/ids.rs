//! Ids by which the legs of a TensorRT-LLM request find each other.
//!
//! 41 bits of milliseconds since 2023, 10 bits of machine, 12 bits of counter, shifted beyond
//! 2^42, below which ids are a worker's own (AIBrix's layout). Of the counter, the top 5 bits name
//! the VM, so VMs of one process need not ask each other: 128 ids a millisecond each. VMs without
//! a name among the first 31 share the last name and a counter in the store.

use crate::FORMAT;
use crate::port::SharedStore;

/// 2023-01-01T00:00:00Z, in ms of the Unix clock.
const EPOCH_MS: u64 = 1_672_531_200_000;
/// Smaller ids are a worker's own.
const LEAST: u64 = 1 << 42;
/// Ids a name has per millisecond.
const PER_MS: u64 = 128;
/// Name shared by the VMs that have none of their own.
const SHARED_NAME: u64 = 31;
/// Most swaps tried before a random count is taken.
const MAX_SWAPS: u32 = 8;

/// The counter of one name: which millisecond, and how many of its ids are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    ms: u64,
    used: u64,
}

impl Tally {
    /// Takes an id of the present millisecond, or of the next one that has some left; a clock
    /// that goes back is not followed.
    fn take(self, now_ms: u64) -> Self {
        if now_ms > self.ms {
            Self {
                ms: now_ms,
                used: 1,
            }
        } else if self.used < PER_MS {
            Self {
                used: self.used.saturating_add(1),
                ..self
            }
        } else {
            Self {
                ms: self.ms.saturating_add(1),
                used: 1,
            }
        }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (ms, used) = bytes.split_first_chunk::<8>()?;
        Some(Self {
            ms: u64::from_le_bytes(*ms),
            used: u64::from_le_bytes(*used.first_chunk::<8>()?),
        })
    }

    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let (ms, used) = bytes.split_at_mut(8);
        ms.copy_from_slice(&self.ms.to_le_bytes());
        used.copy_from_slice(&self.used.to_le_bytes());
        bytes
    }
}

/// Makes ids.
#[derive(Debug, Default)]
pub struct DisaggIds {
    own: Tally,
}

impl DisaggIds {
    /// A fresh id. `slot` is the VM's place among all of the process, `machine` differs between
    /// processes that share workers, `word` is random.
    pub fn next(
        &mut self,
        store: &dyn SharedStore,
        slot: Option<u16>,
        machine: u64,
        unix_ms: u64,
        word: u64,
    ) -> u64 {
        let name = slot.map(u64::from).filter(|slot| *slot < SHARED_NAME);
        let tally = match name {
            Some(_) => {
                self.own = self.own.take(unix_ms);
                self.own
            }
            None => take_shared(store, unix_ms).unwrap_or(Tally {
                ms: unix_ms,
                used: word % PER_MS + 1,
            }),
        };
        let count = tally.used.saturating_sub(1) % PER_MS;
        let counter = name.unwrap_or(SHARED_NAME) * PER_MS + count;
        id(tally.ms, machine, counter)
    }
}

/// Takes the next id of the shared name; `None` when others were always faster.
fn take_shared(store: &dyn SharedStore, unix_ms: u64) -> Option<Tally> {
    let key = format!("pd{FORMAT}.trt-ids");
    for _ in 0..MAX_SWAPS {
        let stored = store.get(&key);
        let before = stored
            .as_ref()
            .and_then(|stored| Tally::parse(&stored.bytes));
        let taken = before.unwrap_or_default().take(unix_ms);
        let written = store.replace(&key, stored.as_ref(), &taken.bytes());
        if written.is_ok() {
            return Some(taken);
        }
    }
    None
}

/// The id of a millisecond, a machine and a counter.
fn id(unix_ms: u64, machine: u64, counter: u64) -> u64 {
    let ms = unix_ms.saturating_sub(EPOCH_MS).min((1 << 41) - 1);
    let raw = ms << 22 | (machine & 1023) << 12 | counter & 4095;
    raw % ((1 << 63) - 1 - LEAST) + LEAST
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::MemoryStore;
    use std::collections::HashSet;

    #[test]
    fn ids_have_the_published_layout() {
        for (now, machine, counter, expected) in [
            (1_672_531_200_000, 0, 0, 4_398_046_511_104),
            (1_672_531_200_001, 0, 0, 4_398_050_705_408),
            (1_767_225_600_000, 0, 0, 397_181_498_744_111_104),
            (1_767_225_600_000, 3, 5, 397_181_498_744_123_397),
            (1_767_225_600_000, 1023, 4095, 397_181_498_748_305_407),
            (1_767_225_600_000, 1023, 4096, 397_181_498_748_301_312),
        ] {
            assert_eq!(id(now, machine, counter), expected);
        }
        assert!(id(u64::MAX, 1023, 4095) < 1 << 63);
    }

    #[test]
    fn no_id_comes_twice_whatever_the_clock_and_the_slots_do() {
        let store = MemoryStore::default();
        let slots = [Some(0), Some(30), Some(31), Some(32), Some(255), None];
        let mut vms: Vec<_> = slots.map(|slot| (slot, DisaggIds::default())).into();
        let mut seen = HashSet::new();
        // A burst within a millisecond, a clock that goes back, time that goes on.
        let times = [5, 5, 5, 4, 5, 6, 2, 1000].map(|ms| 1_767_225_600_000 + ms);
        for now in times {
            for _ in 0..100 {
                for (slot, ids) in &mut vms {
                    assert!(seen.insert(ids.next(&store, *slot, 7, now, 0)));
                }
            }
        }
        assert_eq!(seen.len(), 8 * 100 * slots.len());
        assert!(seen.iter().all(|id| *id >= 1 << 42));
    }

    #[test]
    fn the_count_starts_again_each_millisecond_and_overflows_into_the_next() {
        let mut tally = Tally::default();
        for n in 1..=PER_MS {
            tally = tally.take(9);
            assert_eq!(tally, Tally { ms: 9, used: n });
        }
        assert_eq!(tally.take(9), Tally { ms: 10, used: 1 });
        assert_eq!(tally.take(10), Tally { ms: 10, used: 1 });
    }
}
