//! The KV cache of one engine: blocks, what was written into them, and prefilled KV under lease.
//!
//! Block 0 is reserved, as in vLLM (the other engines' caches are of one block less, too). Freed blocks are reused in the order they were freed, so a
//! stale hand-over reads what was written since; [`Content`] says what that is.
//! Invariant: a block is free, owned by one [`Allocation`], or owned by one held entry.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// Blocks and leases of one engine.
pub(crate) struct KvCache {
    inner: Mutex<Inner>,
    /// One permit per free block; requests wait here in order when the cache is full.
    room: Semaphore,
    lease_changed: Notify,
    block_size: u32,
    capacity: u32,
}

struct Inner {
    free: VecDeque<u32>,
    /// Prompt hash last written into each block.
    written: Vec<u64>,
    held: HashMap<Arc<str>, Held>,
    deadlines: BTreeMap<Deadline, Arc<str>>,
    held_blocks: u64,
    sequence: u64,
}

struct Held {
    blocks: Vec<u32>,
    deadline: Deadline,
}

/// When a lease ends; the number keeps equal times apart.
type Deadline = (Instant, u64);

/// Blocks of a running sequence; given back when dropped.
pub(crate) struct Allocation {
    cache: Arc<KvCache>,
    blocks: Vec<u32>,
}

/// What blocks hold: the hash of the one prompt in them, or `None` for a mixture.
pub(crate) type Content = Option<u64>;

/// How a decode engine's claim on KV ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The KV was held and is free now.
    Freed(Content),
    /// Nothing is held under that id; the blocks hold whatever they hold.
    Unknown(Content),
    /// A block id is outside the cache.
    OutOfRange,
}

// === impl KvCache ===

impl KvCache {
    pub(crate) fn new(num_blocks: u32, block_size: u32) -> Arc<Self> {
        let capacity = num_blocks.saturating_sub(1);
        let inner = Inner {
            free: (1..num_blocks).collect(),
            written: (0..num_blocks).map(|_| 0).collect(),
            held: HashMap::new(),
            deadlines: BTreeMap::new(),
            held_blocks: 0,
            sequence: 0,
        };
        Arc::new(Self {
            inner: Mutex::new(inner),
            room: Semaphore::new(capacity as usize),
            lease_changed: Notify::new(),
            block_size,
            capacity,
        })
    }

