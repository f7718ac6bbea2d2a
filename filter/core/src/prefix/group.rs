//! How the blocks of a prompt are cut into groups, each of which is one entry of the index.
//!
//! Every prompt is cut at the same positions, so prompts that begin alike share their first
//! groups. Groups grow with their position (1 block, then a quarter to an eighth of what stands
//! before, at most 64): a short prompt costs few entries, a megabyte some 150, and what one
//! group can lose is small against what it follows. An entry is found by the hash of its
//! *first* block, so prompts that part ways fall into different sets from the next group on.

/// Most blocks in a group.
pub(super) const MAX_GROUP: usize = 64;

/// Blocks that make groups of their own.
const SINGLE: usize = 8;
/// Groups per doubling of the position.
const PER_OCTAVE: usize = 4;
/// Position from which groups have the largest size.
const EVEN: usize = MAX_GROUP * PER_OCTAVE;
/// Groups before [`EVEN`].
const BEFORE_EVEN: usize = SINGLE + PER_OCTAVE * 5;

/// Consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// First block.
    pub(super) start: usize,
    /// Number of blocks.
    pub(super) size: usize,
}

/// The `nth` group.
pub(super) const fn group(nth: usize) -> Group {
    if nth < SINGLE {
        return Group {
            start: nth,
            size: 1,
        };
    }
    if nth >= BEFORE_EVEN {
        let start = (nth - BEFORE_EVEN)
            .saturating_mul(MAX_GROUP)
            .saturating_add(EVEN);
        return Group {
            start,
            size: MAX_GROUP,
        };
    }
    let octave = (nth - SINGLE) / PER_OCTAVE;
    let size = 2 << octave;
    Group {
        start: size * (PER_OCTAVE + (nth - SINGLE) % PER_OCTAVE),
        size,
    }
}

/// Number of groups that `blocks` blocks touch.
pub(super) const fn groups(blocks: usize) -> usize {
    let Some(last) = blocks.checked_sub(1) else {
        return 0;
    };
    let nth = if last < SINGLE {
        last
    } else if last < EVEN {
        // Sizes in this octave are 2^(log2(last) - 2).
        let octave = last.ilog2() as usize - 3;
        SINGLE + PER_OCTAVE * octave + (last >> (octave + 1)) - PER_OCTAVE
    } else {
        BEFORE_EVEN + (last - EVEN) / MAX_GROUP
    };
    nth + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cover_all_blocks_without_a_gap() {
        let mut next = 0;
        for nth in 0..300 {
            let group = group(nth);
            assert_eq!(group.start, next);
            assert!(group.size == 1 || group.size <= MAX_GROUP && group.size * 4 <= group.start);
            for block in group.start..group.start + group.size {
                assert_eq!(groups(block + 1), nth + 1, "block {block}");
            }
            next += group.size;
        }
        assert_eq!((groups(0), groups(64), groups(8192)), (0, 20, 152));
    }
}
