//! Random sequences against an allocator that counts what it gave out.

use super::*;
use proptest::prelude::*;
use std::alloc::System;
use std::collections::HashMap;
use std::sync::Mutex;

/// The system's allocator, which remembers every block and its layout.
#[derive(Debug, Default)]
struct Counting(Mutex<HashMap<usize, Layout>>);

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        assert!(layout.size() > 0);
        // SAFETY: the caller's promise.
        let block = unsafe { System.alloc(layout) };
        self.0.lock().unwrap().insert(block as usize, layout);
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let known = self.0.lock().unwrap().remove(&(block as usize));
        assert_eq!(known, Some(layout), "given back as it was taken");
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(block, layout) };
    }
}

impl Counting {
    fn live(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// A block a caller holds, filled with a byte of its own.
#[derive(Clone, Copy)]
struct Held {
    block: *mut u8,
    layout: Layout,
    fill: u8,
}

impl Held {
    fn fill(&self) {
        // SAFETY: the test holds the block.
        unsafe { self.block.write_bytes(self.fill, self.layout.size()) };
    }

    fn assert_whole(&self, bytes: usize) {
        // SAFETY: the test holds the block and has filled it.
        let all = unsafe { std::slice::from_raw_parts(self.block, bytes) };
        assert!(
            all.iter().all(|byte| *byte == self.fill),
            "{:?}",
            self.layout
        );
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Take {
        size: usize,
        align: usize,
        zeroed: bool,
    },
    Give(usize),
    Resize {
        nth: usize,
        size: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![4 => 1..=64_usize, 3 => 1..=LARGEST + 64, 1 => 1..=20_000_usize];
    prop_oneof![
        4 => (size.clone(), 0..7_u32, any::<bool>()).prop_map(|(size, log2, zeroed)| Step::Take {
            size,
            align: 1 << log2,
            zeroed,
        }),
        3 => any::<usize>().prop_map(Step::Give),
        3 => (any::<usize>(), size).prop_map(|(nth, size)| Step::Resize { nth, size }),
    ]
}

proptest! {
    #[test]
    fn blocks_are_aligned_whole_and_nobody_elses(steps in prop::collection::vec(step(), 1..400)) {
        let lists = FreeLists::new(Counting::default());
        let mut held: Vec<Held> = Vec::new();
        for (nth, step) in steps.into_iter().enumerate() {
            let fill = nth as u8;
            match step {
                Step::Take { size, align, zeroed } => {
                    let layout = Layout::from_size_align(size, align).unwrap();
                    // SAFETY: the size is not zero.
                    let block = unsafe {
                        if zeroed { lists.alloc_zeroed(layout) } else { lists.alloc(layout) }
                    };
                    if zeroed {
                        Held { block, layout, fill: 0 }.assert_whole(size);
                    }
                    held.push(Held { block, layout, fill });
                }
                Step::Give(at) if !held.is_empty() => {
                    let gone = held.swap_remove(at % held.len());
                    gone.assert_whole(gone.layout.size());
                    // SAFETY: the block was taken with this layout and is used no more.
                    unsafe { lists.dealloc(gone.block, gone.layout) };
                    continue;
                }
                Step::Resize { nth, size } if !held.is_empty() => {
                    let at = nth % held.len();
                    let mut one = held.swap_remove(at);
                    // SAFETY: the block was taken with this layout; the size is not zero.
                    one.block = unsafe { lists.realloc(one.block, one.layout, size) };
                    one.assert_whole(size.min(one.layout.size()));
                    one.layout = Layout::from_size_align(size, one.layout.align()).unwrap();
                    held.push(Held { fill, ..one });
                }
                Step::Give(_) | Step::Resize { .. } => continue,
            }
            let new = held.last().unwrap();
            prop_assert_eq!(new.block as usize % new.layout.align(), 0);
            new.fill();
        }
        for one in &held {
            one.assert_whole(one.layout.size());
            // SAFETY: the block was taken with this layout and is used no more.
            unsafe { lists.dealloc(one.block, one.layout) };
        }
        // What is left is on the lists.
        let kept: u32 = lists.lists.iter().map(|list| list.get().blocks).sum();
        prop_assert_eq!(lists.inner.live(), kept as usize);
        prop_assert!(lists.lists.iter().all(|list| list.get().blocks <= MOST));
        free_all(&lists);
    }
}

/// Gives the inner allocator back what the lists keep.
fn free_all(lists: &FreeLists<Counting>) {
    let known: Vec<_> = lists.inner.0.lock().unwrap().clone().into_iter().collect();
    for (block, layout) in known {
        // SAFETY: the blocks are the lists' alone, which are dropped.
        unsafe { lists.inner.dealloc(block as *mut u8, layout) };
    }
}

fn take(lists: &FreeLists<Counting>, size: usize) -> *mut u8 {
    // SAFETY: the size is not zero.
    unsafe { lists.alloc(Layout::from_size_align(size, 1).unwrap()) }
}

fn give(lists: &FreeLists<Counting>, block: *mut u8, size: usize) {
    // SAFETY: the block was taken with this layout and is used no more.
    unsafe { lists.dealloc(block, Layout::from_size_align(size, 1).unwrap()) };
}

#[test]
fn a_small_block_is_taken_again_by_the_next_of_its_size_and_a_large_one_is_not_kept() {
    let lists = FreeLists::new(Counting::default());
    for size in 1..=LARGEST {
        let first = take(&lists, size);
        give(&lists, first, size);
        let live = lists.inner.live();
        let second = take(&lists, size.next_multiple_of(GRAIN));
        assert_eq!((second, lists.inner.live()), (first, live), "{size} bytes");
        give(&lists, second, size);
    }
    assert_eq!(lists.inner.live(), LARGEST / GRAIN);
    let large = take(&lists, LARGEST + 1);
    give(&lists, large, LARGEST + 1);
    assert_eq!(lists.inner.live(), LARGEST / GRAIN);
    free_all(&lists);
}

#[test]
fn a_list_keeps_a_bounded_number_of_blocks() {
    let lists = FreeLists::new(Counting::default());
    let blocks: Vec<_> = (0..MOST * 2).map(|_| take(&lists, 100)).collect();
    for block in blocks {
        give(&lists, block, 100);
    }
    assert_eq!(lists.inner.live(), MOST as usize);
    free_all(&lists);
}

#[test]
fn a_block_grows_in_place_up_to_its_grain() {
    let lists = FreeLists::new(Counting::default());
    let block = take(&lists, 17);
    let layout = Layout::from_size_align(17, 1).unwrap();
    // SAFETY: the block was taken with this layout.
    let same = unsafe { lists.realloc(block, layout, 32) };
    assert_eq!(same, block);
    give(&lists, same, 32);
    free_all(&lists);
}
