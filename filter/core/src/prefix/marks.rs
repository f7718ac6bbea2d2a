//! Where prompts are compared: after each of the first 128 blocks, then after every 2nd up to 256,
//! every 4th up to 512 and so on.
//!
//! The hash at a mark stands for everything before it, so nothing in between need be kept: 512
//! marks for a megabyte instead of 8192 blocks. What is lost is less than a 64th of what is
//! compared.

/// Up to here every block is a mark; 16 KB of text.
const DENSE: usize = 1 << DENSE_LOG2;
const DENSE_LOG2: usize = 7;
/// Marks of every doubling behind.
const PER_OCTAVE: usize = DENSE / 2;

/// Number of blocks before the `nth` mark, from 0; its own block is the last of them.
pub(super) const fn blocks_at(nth: usize) -> usize {
    if nth < DENSE {
        return nth.saturating_add(1);
    }
    let beyond = nth - DENSE;
    let octave = beyond / PER_OCTAVE + 1;
    // Marks are few, see `MAX_BLOCKS`, so nothing is lost here.
    (PER_OCTAVE + 1 + beyond % PER_OCTAVE) << octave
}

/// Number of marks in `blocks` blocks.
pub(super) const fn marks(blocks: usize) -> usize {
    if blocks <= DENSE {
        return blocks;
    }
    // The last mark's octave: `blocks` is in (DENSE << octave - 1, DENSE << octave].
    let octave = (blocks - 1).ilog2() as usize + 1 - DENSE_LOG2;
    DENSE + PER_OCTAVE * (octave - 1) + (blocks >> octave) - PER_OCTAVE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_counted_as_they_are_placed() {
        let mut nth = 0;
        for blocks in 1..40_000 {
            if blocks_at(nth) == blocks {
                nth += 1;
            }
            assert_eq!(marks(blocks), nth, "{blocks} blocks");
        }
        assert_eq!((marks(0), marks(64), marks(8192)), (0, 64, 512));
    }

    #[test]
    fn less_than_a_64th_lies_between_marks() {
        for blocks in 1..40_000 {
            let lost = blocks - blocks_at(marks(blocks) - 1);
            assert!(lost * 64 < blocks, "{lost} of {blocks}");
        }
    }
}
