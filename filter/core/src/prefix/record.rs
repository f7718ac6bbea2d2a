//! One set of the index as it is stored: nodes, the most recently written first.
//!
//! Layout, little-endian: version (1 byte), then per node: key (8), number of tags (2), number of
//! holders (1), tags (4 each), holders (14 each: pod 8, marks held 2, time in s 4). A record of
//! another version, and whatever follows a malformed node, counts as absent.

use super::hash::MAX_BLOCKS;
use super::marks::marks;
use crate::ledger::PodKey;

const VERSION: u8 = 1;
/// Most bytes of a set. Reading this much costs the host little more than reading 8 bytes.
pub(super) const SET_BYTES: usize = 4096;
/// Most holders of a node; those that were seen least recently are forgotten.
const MAX_HOLDERS: usize = 64;
/// Most tags of a node: the longest prompt's marks but the first, which the key stands for.
const MAX_TAGS: usize = marks(MAX_BLOCKS) - 1;

/// Short form of a hash inside a node, whose key stands for its first mark in full.
type Tag = u32;

const HEAD: usize = 11;
const TAG: usize = size_of::<Tag>();
const HOLDER: usize = 14;

// Whatever is learnt fits into a set.
const _: () = assert!(1 + HEAD + MAX_TAGS * TAG + MAX_HOLDERS * HOLDER <= SET_BYTES);

/// The tag of a hash.
const fn tag(hash: u64) -> Tag {
    (hash >> 32) as Tag
}

/// A run of marks, and who holds how many of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a> {
    key: u64,
    tags: &'a [[u8; TAG]],
    holders: &'a [[u8; HOLDER]],
    /// The record before and after this node.
    before: &'a [u8],
    after: &'a [u8],
}

/// A pod that holds the first `marks` marks of a node, last seen at `seen_s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) pod: PodKey,
    pub(super) marks: u16,
    pub(super) seen_s: u32,
}

/// How a prompt goes through a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Passage {
    /// Marks, at least one, that both have in common.
    pub(super) common: usize,
    /// Learning the prompt puts the rest of its marks into this node.
    pub(super) takes_over: bool,
}

/// When nodes are too old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Age {
    /// Now, in s of the shared monotonic clock.
    pub(super) now_s: u32,
    /// A holder not seen for longer is forgotten, in s.
    pub(super) ttl_s: u32,
}

// === impl Holder ===

impl Holder {
    fn read(bytes: &[u8; HOLDER]) -> Self {
        let [p0, p1, p2, p3, p4, p5, p6, p7, m0, m1, s0, s1, s2, s3] = *bytes;
        Self {
            pod: PodKey(u64::from_le_bytes([p0, p1, p2, p3, p4, p5, p6, p7])),
            marks: u16::from_le_bytes([m0, m1]),
            seen_s: u32::from_le_bytes([s0, s1, s2, s3]),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        let [p0, p1, p2, p3, p4, p5, p6, p7] = self.pod.0.to_le_bytes();
        let [m0, m1] = self.marks.to_le_bytes();
        let [s0, s1, s2, s3] = self.seen_s.to_le_bytes();
        out.extend_from_slice(&[p0, p1, p2, p3, p4, p5, p6, p7, m0, m1, s0, s1, s2, s3]);
    }
}

// === impl Age ===

impl Age {
    fn is_live(self, holder: &Holder) -> bool {
        self.now_s.saturating_sub(holder.seen_s) <= self.ttl_s
    }

    /// A holder seen this recently is not written again: a popular prefix would otherwise be
    /// written by every request.
    fn is_fresh(self, holder: &Holder) -> bool {
        self.now_s.saturating_sub(holder.seen_s) <= self.ttl_s / 16
    }
}

// === impl Node ===

impl<'a> Node<'a> {
    /// The node of `key` in a stored set.
    pub(super) fn find(record: &'a [u8], key: u64) -> Option<Self> {
        nodes(record).find(|node| node.key == key)
    }

    /// Takes a node off the front of `rest`, the end of `record`.
    fn split(record: &'a [u8], rest: &'a [u8]) -> Option<Self> {
        let before = record.get(..record.len().checked_sub(rest.len())?)?;
        let (head, rest) = rest.split_first_chunk::<HEAD>()?;
        let [k0, k1, k2, k3, k4, k5, k6, k7, t0, t1, holders] = *head;
        let tags = usize::from(u16::from_le_bytes([t0, t1]));
        if tags > MAX_TAGS {
            return None;
        }
        let (tags, rest) = rest.split_at_checked(tags.checked_mul(TAG)?)?;
        let (holders, after) = rest.split_at_checked(usize::from(holders).checked_mul(HOLDER)?)?;
        Some(Self {
            key: u64::from_le_bytes([k0, k1, k2, k3, k4, k5, k6, k7]),
            tags: tags.as_chunks().0,
            holders: holders.as_chunks().0,
            before,
            after,
        })
    }