    /// Blocks a prompt needs.
    pub(crate) fn blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size).max(1)
    }

    /// Blocks that can be used.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks at once, if there is room and nobody waits.
    pub(crate) fn try_allocate(self: &Arc<Self>, blocks: u32, prompt: u64) -> Option<Allocation> {
        self.room.try_acquire_many(blocks).ok()?.forget();
        Some(self.assign(blocks, prompt))
    }

    /// Blocks, when there is room. More than the capacity would wait for ever.
    pub(crate) async fn allocate(self: &Arc<Self>, blocks: u32, prompt: u64) -> Allocation {
        // The semaphore is never closed.
        if let Ok(permits) = self.room.acquire_many(blocks).await {
            permits.forget();
        }
        self.assign(blocks, prompt)
    }

    fn assign(self: &Arc<Self>, blocks: u32, prompt: u64) -> Allocation {
        let mut inner = self.lock();
        let count = (blocks as usize).min(inner.free.len());
        let blocks: Vec<u32> = inner.free.drain(..count).collect();
        for block in &blocks {
            if let Some(written) = inner.written.get_mut(*block as usize) {
                *written = prompt;
            }
        }
        drop(inner);
        Allocation {
            cache: Arc::clone(self),
            blocks,
        }
    }

    /// Holds blocks under an id until claimed or the lease ends.
    pub(crate) fn hold(&self, id: &str, mut allocation: Allocation, lease: Duration) {
        let blocks = std::mem::take(&mut allocation.blocks);
        let id: Arc<str> = Arc::from(id);
        let mut inner = self.lock();
        inner.sequence = inner.sequence.wrapping_add(1);
        let deadline = (Instant::now() + lease, inner.sequence);
        inner.held_blocks = inner.held_blocks.saturating_add(blocks.len() as u64);
        inner.deadlines.insert(deadline, Arc::clone(&id));
        let replaced = inner.held.insert(id, Held { blocks, deadline });
        // Ids end in random digits, so this is all but impossible.
        let freed = replaced.map(|held| inner.release(held));
        drop(inner);
        self.room.add_permits(freed.unwrap_or(0));
    }

    /// A decode engine takes the KV of `id`, believing it to be in `blocks`.
    pub(crate) fn claim(&self, id: &str, blocks: &[u32]) -> Claim {
        let mut inner = self.lock();
        let cache = inner.written.len();
        if blocks.iter().any(|block| *block as usize >= cache) {
            return Claim::OutOfRange;
        }
        let content = inner.content(blocks);
        let Some(held) = inner.held.remove(id) else {
            return Claim::Unknown(content);
        };
        let freed = inner.release(held);
        drop(inner);
        self.room.add_permits(freed);
        Claim::Freed(content)
    }

    /// A decode engine takes the KV of `id`, which knows no blocks; `None` when nothing is held.
    pub(crate) fn take(&self, id: &str) -> Option<Content> {
        let mut inner = self.lock();
        let held = inner.held.remove(id)?;
        let content = inner.content(&held.blocks);
        let freed = inner.release(held);
        drop(inner);
        self.room.add_permits(freed);
        Some(content)
    }

    /// Whether KV is held under `id`.
    pub(crate) fn holds(&self, id: &str) -> bool {
        self.lock().held.contains_key(id)
    }

    /// Starts the lease of `id` anew.
    pub(crate) fn renew(&self, id: &str, lease: Duration) {
        let mut inner = self.lock();
        inner.sequence = inner.sequence.wrapping_add(1);
        let deadline = (Instant::now() + lease, inner.sequence);
        let Some(held) = inner.held.get_mut(id) else {
            return;
        };
        let old = std::mem::replace(&mut held.deadline, deadline);
        if let Some(id) = inner.deadlines.remove(&old) {
            inner.deadlines.insert(deadline, id);
        }
    }

    /// Frees everything held; running requests keep theirs.
    pub(crate) fn clear(&self) {
        let mut inner = self.lock();
        let held = std::mem::take(&mut inner.held);
        let freed = held.into_values().map(|held| inner.release(held)).sum();
        drop(inner);
        self.room.add_permits(freed);
    }

    /// Frees what is overdue; returns how many entries that were, and the next deadline.
    fn expire(&self) -> (u64, Option<Instant>) {
        let now = Instant::now();
        let mut inner = self.lock();
        let (mut count, mut freed) = (0u64, 0usize);
        while let Some(entry) = inner.deadlines.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let id = entry.remove();
            if let Some(held) = inner.held.remove(&id) {
                count = count.saturating_add(1);
                freed = freed.saturating_add(inner.release(held));
            }
        }
        let next = inner.deadlines.first_key_value().map(|(at, _)| at.0);
        drop(inner);
        self.room.add_permits(freed);
        (count, next)
    }

    /// Frees overdue entries as they fall due and reports their number, for ever.
    pub(crate) async fn expire_all(&self, lease: impl Fn() -> Duration, expired: impl Fn(u64)) {
        loop {
            let (count, next) = self.expire();
            if count > 0 {
                expired(count);
            }
            // What is held from now on ends no earlier than one lease from now.
            let soonest = Instant::now() + lease();
            let next = next.map_or(soonest, |next| next.min(soonest));
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.lease_changed.notified() => {}
            }
        }
    }

    /// Leases may be shorter from now on.
    pub(crate) fn lease_changed(&self) {
        self.lease_changed.notify_one();
    }

    /// Entries held, their blocks, and all blocks in use.
    pub(crate) fn usage(&self) -> (u64, u64, u64) {
        let inner = self.lock();
        let used = u64::from(self.capacity).saturating_sub(inner.free.len() as u64);
        (inner.held.len() as u64, inner.held_blocks, used)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Inner ===

impl Inner {
    /// What these blocks hold.
    fn content(&self, blocks: &[u32]) -> Content {
        let mut written = blocks
            .iter()
            .map(|block| self.written.get(*block as usize).copied());
        let first = written.next()??;
        written.all(|next| next == Some(first)).then_some(first)
    }

    /// Frees the blocks of an entry that left `held`; the caller adds the permits.
    fn release(&mut self, held: Held) -> usize {
        self.deadlines.remove(&held.deadline);
        let count = held.blocks.len();
        self.held_blocks = self.held_blocks.saturating_sub(count as u64);
        self.free.extend(held.blocks);
        count
    }
}

// === impl Allocation ===

impl Allocation {
    /// The blocks.
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    /// The first `count` blocks as an allocation of their own.
    pub(crate) fn split(&mut self, count: u32) -> Self {
        let rest = self
            .blocks
            .split_off((count as usize).min(self.blocks.len()));
        Self {
            cache: Arc::clone(&self.cache),
            blocks: std::mem::replace(&mut self.blocks, rest),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let blocks = std::mem::take(&mut self.blocks);
        let count = blocks.len();
        self.cache.lock().free.extend(blocks);
        self.cache.room.add_permits(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    #[test]
    fn a_claim_frees_once_and_reports_what_the_blocks_hold() {
        let cache = KvCache::new(8, 128);
        let allocation = cache.try_allocate(3, 77).unwrap();
        let blocks = allocation.blocks().to_vec();
        assert_eq!(blocks, [1, 2, 3]);
        cache.hold("a", allocation, LEASE);
        assert_eq!(cache.usage(), (1, 3, 3));
        assert_eq!(cache.claim("a", &blocks), Claim::Freed(Some(77)));
        assert_eq!(cache.usage(), (0, 0, 0));
        assert_eq!(cache.claim("a", &blocks), Claim::Unknown(Some(77)));
        assert_eq!(cache.claim("a", &[8]), Claim::OutOfRange);
    }

    #[test]
    fn reused_blocks_hold_the_later_prompt() {
        let cache = KvCache::new(4, 128);
        let first = cache.try_allocate(2, 1).unwrap();
        let blocks = first.blocks().to_vec();
        drop(first);
        // Blocks 3, 1, 2 are free in this order.
        let _later = cache.try_allocate(2, 2).unwrap();
        assert_eq!(cache.claim("gone", &blocks), Claim::Unknown(None));
    }

    #[tokio::test]
    async fn a_full_cache_makes_requests_wait_until_something_is_freed() {
        let cache = KvCache::new(3, 128);
        let both = cache.try_allocate(2, 1).unwrap();
        assert!(cache.try_allocate(1, 2).is_none());
        let waiter = tokio::spawn({
            let cache = Arc::clone(&cache);
            async move { cache.allocate(1, 2).await.blocks().len() }
        });
        drop(both);
        assert_eq!(waiter.await.unwrap(), 1);
        assert_eq!(cache.usage().2, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn leases_end_unless_renewed() {
        let cache = KvCache::new(8, 128);
        cache.hold("a", cache.try_allocate(1, 1).unwrap(), LEASE);
        cache.hold("b", cache.try_allocate(1, 1).unwrap(), LEASE);
        tokio::time::advance(Duration::from_secs(20)).await;
        cache.renew("b", LEASE);
        assert_eq!(cache.expire().0, 0);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(cache.expire().0, 1);
        assert_eq!(cache.usage(), (1, 1, 1));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(cache.expire(), (1, None));
        assert_eq!(cache.usage(), (0, 0, 0));
    }

    #[test]
    fn an_allocation_splits_into_sequences() {
        let cache = KvCache::new(8, 128);
        let mut rest = cache.try_allocate(4, 1).unwrap();
        let first = rest.split(1);
        assert_eq!((first.blocks(), rest.blocks()), (&[1][..], &[2, 3, 4][..]));
        drop(first);
        assert_eq!(cache.usage().2, 3);
    }
}
