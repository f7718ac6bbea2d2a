//! One set of the index as it is stored: entries, the most recently written first.
//!
//! Layout, little-endian: version (1 byte), then per entry: key (8), number of tags (1), number
//! of holders (1), tags (4 each), holders (13 each: pod 8, blocks held 1, time in s 4). A record
//! of another version, and whatever follows a malformed entry, counts as absent.

use super::group::MAX_GROUP;
use crate::ledger::PodKey;

const VERSION: u8 = 1;
/// Most bytes of a set. Reading this much costs the host little more than reading 8 bytes.
pub(super) const SET_BYTES: usize = 4096;
/// Most holders of an entry; those that were seen least recently are forgotten.
const MAX_HOLDERS: usize = 64;

/// Short form of a block hash inside an entry, whose key stands for the first block in full.
pub(super) type Tag = u32;

/// The tag of a block hash.
pub(super) const fn tag(hash: u64) -> Tag {
    (hash >> 32) as Tag
}

/// Blocks of one group, and who holds how many of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry<'a> {
    key: u64,
    tags: &'a [[u8; TAG]],
    holders: &'a [[u8; HOLDER]],
}

/// A pod that holds the first `blocks` blocks of an entry, last seen at `seen_s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) pod: PodKey,
    pub(super) blocks: u8,
    pub(super) seen_s: u32,
}

const TAG: usize = size_of::<Tag>();
const HOLDER: usize = 13;

impl Holder {
    fn read(bytes: &[u8; HOLDER]) -> Self {
        let [p0, p1, p2, p3, p4, p5, p6, p7, blocks, s0, s1, s2, s3] = *bytes;
        Self {
            pod: PodKey(u64::from_le_bytes([p0, p1, p2, p3, p4, p5, p6, p7])),
            blocks,
            seen_s: u32::from_le_bytes([s0, s1, s2, s3]),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.pod.0.to_le_bytes());
        out.push(self.blocks);
        out.extend_from_slice(&self.seen_s.to_le_bytes());
    }
}

impl<'a> Entry<'a> {
    /// Takes an entry off the front.
    fn split(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (key, rest) = bytes.split_first_chunk::<8>()?;
        let (&[tags, holders], rest) = rest.split_first_chunk::<2>()?;
        let (tags, rest) = rest.split_at_checked(usize::from(tags).checked_mul(TAG)?)?;
        let (holders, rest) = rest.split_at_checked(usize::from(holders).checked_mul(HOLDER)?)?;
        let (tags, _) = tags.as_chunks();
        let (holders, _) = holders.as_chunks();
        Some((
            Self {
                key: u64::from_le_bytes(*key),
                tags,
                holders,
            },
            rest,
        ))
    }

    /// Number of leading tags that equal those of `hashes`.
    fn common(&self, hashes: &[u64]) -> usize {
        let equal = |(ours, hash): &(&[u8; TAG], &u64)| Tag::from_le_bytes(**ours) == tag(**hash);
        self.tags.iter().zip(hashes).take_while(equal).count()
    }

    fn holders(&self) -> impl Iterator<Item = Holder> + use<'a> {
        self.holders.iter().map(Holder::read)
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_head(self.key, self.tags.len(), self.holders.len(), out);
        out.extend_from_slice(self.tags.as_flattened());
        out.extend_from_slice(self.holders.as_flattened());
    }
}

fn write_head(key: u64, tags: usize, holders: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(&key.to_le_bytes());
    // Both are at most 64.
    out.extend_from_slice(&[tags as u8, holders as u8]);
}

/// All entries of a stored set.
fn entries(record: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    let mut rest = match record.split_first() {
        Some((&VERSION, rest)) => rest,
        _ => &[],
    };
    std::iter::from_fn(move || {
        let (entry, after) = Entry::split(rest)?;
        rest = after;
        Some(entry)
    })
}

/// When entries are too old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Age {
    /// Now, in s of the shared monotonic clock.
    pub(super) now_s: u32,
    /// A holder not seen for longer is forgotten, in s.
    pub(super) ttl_s: u32,
}

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

/// Calls `found` with each live pod that holds blocks of a group, and how many of `hashes` it
/// holds; a pod may be named more than once.
pub(super) fn matches(
    record: &[u8],
    key: u64,
    hashes: &[u64],
    age: Age,
    mut found: impl FnMut(PodKey, usize),
) {
    for entry in entries(record).filter(|entry| entry.key == key) {
        let common = entry.common(hashes);
        for holder in entry.holders().filter(|holder| age.is_live(holder)) {
            match common.min(usize::from(holder.blocks)) {
                0 => {}
                blocks => found(holder.pod, blocks),
            }
        }
    }
}

/// The set after `pod` has computed all of `hashes`, the blocks of one group; `None` when it
/// already says so.
///
/// The entry moves to the front; entries that no longer fit fall off the end.
pub(super) fn learned(
    record: &[u8],
    key: u64,
    hashes: &[u64],
    pod: PodKey,
    age: Age,
) -> Option<Vec<u8>> {
    let hashes = hashes.get(..MAX_GROUP).unwrap_or(hashes);
    // An entry whose tags are a beginning of ours, or ours of its.
    let fits = |entry: &Entry<'_>| entry.common(hashes) == entry.tags.len().min(hashes.len());
    let old = entries(record)
        .enumerate()
        .filter(|(_, entry)| entry.key == key && fits(entry))
        .max_by_key(|(_, entry)| entry.tags.len());
    let mut own = Holder {
        pod,
        blocks: hashes.len() as u8,
        seen_s: age.now_s,
    };
    let mut others = Vec::new();
    for holder in old.iter().flat_map(|(_, entry)| entry.holders()) {
        if !age.is_live(&holder) {
            continue;
        }
        if holder.pod != pod {
            others.push(holder);
        } else if holder.blocks >= own.blocks && age.is_fresh(&holder) {
            return None;
        } else {
            own.blocks = own.blocks.max(holder.blocks);
        }
    }
    others.truncate(MAX_HOLDERS.saturating_sub(1));

    let mut out = Vec::with_capacity(SET_BYTES);
    out.push(VERSION);
    let old_tags = old.map_or(&[][..], |(_, entry)| entry.tags);
    write_head(
        key,
        old_tags.len().max(hashes.len()),
        others.len().saturating_add(1),
        &mut out,
    );
    out.extend_from_slice(old_tags.as_flattened());
    for hash in hashes.iter().skip(old_tags.len()) {
        out.extend_from_slice(&tag(*hash).to_le_bytes());
    }
    own.write(&mut out);
    for holder in &others {
        holder.write(&mut out);
    }
    let old_at = old.map(|(at, _)| at);
    for (at, entry) in entries(record).enumerate() {
        let is_live = entry.holders().any(|holder| age.is_live(&holder));
        if Some(at) == old_at || !is_live {
            continue;
        }
        let length = out.len();
        entry.write(&mut out);
        if out.len() > SET_BYTES {
            out.truncate(length);
            break;
        }
    }
    Some(out)
}
