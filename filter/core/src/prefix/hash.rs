//! Block hashes of a prompt.
//!
//! h(i) = XXH64 with seed s over h(i-1) as 8 little-endian bytes followed by the bytes of block
//! i; h(-1) = s. So a hash stands for everything up to and including its block. A trailing
//! partial block has none. (AIBrix's prefix cache indexer.)

use xxhash_rust::xxh64::xxh64;

/// Most blocks of a prompt that are hashed; a longer prompt is judged by its beginning (2 MB at
/// the default block size).
pub const MAX_BLOCKS: usize = 1 << 14;

/// Block hashes of one prompt, from its first block on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    hashes: Vec<u64>,
}

impl Chain {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// True for a prompt shorter than one block.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// The hashes in order.
    pub fn hashes(&self) -> &[u64] {
        &self.hashes
    }
}

/// Hashes `pieces` as if they were one text, in blocks of `block_size` bytes (at least 1).
pub fn chain<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
    block_size: usize,
    seed: u64,
) -> Chain {
    const LINK: usize = size_of::<u64>();
    let block_size = block_size.max(1);
    // The hash before, and what of the block is there yet.
    let mut block = Vec::with_capacity(LINK.saturating_add(block_size));
    block.extend_from_slice(&seed.to_le_bytes());
    let full = LINK.saturating_add(block_size);
    let mut hashes = Vec::new();
    for piece in pieces {
        let mut rest = piece;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(full.saturating_sub(block.len())));
            block.extend_from_slice(part);
            rest = after;
            if block.len() == full {
                if hashes.len() == MAX_BLOCKS {
                    return Chain { hashes };
                }
                let hash = xxh64(&block, seed);
                hashes.push(hash);
                block.clear();
                block.extend_from_slice(&hash.to_le_bytes());
            }
        }
    }
    Chain { hashes }
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
    fn hashes_equal_the_vectors_of_the_formula() {
        let ab = [16464934435465292544, 15316134462644996939];
        assert_eq!(hashes(b"abcdefgh", 4, 0), ab);
        assert_eq!(hashes(b"abcdefghi", 4, 0), ab);
        assert_eq!(
            hashes(b"abcdefgh", 4, 42),
            [14376950484376714383, 12120800407414931363]
        );
        assert_eq!(hashes(b"hell", 4, 0), [8760862958473797127]);
        assert_eq!(
            hashes(b"hello world", 4, 0),
            [8760862958473797127, 14765582204697627499]
        );
        assert_eq!(
            hashes(&[b'a'; 256], 128, 0),
            [5553500093441874558, 2787912953130237946]
        );
        assert_eq!(
            hashes("héllo wörld!".as_bytes(), 4, 0),
            [
                17579867287445002676,
                10989599415523981113,
                7904036198067989258
            ]
        );
        assert!(hashes(b"abc", 4, 0).is_empty());
    }

    #[test]
    fn pieces_hash_as_the_text_they_make() {
        let text: Vec<u8> = (0..2000u32).map(|n| (n * 7 % 251) as u8).collect();
        let whole = chain([text.as_slice()], 128, 3);
        assert_eq!(whole.len(), 15);
        for size in [1, 7, 127, 128, 129, 500] {
            assert_eq!(chain(text.chunks(size), 128, 3), whole, "pieces of {size}");
        }
        assert_eq!(chain([b"".as_slice(), &text, b""], 128, 3), whole);
    }

    #[test]
    fn the_length_is_bounded_and_a_block_size_of_zero_is_one() {
        let text = vec![b'x'; MAX_BLOCKS * 2];
        assert_eq!(hashes(&text, 1, 0).len(), MAX_BLOCKS);
        assert_eq!(hashes(b"abc", 0, 0), hashes(b"abc", 1, 0));
    }
}