    /// How a prompt goes through this node; `hashes` are its marks from the node's first on. In
    /// the `last` node of a path there is no node to go on to.
    pub(super) fn passage(&self, hashes: &[u64], last: bool) -> Passage {
        let equal = |(ours, hash): &(&[u8; TAG], &u64)| Tag::from_le_bytes(**ours) == tag(**hash);
        let behind_first = self.tags.iter().zip(hashes.iter().skip(1));
        let equal_tags = behind_first.take_while(equal).count();
        let common = equal_tags.saturating_add(1);
        Passage {
            common,
            takes_over: common < hashes.len() && (last || equal_tags == self.tags.len()),
        }
    }

    /// The pods that hold the beginning of this node, the most recently seen first. A pod may be
    /// named more than once: what it has seen lately, and before that more.
    pub(super) fn holders(&self, age: Age) -> impl Iterator<Item = Holder> + use<'a> {
        let holders = self.holders.iter().map(Holder::read);
        holders.filter(move |holder| age.is_live(holder))
    }

    /// True when nothing need be written for a prompt that `holder` has computed again.
    ///
    /// A node that is about to fall out of its set is written, which moves it to the front.
    pub(super) fn is_settled(&self, passage: Passage, holder: &Holder, age: Age) -> bool {
        !passage.takes_over
            && usize::from(holder.marks) >= passage.common
            && age.is_fresh(holder)
            && self.before.len() <= SET_BYTES / 2
    }
}

/// All nodes of a stored set.
fn nodes(record: &[u8]) -> impl Iterator<Item = Node<'_>> {
    let mut rest = match record.split_first() {
        Some((&VERSION, rest)) => rest,
        _ => &[],
    };
    std::iter::from_fn(move || {
        let node = Node::split(record, rest)?;
        rest = node.after;
        Some(node)
    })
}

/// The set after `pod` has computed a prompt whose marks from the one that `key` stands for on
/// are `hashes`, `None` when it already says so; and how many of the marks are dealt with.
///
/// The node moves to the front; nodes that no longer fit fall off the end.
pub(super) fn learned(
    record: &[u8],
    key: u64,
    hashes: &[u64],
    last: bool,
    pod: PodKey,
    age: Age,
) -> (Option<Vec<u8>>, usize) {
    let hashes = hashes.get(..=MAX_TAGS).unwrap_or(hashes);
    let old = Node::find(record, key);
    let passage = match &old {
        Some(node) => node.passage(hashes, last),
        None => Passage {
            common: 0,
            takes_over: true,
        },
    };
    // Tags that stay, and hashes of those to come; the first mark has none.
    let old_tags = old.map_or(&[][..], |node| node.tags);
    let (kept, new, done) = if passage.takes_over {
        let kept = passage.common.saturating_sub(1);
        let new = hashes.get(kept.saturating_add(1)..).unwrap_or_default();
        (old_tags.get(..kept).unwrap_or(old_tags), new, hashes.len())
    } else {
        (old_tags, &[][..], passage.common)
    };
    // All counts are at most `MAX_TAGS + 1`.
    let own = Holder {
        pod,
        marks: done as u16,
        seen_s: age.now_s,
    };
    let stay = kept.len().saturating_add(1) as u16;
    let mut others = Vec::new();
    if let Some(node) = &old {
        for mut holder in node.holders(age) {
            if holder.pod == pod && node.is_settled(passage, &holder, age) {
                return (None, done);
            }
            holder.marks = holder.marks.min(stay);
            if holder.pod != pod || holder.marks > own.marks {
                others.push(holder);
            }
        }
    }
    others.truncate(MAX_HOLDERS.saturating_sub(1));
    // Marks that nobody holds any more need no room.
    let deepest = others
        .iter()
        .fold(own.marks, |most, holder| most.max(holder.marks));
    let kept = kept
        .get(..usize::from(deepest).saturating_sub(1))
        .unwrap_or(kept);

    let mut out = Vec::with_capacity(SET_BYTES);
    out.push(VERSION);
    out.extend_from_slice(&key.to_le_bytes());
    let tags = kept.len().saturating_add(new.len()) as u16;
    out.extend_from_slice(&tags.to_le_bytes());
    out.push(others.len().saturating_add(1) as u8);
    out.extend_from_slice(kept.as_flattened());
    for hash in new {
        out.extend_from_slice(&tag(*hash).to_le_bytes());
    }
    own.write(&mut out);
    for holder in &others {
        holder.write(&mut out);
    }
    let (before, after) = old.map_or((record, &[][..]), |node| (node.before, node.after));
    append(before, &mut out);
    append_nodes(after, &mut out);
    (Some(out), done)
}

/// Adds the nodes of a record, or of its beginning, as far as there is room.
fn append(record: &[u8], out: &mut Vec<u8>) {
    if let Some((&VERSION, nodes)) = record.split_first() {
        append_nodes(nodes, out);
    }
}

/// Adds nodes as far as there is room.
fn append_nodes(nodes: &[u8], out: &mut Vec<u8>) {
    let room = SET_BYTES.saturating_sub(out.len());
    let mut rest = nodes;
    let mut fitting = 0_usize;
    while let Some(node) = Node::split(nodes, rest) {
        rest = node.after;
        let end = nodes.len().saturating_sub(rest.len());
        if end > room {
            break;
        }
        fitting = end;
    }
    out.extend_from_slice(nodes.get(..fitting).unwrap_or_default());
}
