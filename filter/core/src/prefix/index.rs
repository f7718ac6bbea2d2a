//! The index: a fixed number of sets in the store, shared by all workers and kept over a reload
//! of a VM.
//!
//! A prompt of n groups (see `group`) is n entries; the entry of a group proves that
//! a pod holds everything before it, because the hash of its first block stands for all of that.
//! So the last group a pod holds is found by bisection, and its tags tell the block: 5 reads for
//! 8 KB, 8 for 1 MB. One entry per block would need a read-modify-write per block to learn.
//!
//! It is an index, not a ledger: a lost swap or an evicted entry makes it report less, never
//! more than was learnt (up to 32-bit collisions of tags).

use super::group::{group, groups};
use super::hash::Chain;
use super::record::{Age, SET_BYTES, learned, matches};
use crate::ledger::PodKey;
use crate::port::{SharedStore, StoreError};
use std::fmt::Write as _;

/// Bytes of store per block of the configured capacity; prompts of 8 KB take 11.
const BYTES_PER_BLOCK: u64 = 16;
/// Most sets, hence keys, whatever the configured capacity: 256 MB.
const MAX_SETS: u64 = 1 << 16;
/// Most reads of one lookup. Pods whose depths all differ share few of them; those left over
/// keep what is proven so far.
const MAX_READS: usize = 24;
/// Attempts to write one entry.
const TRIES: usize = 2;

/// Where the index lives and how long it remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixIndex {
    sets: u64,
    ttl_s: u32,
}

/// What is known of one pod during a lookup.
#[derive(Clone, Copy, Debug)]
struct Depth {
    /// Groups before this one are held.
    low: usize,
    /// This group and those behind are not held.
    high: usize,
    /// Blocks proven to be held.
    blocks: usize,
}

impl PrefixIndex {
    /// An index of about `blocks` blocks that forgets a pod's block `ttl_ms` after it was last
    /// computed (to a sixteenth of that time).
    pub fn new(blocks: u64, ttl_ms: u64) -> Self {
        let sets = blocks
            .saturating_mul(BYTES_PER_BLOCK)
            .div_ceil(SET_BYTES as u64);
        Self {
            sets: sets.clamp(1, MAX_SETS),
            ttl_s: seconds(ttl_ms),
        }
    }

    /// Percent of the blocks of `chain` that each of `pods` holds from the beginning on, rounded
    /// down; 0 for a prompt without blocks. `percents` is aligned with `pods`.
    pub fn lookup<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        model_hash: u64,
        chain: &Chain,
        pods: &[PodKey],
        now_ms: u64,
        percents: &mut [u8],
    ) {
        percents.fill(0);
        let hashes = chain.hashes();
        let mut sorted: Vec<_> = pods.iter().copied().enumerate().collect();
        sorted.sort_unstable_by_key(|(_, pod)| *pod);
        let mut depths = vec![
            Depth {
                low: 0,
                high: groups(hashes.len()),
                blocks: 0
            };
            pods.len()
        ];
        let mut key = SetKey::default();
        let mut held = vec![0usize; pods.len()];
        for _ in 0..MAX_READS {
            // The pod that is known to hold most goes first.
            let open = depths.iter().filter(|depth| depth.low < depth.high);
            let Some(deepest) = open.max_by_key(|depth| depth.low) else {
                break;
            };
            let nth = usize::midpoint(deepest.low, deepest.high);
            let Some((entry_key, start, blocks)) = self.blocks_of(hashes, nth, model_hash) else {
                break;
            };
            held.fill(0);
            if let Some(stored) = store.get(key.of(self.set(entry_key))) {
                matches(
                    &stored.bytes,
                    entry_key,
                    blocks,
                    self.age(now_ms),
                    |pod, blocks| {
                        let at = sorted.partition_point(|(_, other)| *other < pod);
                        let same = sorted
                            .iter()
                            .skip(at)
                            .take_while(|(_, other)| *other == pod);
                        for (nth, _) in same {
                            if let Some(held) = held.get_mut(*nth) {
                                *held = blocks.max(*held);
                            }
                        }
                    },
                );
            }
            for (depth, held) in depths.iter_mut().zip(&held) {
                if !(depth.low..depth.high).contains(&nth) {
                    continue;
                }
                if *held == 0 {
                    depth.high = nth;
                } else {
                    depth.low = nth.saturating_add(1);
                    depth.blocks = start.saturating_add(*held);
                }
            }
        }
        for (percent, depth) in percents.iter_mut().zip(&depths) {
            let matched = depth
                .blocks
                .saturating_mul(100)
                .checked_div(hashes.len())
                .unwrap_or(0);
            *percent = matched.min(100) as u8;
        }
    }

    /// Remembers that `pod` has computed the prompt. To be called when it has, not before.
    pub fn learn<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        model_hash: u64,
        chain: &Chain,
        pod: PodKey,
        now_ms: u64,
    ) {
        let hashes = chain.hashes();
        let age = self.age(now_ms);
        let mut key = SetKey::default();
        for nth in 0..groups(hashes.len()) {
            let Some((entry_key, _, blocks)) = self.blocks_of(hashes, nth, model_hash) else {
                return;
            };
            let key = key.of(self.set(entry_key));
            for _ in 0..TRIES {
                let stored = store.get(key);
                let record = stored.as_ref().map_or(&[][..], |stored| &stored.bytes);
                let Some(record) = learned(record, entry_key, blocks, pod, age) else {
                    break;
                };
                let written = match &stored {
                    Some(stored) => store.swap(key, &record, stored.cas),
                    None => store.create(key, &record),
                };
                if written != Err(StoreError::Raced) {
                    break;
                }
            }
        }
    }

    /// Key, first block and hashes of the `nth` group of a prompt.
    fn blocks_of<'h>(
        &self,
        hashes: &'h [u64],
        nth: usize,
        model_hash: u64,
    ) -> Option<(u64, usize, &'h [u64])> {
        let group = group(nth);
        let blocks = hashes.get(group.start..)?;
        let blocks = blocks.get(..group.size).unwrap_or(blocks);
        Some((blocks.first()? ^ model_hash, group.start, blocks))
    }

    /// The set of an entry. Keys are uniform: the upper half picks, scaled to the number of sets.
    fn set(&self, entry_key: u64) -> u64 {
        ((entry_key >> 32) * self.sets) >> 32
    }

    fn age(&self, now_ms: u64) -> Age {
        Age {
            now_s: seconds(now_ms),
            ttl_s: self.ttl_s,
        }
    }
}

fn seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

/// Name of a set in the store, written into one buffer.
#[derive(Default)]
struct SetKey(String);

impl SetKey {
    fn of(&mut self, set: u64) -> &str {
        self.0.clear();
        // Writing to a string cannot fail.
        let _ = write!(self.0, "pd.prefix.{set}");
        &self.0
    }
}

#[cfg(test)]
mod tests;
