//! Prompt sizes of sessions: a turn of a conversation is charged what it adds to the one before.
//!
//! Each turn sends the whole history again, and an engine that still holds its KV computes the new
//! part alone. So a request with a session key is charged `prompt − last prompt` of that key and
//! model, when the last prompt is known and strictly shorter; the present size is always
//! remembered, also when it shrank. (AIBrix, `token_load` scoring, rule "session delta".)
//!
//! The sizes are in a fixed number of buckets in the store, shared by all workers: a turn may come
//! to another worker than the one before. A turn is one read and one write of its bucket: the size
//! is recalled before pods are chosen and remembered when the choice is charged, so a request that
//! found no pod changes nothing. A lost write leaves the size of an earlier turn behind, so that a
//! conversation that grows is charged more than it adds.

mod bucket;
mod sweep;

pub use sweep::{Sweep, remembered};

use crate::FORMAT;
use crate::port::{SharedStore, StoreError, Stored};
use crate::prefix::model_hash;
use bucket::{Entry, find, updated};
use xxhash_rust::xxh64::xxh64;

/// Longest key that is looked at, in bytes.
pub const MAX_KEY_BYTES: usize = 256;
/// Most sessions of a bucket. So many that hashing fills buckets evenly, so few that a record
/// (1 KiB) costs the host little more to copy than a small one.
const WAYS: u64 = 64;
/// Attempts to write a bucket.
const TRIES: usize = 3;

/// A session key of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionKey {
    /// XXH64 (seed 0) of the key's bytes.
    Hash(u64),
    /// Longer than [`MAX_KEY_BYTES`]: counted, and the request is charged as if it had no key.
    TooLong,
}

/// Which sessions are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionTable {
    buckets: u64,
    max_sessions: u64,
    ttl_s: u32,
}

/// What is known of a session before a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    session: u64,
    key: String,
    ways: usize,
    stored: Option<Stored>,
    tokens: Option<u64>,
}

// === impl SessionKey ===

impl SessionKey {
    /// Reads a header's value, which is opaque; an empty one is no key.
    #[must_use]
    pub fn read(value: &[u8]) -> Option<Self> {
        match value.len() {
            0 => None,
            1..=MAX_KEY_BYTES => Some(Self::Hash(xxh64(value, 0))),
            _ => Some(Self::TooLong),
        }
    }
}

// === impl SessionTable ===

impl SessionTable {
    /// A table of at most `max_sessions` (at least 1) that forgets a session `ttl_ms` after its
    /// last turn, to the second.
    #[must_use]
    pub fn new(max_sessions: u64, ttl_ms: u64) -> Self {
        Self {
            buckets: buckets(max_sessions),
            max_sessions: max_sessions.max(1),
            ttl_s: seconds(ttl_ms).max(1),
        }
    }

    /// Looks up a session of a model; `key` is that of [`SessionKey::Hash`].
    pub fn recall<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        model: &str,
        key: u64,
        now_ms: u64,
    ) -> Turn {
        let session = xxh64(&key.to_le_bytes(), model_hash(model));
        // Hashes are uniform: the upper half picks, scaled to the number of buckets.
        let bucket = ((session >> 32) * self.buckets) >> 32;
        let key = bucket_key(bucket);
        let stored = store.get(&key);
        let record = stored.as_ref().map_or(&[][..], |stored| &stored.bytes);
        let tokens = find(record, session, seconds(now_ms)).map(|entry| u64::from(entry.tokens));
        Turn {
            session,
            key,
            ways: self.ways(bucket),
            stored,
            tokens,
        }
    }

    /// Remembers the prompt's size. False when the bucket was lost to other writers
    /// [`TRIES`] times, or the host refused.
    pub fn remember<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        turn: Turn,
        tokens: u64,
        now_ms: u64,
    ) -> bool {
        let now_s = seconds(now_ms);
        let entry = Entry {
            session: turn.session,
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            until_s: now_s.saturating_add(self.ttl_s),
        };
        let mut stored = turn.stored;
        for attempt in 1..=TRIES {
            let record = stored.as_ref().map_or(&[][..], |stored| &stored.bytes);
            let bytes = updated(record, entry, turn.ways, now_s);
            let written = store.replace(&turn.key, stored.as_ref(), &bytes);
            match written {
                Ok(()) => return true,
                Err(StoreError::Raced) if attempt < TRIES => stored = store.get(&turn.key),
                Err(_) => return false,
            }
        }
        false
    }

    /// Places of a bucket; all buckets together have exactly `max_sessions`.
    fn ways(&self, bucket: u64) -> usize {
        let even = self.max_sessions / self.buckets;
        let more = u64::from(bucket < self.max_sessions % self.buckets);
        usize::try_from(even.saturating_add(more)).unwrap_or(usize::MAX)
    }
}

// === impl Turn ===

impl Turn {
    /// Prompt tokens of the turn before, if it is remembered.
    #[must_use]
    pub fn tokens_before(&self) -> Option<u64> {
        self.tokens
    }
}

/// What a prompt adds to the one before, if it is longer.
#[must_use]
pub fn growth(tokens: u64, before: Option<u64>) -> Option<u64> {
    tokens.checked_sub(before?).filter(|growth| *growth > 0)
}

/// Buckets of a table.
fn buckets(max_sessions: u64) -> u64 {
    max_sessions.clamp(1, u64::from(u32::MAX)).div_ceil(WAYS)
}

/// Name of a bucket in the store.
fn bucket_key(bucket: u64) -> String {
    format!("pd{FORMAT}.session.{bucket}")
}

fn seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
