//! A store in memory with the compare-and-swap rules of Envoy's shared data.

use crate::port::{Cas, SharedStore, StoreError, Stored};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

type Rival = Box<dyn FnOnce(&MemoryStore)>;

/// Shared by all clones, as shared data is by all VMs. Versions are drawn from one counter, are
/// never zero, and a deleted key does not exist.
#[derive(Clone, Default)]
pub struct MemoryStore {
    inner: Rc<RefCell<Inner>>,
}

#[derive(Default)]
struct Inner {
    values: BTreeMap<String, Stored>,
    last_cas: u32,
    lose: BTreeMap<String, u32>,
    rivals: BTreeMap<String, Vec<Rival>>,
    refuse: bool,
    reads: u64,
    writes: u64,
}

// === impl MemoryStore ===

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the next `races` writes of a key lose.
    pub fn lose_swaps(&self, key: &str, races: u32) {
        self.inner.borrow_mut().lose.insert(key.to_owned(), races);
    }

    /// Lets `rival` run between the next read and write of a key; several run one per write, in
    /// the order they were given. The write after a rival that wrote the key is lost.
    pub fn interpose(&self, key: &str, rival: impl FnOnce(&MemoryStore) + 'static) {
        let mut inner = self.inner.borrow_mut();
        inner
            .rivals
            .entry(key.to_owned())
            .or_default()
            .push(Box::new(rival));
    }

    /// Makes the host refuse all writes, or accept them again.
    pub fn refuse(&self, refuse: bool) {
        self.inner.borrow_mut().refuse = refuse;
    }

    /// Writes without asking, as a broken program would.
    pub fn put(&self, key: &str, bytes: &[u8]) {
        self.inner.borrow_mut().store(key, bytes);
    }

    /// Keys written so far, sorted.
    pub fn keys(&self) -> Vec<String> {
        self.inner.borrow().values.keys().cloned().collect()
    }

    /// Reads and successful writes so far.
    pub fn calls(&self) -> (u64, u64) {
        let inner = self.inner.borrow();
        (inner.reads, inner.writes)
    }

    fn write(&self, key: &str, bytes: &[u8], expected: Option<Cas>) -> Result<(), StoreError> {
        let rival = {
            let mut inner = self.inner.borrow_mut();
            inner
                .rivals
                .get_mut(key)
                .filter(|queue| !queue.is_empty())
                .map(|queue| queue.remove(0))
        };
        if let Some(rival) = rival {
            rival(self);
        }
        let mut inner = self.inner.borrow_mut();
        if inner.refuse {
            return Err(StoreError::Refused);
        }
        if let Some(races) = inner.lose.get_mut(key).filter(|races| **races > 0) {
            *races = races.saturating_sub(1);
            return Err(StoreError::Raced);
        }
        let found = inner.values.get(key).map(|stored| stored.cas);
        // Envoy ignores the version of a key that does not exist.
        if found.is_some() && found != expected {
            return Err(StoreError::Raced);
        }
        inner.store(key, bytes);
        Ok(())
    }
}

impl SharedStore for MemoryStore {
    fn get(&self, key: &str) -> Option<Stored> {
        let mut inner = self.inner.borrow_mut();
        inner.reads = inner.reads.saturating_add(1);
        inner.values.get(key).cloned()
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.write(key, bytes, None)
    }

    fn swap(&self, key: &str, bytes: &[u8], cas: Cas) -> Result<(), StoreError> {
        self.write(key, bytes, Some(cas))
    }
}

// === impl Inner ===

impl Inner {
    fn store(&mut self, key: &str, bytes: &[u8]) {
        self.last_cas = self.last_cas.wrapping_add(1).max(1);
        self.writes = self.writes.saturating_add(1);
        let stored = Stored {
            bytes: bytes.to_vec(),
            cas: Cas(self.last_cas),
        };
        self.values.insert(key.to_owned(), stored);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_wins_once_and_a_create_never_overwrites() {
        let store = MemoryStore::new();
        assert_eq!(store.create("k", b"1"), Ok(()));
        assert_eq!(store.create("k", b"2"), Err(StoreError::Raced));
        let read = store.get("k").unwrap();
        assert_eq!(store.swap("k", b"3", read.cas), Ok(()));
        assert_eq!(store.swap("k", b"4", read.cas), Err(StoreError::Raced));
        assert_eq!(store.get("k").unwrap().bytes, b"3");
    }

    #[test]
    fn a_rival_runs_between_read_and_write() {
        let store = MemoryStore::new();
        store.put("k", b"1");
        store.interpose("k", |store| store.put("k", b"rival"));
        let read = store.get("k").unwrap();
        assert_eq!(store.swap("k", b"2", read.cas), Err(StoreError::Raced));
        assert_eq!(store.get("k").unwrap().bytes, b"rival");
    }
}
