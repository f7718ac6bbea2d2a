//! One VM loads a tokenizer at a time, and a file that killed a VM is not loaded again.
//!
//! The lease is format `u8`, holder `u32` (0 = nobody), turn `u32`, digest of the file in hand
//! `u64`, then the digests of files that VMs died of, little endian. Loading happens within one
//! tick, so a holder is never seen twice by an observer that ticks on unless it takes very long
//! or is dead; time is counted in the observer's own ticks, as for heartbeats.

use crate::FORMAT;
use crate::ledger::record::{u32_at, u64_at};
use crate::port::{SharedStore, StoreError, Stored};
use pd_wire::tokenizer::MAX_TOKENIZERS;

/// Own ticks after which a holder that did not change counts as dead (10 s at 100 ms).
pub(super) const DEAD_AFTER: u16 = 100;
/// Most tries to give the lease back.
const MAX_TRIES: u32 = 8;
/// Bytes before the digests of deadly files.
const HEAD: usize = 17;

/// What one VM knows of the lease.
#[derive(Debug, Default)]
pub(super) struct Lease {
    seen: (u32, u32),
    still: u16,
}

/// Answer to a request for the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    /// It is this VM's: load, then give it back.
    Taken,
    /// Another VM loads; ask again at the next tick.
    Busy,
    /// A VM died while it loaded this file.
    Deadly,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Record {
    holder: u32,
    turn: u32,
    digest: u64,
    deadly: Vec<u64>,
}

// === impl Lease ===

impl Lease {
    /// Asks for the lease to load a file; once per tick. `own` names this VM and is not 0.
    pub(super) fn take<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        own: u32,
        digest: u64,
    ) -> Grant {
        let stored = store.get(&key());
        let record = Record::read(stored.as_ref());
        if record.deadly.contains(&digest) {
            return Grant::Deadly;
        }
        let next = if record.holder == 0 || record.holder == own {
            Record {
                holder: own,
                turn: record.turn.wrapping_add(1),
                digest,
                ..record
            }
        } else if self.is_dead(&record) {
            record.freed_of_the_dead()
        } else {
            return Grant::Busy;
        };
        let is_own = next.holder == own;
        match next.write(store, stored.as_ref()) {
            Ok(()) if is_own => Grant::Taken,
            Ok(()) | Err(_) => Grant::Busy,
        }
    }

    /// Done, well or badly.
    pub(super) fn give_back<S: SharedStore + ?Sized>(store: &S, own: u32) {
        for _ in 0..MAX_TRIES {
            let stored = store.get(&key());
            let record = Record::read(stored.as_ref());
            if record.holder != own {
                return;
            }
            let free = Record {
                holder: 0,
                ..record
            };
            if free.write(store, stored.as_ref()) != Err(StoreError::Raced) {
                return;
            }
        }
    }

    fn is_dead(&mut self, record: &Record) -> bool {
        let now = (record.holder, record.turn);
        self.still = if self.seen == now {
            self.still.saturating_add(1)
        } else {
            0
        };
        self.seen = now;
        self.still >= DEAD_AFTER
    }
}

// === impl Record ===

impl Record {
    /// A record that cannot be read is as good as none.
    fn read(stored: Option<&Stored>) -> Self {
        let record = stored.map_or(&[][..], |stored| &stored.bytes);
        let Some((head, deadly)) = record.split_at_checked(HEAD) else {
            return Self::default();
        };
        if head.first() != Some(&FORMAT) {
            return Self::default();
        }
        Self {
            holder: u32_at(head, 1),
            turn: u32_at(head, 5),
            digest: u64_at(head, 9),
            deadly: deadly.chunks_exact(8).map(|raw| u64_at(raw, 0)).collect(),
        }
    }

    /// The holder's file is not touched again; as many are remembered as can be held.
    fn freed_of_the_dead(mut self) -> Self {
        self.holder = 0;
        self.deadly.insert(0, self.digest);
        self.deadly.truncate(MAX_TOKENIZERS);
        self
    }

    fn write<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        stored: Option<&Stored>,
    ) -> Result<(), StoreError> {
        let mut out = vec![FORMAT];
        out.extend_from_slice(&self.holder.to_le_bytes());
        out.extend_from_slice(&self.turn.to_le_bytes());
        for word in std::iter::once(&self.digest).chain(&self.deadly) {
            out.extend_from_slice(&word.to_le_bytes());
        }
        store.replace(&key(), stored, &out)
    }
}

fn key() -> String {
    format!("pd{FORMAT}.tokenizer.loading")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::MemoryStore;

    #[test]
    fn one_vm_at_a_time() {
        let store = MemoryStore::new();
        let (mut one, mut two) = (Lease::default(), Lease::default());
        assert_eq!(one.take(&store, 1, 7), Grant::Taken);
        assert_eq!(two.take(&store, 2, 7), Grant::Busy);
        Lease::give_back(&store, 2);
        assert_eq!(
            two.take(&store, 2, 7),
            Grant::Busy,
            "not the other one's to give back"
        );
        store.lose_swaps(&key(), MAX_TRIES - 1);
        Lease::give_back(&store, 1);
        assert_eq!(two.take(&store, 2, 7), Grant::Taken);
        // Lost on the way back: the holder finds it again.
        assert_eq!(two.take(&store, 2, 8), Grant::Taken);
        store.refuse(true);
        assert_eq!(one.take(&store, 1, 7), Grant::Busy);
    }

    #[test]
    fn a_raced_lease_goes_to_one() {
        let store = MemoryStore::new();
        store.interpose(&key(), |store| {
            assert_eq!(Lease::default().take(store, 2, 7), Grant::Taken);
        });
        assert_eq!(Lease::default().take(&store, 1, 7), Grant::Busy);
    }

    #[test]
    fn a_file_that_a_vm_died_of_is_not_loaded_again() {
        let store = MemoryStore::new();
        assert_eq!(Lease::default().take(&store, 1, 7), Grant::Taken);
        let mut two = Lease::default();
        for _ in 0..=DEAD_AFTER {
            assert_eq!(two.take(&store, 2, 8), Grant::Busy);
        }
        // The dead one is out; its file is remembered, others are loaded.
        assert_eq!(two.take(&store, 2, 7), Grant::Deadly);
        assert_eq!(two.take(&store, 2, 8), Grant::Taken);
        Lease::give_back(&store, 2);
        assert_eq!(Lease::default().take(&store, 3, 7), Grant::Deadly);
    }

    #[test]
    fn a_vm_that_loads_one_file_after_the_other_is_not_dead() {
        let store = MemoryStore::new();
        let (mut one, mut two) = (Lease::default(), Lease::default());
        for digest in 0..u64::from(DEAD_AFTER) * 2 {
            assert_eq!(one.take(&store, 1, digest), Grant::Taken);
            assert_eq!(two.take(&store, 2, 9), Grant::Busy);
        }
    }

    #[test]
    fn an_unreadable_lease_is_free() {
        let store = MemoryStore::new();
        for bytes in [&[][..], &[9; 40], &[FORMAT; 5]] {
            store.put(&key(), bytes);
            assert_eq!(Lease::default().take(&store, 1, 7), Grant::Taken);
            Lease::give_back(&store, 1);
        }
    }

    #[test]
    fn as_many_deadly_files_are_remembered_as_can_be_held() {
        let mut record = Record::default();
        for digest in 0..20 {
            record.digest = digest;
            record = record.freed_of_the_dead();
        }
        assert_eq!(record.deadly, [19, 18, 17, 16, 15, 14, 13, 12]);
    }
}
