//! Block hashes of a prompt.
//!
//! h(i) = XXH64 with seed s over h(i-1) as 8 little-endian bytes followed by the bytes of block
//! i; h(-1) = s. So a hash stands for everything up to and including its block. A trailing
//! partial block has none. (AIBrix's prefix cache indexer.)

use super::marks::{blocks_at, marks};
use crate::ledger::PodKey;
use crate::port::Stored;
use xxhash_rust::xxh64::xxh64;

/// Most blocks of a prompt that are hashed; a longer prompt is judged by its beginning (2 MB at
/// the default block size).
pub const MAX_BLOCKS: usize = 1 << 14;

const LINK: usize = size_of::<u64>();
/// The default block size. A copy of known length is a few instructions; any other is a call out
/// of the module, which takes as long as the hash.
const USUAL_BLOCK: usize = 128;

/// Block hashes of one prompt at its marks (see `marks`), and what a lookup has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    blocks: usize,
    pub(super) hashes: Vec<u64>,
    /// Where learning may begin, for pods whose first nodes need no write.
    pub(super) starts: Vec<(PodKey, Place)>,
    /// The last set that was read: most often the one to be written.
    pub(super) last_read: Option<Read>,
}

/// A set as a lookup found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Read {
    pub(super) set: u64,
    pub(super) stored: Option<Stored>,
}

/// A place on the path of a prompt through the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Marks before it.
    pub(super) mark: usize,
    /// Nodes before it.
    pub(super) depth: usize,
}

// === impl Chain ===

impl Chain {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// True for a prompt shorter than one block.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// The hashes at the marks in order: at each of the first 128 blocks, then ever fewer.
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }

    /// Forgets the set that was read, which may be as large as a set gets (4 KB): learning reads it
    /// again.
    pub fn forget_read(&mut self) {
        self.last_read = None;
    }

    fn push(&mut self, hash: u64) {
        self.blocks = self.blocks.saturating_add(1);
        if self.blocks == blocks_at(self.hashes.len()) {
            self.hashes.push(hash);
        }
    }
}

/// Hashes `pieces` as if they were one text, in blocks of `block_size` bytes (at least 1).
pub fn chain<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
    block_size: usize,
    seed: u64,
) -> Chain {
    let block_size = block_size.max(1);
    // The hash before, and what of the block is there yet.
    let mut block = Vec::with_capacity(LINK.saturating_add(block_size));
    block.extend_from_slice(&seed.to_le_bytes());
    let full = LINK.saturating_add(block_size);
    let mut chain = Chain::default();
    for piece in pieces {
        let blocks = piece.len() / block_size;
        chain.hashes.reserve(marks(blocks.min(MAX_BLOCKS)));
        let mut rest = piece;
        while !rest.is_empty() {
            if block.len() == LINK
                && let Some((part, after)) = rest.split_first_chunk::<USUAL_BLOCK>()
                && block_size == USUAL_BLOCK
            {
                block.extend_from_slice(part);
                rest = after;
            } else {
                let (part, after) = rest.split_at(rest.len().min(full.saturating_sub(block.len())));
                block.extend_from_slice(part);
                rest = after;
            }
            if block.len() == full {
                if chain.blocks == MAX_BLOCKS {
                    return chain;
                }
                let hash = xxh64(&block, seed);
                chain.push(hash);
                block.clear();
                block.extend_from_slice(&hash.to_le_bytes());
            }
        }
    }
    chain
}

/// What keeps the blocks of one model apart from those of another.
pub fn model_hash(name: &str) -> u64 {
    xxh64(name.as_bytes(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(text: &[u8], block_size: usize, seed: u64) -> Vec<u64> {
        chain([text], block_size, seed).hashes
    }

    #[test]
    fn pieces_hash_as_the_text_they_make() {
        let text: Vec<u8> = (0..2000u32).map(|n| (n * 7 % 251) as u8).collect();
        let whole = chain([text.as_slice()], 128, 3);
        assert_eq!(whole.len(), 15);
        let mut before = 3;
        for (block, hash) in text.chunks(128).zip(&whole.hashes) {
            before = xxh64(&[&u64::to_le_bytes(before), block].concat(), 3);
            assert_eq!(*hash, before);
        }
        for size in [1, 7, 127, 128, 129, 500] {
            assert_eq!(chain(text.chunks(size), 128, 3), whole, "pieces of {size}");
        }
        assert_eq!(chain([b"".as_slice(), &text, b""], 128, 3), whole);
    }

    #[test]
    fn of_a_long_prompt_the_hashes_at_its_marks_are_kept() {
        let text: Vec<u8> = (0..3000u32).map(|n| (n * n % 253) as u8).collect();
        let chain = chain([text.as_slice()], 1, 0);
        assert_eq!((chain.len(), chain.hashes.len()), (3000, 128 + 64 * 4 + 29));
        for (nth, hash) in chain.hashes.iter().enumerate() {
            let part = super::chain([&text[..blocks_at(nth)]], 1, 0);
            assert_eq!(part.hashes.last(), Some(hash));
        }
    }

    #[test]
    fn the_length_is_bounded_and_a_block_size_of_zero_is_one() {
        let text = vec![b'x'; MAX_BLOCKS * 2];
        assert_eq!(chain([text.as_slice()], 1, 0).len(), MAX_BLOCKS);
        assert_eq!(hashes(b"abc", 0, 0), hashes(b"abc", 1, 0));
    }
}
