//! The index: a fixed number of sets in the store, shared by all workers and kept over a reload
//! of a VM.
//!
//! Prompts form a tree of nodes, each a run of marks (see `marks`) that at least one prompt has
//! in full. A prompt nobody has begun before is one node, so it costs one read to look up and one
//! read and write to learn, however long. A prompt goes along a node as far as their tags agree:
//! - past its end, the node grows: the next turn of a conversation;
//! - where they part, it goes on at a node of its own: another user of a system prompt.
//!
//! A node is found by the hash at its first mark. That stands for everything before, so the holder
//! of a node holds all that leads there, and no node need name the next: where a prompt
//! leaves a node says where to look. Growth leaves that in place, because no prompt that parted
//! from the node before agrees with what is added.
//!
//! It is an index, not a ledger: a lost swap, an evicted node or more branches than the longest
//! path has nodes make it report less, and so do marks (less than a 64th of the match), never more
//! than was learnt (up to 32-bit collisions of tags).

use super::hash::{Chain, Place, Read};
use super::marks::blocks_at;
use super::record::{Age, Node, SET_BYTES, learned};
use crate::ledger::PodKey;
use crate::port::{SharedStore, StoreError};

/// Bytes of store per block of the configured capacity; prompts of 8 KB take 5, of 1 KB 8.
const BYTES_PER_BLOCK: u64 = 8;
/// Most sets, hence keys, whatever the configured capacity: 256 MB.
const MAX_SETS: u64 = 1 << 16;
/// Most nodes of one path, hence reads of one lookup. Prompts that branch more often share the
/// last node, where the latest stays.
const MAX_DEPTH: usize = 8;
/// Attempts to write one node, the first perhaps with what the lookup has read.
const TRIES: usize = 3;

/// Where the index lives and how long it remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixIndex {
    sets: u64,
    ttl_s: u32,
}

/// What is known of one pod during a lookup.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    /// Blocks proven to be held.
    blocks: usize,
    /// Where learning may begin.
    start: Place,
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
    /// down; 0 for a prompt without blocks. `percents` is aligned with `pods`. The chain remembers
    /// what [`PrefixIndex::learn`] need not read or write again.
    pub fn lookup<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        model_hash: u64,
        chain: &mut Chain,
        pods: &[PodKey],
        now_ms: u64,
        percents: &mut [u8],
    ) {
        percents.fill(0);
        let age = self.age(now_ms);
        // Made when something is found: most often nothing is.
        let mut found: Option<Found> = None;
        let mut place = Place::default();
        let mut key = SetKey::default();
        while place.depth < MAX_DEPTH {
            let hashes = chain.hashes.get(place.mark..).unwrap_or_default();
            let Some(node_key) = hashes.first().map(|hash| hash ^ model_hash) else {
                break;
            };
            let set = self.set(node_key);
            let stored = store.get(key.of(set));
            let read = chain.last_read.insert(Read { set, stored });
            let record = read.stored.as_ref();
            let Some(node) = record.and_then(|stored| Node::find(&stored.bytes, node_key)) else {
                break;
            };
            let passage = node.passage(hashes, place.is_last());
            let next = place.after(passage.common);
            let found = found.get_or_insert_with(|| Found::new(pods));
            for holder in node.holders(age) {
                let held = passage.common.min(usize::from(holder.marks));
                let Some(last) = place.mark.saturating_add(held).checked_sub(1) else {
                    continue;
                };
                let settled = node.is_settled(passage, &holder, age);
                for standing in found.of(holder.pod) {
                    standing.blocks = standing.blocks.max(blocks_at(last));
                    if settled && standing.start == place {
                        standing.start = next;
                    }
                }
            }
            if passage.takes_over {
                break;
            }
            place = next;
        }
        chain.starts.clear();
        let Some(found) = found else {
            return;
        };
        for (nth, pod, standing) in found.0 {
            if standing.start != Place::default() {
                chain.starts.push((pod, standing.start));
            }
            let matched = standing.blocks.saturating_mul(100);
            if let Some(percent) = percents.get_mut(nth) {
                *percent = matched.checked_div(chain.len()).unwrap_or(0).min(100) as u8;
            }
        }
    }

    /// Remembers that `pod` has computed the prompt. To be called when it has, not before.
    pub fn learn<S: SharedStore + ?Sized>(
        &self,
        store: &S,
        model_hash: u64,
        chain: &mut Chain,
        pod: PodKey,
        now_ms: u64,
    ) {
        let start = chain.starts.iter().find(|(other, _)| *other == pod);
        let mut place = start.map_or_else(Place::default, |(_, place)| *place);
        let age = self.age(now_ms);
        let mut key = SetKey::default();
        while place.depth < MAX_DEPTH {
            let hashes = chain.hashes.get(place.mark..).unwrap_or_default();
            let Some(node_key) = hashes.first().map(|hash| hash ^ model_hash) else {
                return;
            };
            let set = self.set(node_key);
            let key = key.of(set);
            let mut done = 0;
            for _ in 0..TRIES {
                let read = chain.last_read.take_if(|read| read.set == set);
                let stored = read.map_or_else(|| store.get(key), |read| read.stored);
                let record = stored.as_ref().map_or(&[][..], |stored| &stored.bytes);
                let lesson = learned(record, node_key, hashes, place.is_last(), pod, age);
                done = lesson.1;
                let Some(record) = lesson.0 else {
                    break;
                };
                let written = store.replace(key, stored.as_ref(), &record);
                if written != Err(StoreError::Raced) {
                    break;
                }
            }
            place = place.after(done);
        }
    }

    /// The set of a node. Keys are uniform: the upper half picks, scaled to the number of sets.
    fn set(&self, node_key: u64) -> u64 {
        ((node_key >> 32) * self.sets) >> 32
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

// === impl Place ===

impl Place {
    fn is_last(self) -> bool {
        self.depth.saturating_add(1) >= MAX_DEPTH
    }

    /// Behind a node that `marks` marks of the prompt went through.
    fn after(self, marks: usize) -> Self {
        Self {
            mark: self.mark.saturating_add(marks),
            depth: self.depth.saturating_add(1),
        }
    }
}

/// What is known of each pod during a lookup, by key, with its place in the list asked for.
struct Found(Vec<(usize, PodKey, Standing)>);

// === impl Found ===

impl Found {
    fn new(pods: &[PodKey]) -> Self {
        let pods = pods.iter().enumerate();
        let mut found: Vec<_> = pods
            .map(|(nth, pod)| (nth, *pod, Standing::default()))
            .collect();
        found.sort_unstable_by_key(|(_, pod, _)| *pod);
        Self(found)
    }

    fn of(&mut self, pod: PodKey) -> impl Iterator<Item = &mut Standing> {
        let at = self.0.partition_point(|(_, other, _)| *other < pod);
        let same = self.0.iter_mut().skip(at);
        let same = same.take_while(move |(_, other, _)| *other == pod);
        same.map(|(_, _, standing)| standing)
    }
}

/// Name of a set in the store, written into one buffer.
#[derive(Default)]
struct SetKey(String);

impl SetKey {
    fn of(&mut self, set: u64) -> &str {
        self.0.clear();
        self.0.push_str("pd.prefix.");
        self.0.push_str(&set.to_string());
        &self.0
    }
}

#[cfg(test)]
mod tests;
