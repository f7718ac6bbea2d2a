//! Free lists by size (segregated free lists) in front of an allocator: a small block that is given
//! back is kept for the next one of its size.
//!
//! A request takes many blocks, nearly all of them small and short-lived. Taking one from a list is a
//! few instructions where a general allocator splits and merges, and the block that was given back
//! last is the one still in the processor's cache. No kept library does this for
//! wasm: those that are fast want threads and `mmap`, those for wasm want to be small.

#[cfg(test)]
mod tests;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ptr::{self, null_mut};

/// Blocks have a multiple of this many bytes, and are aligned to it.
const GRAIN: usize = 16;
/// Largest block that is kept, in bytes.
const LARGEST: usize = 512;
/// Most blocks kept of one size; all sizes together come to 1 MB in each VM.
const MOST: u32 = 128;
/// `A` behind lists of free small blocks.
///
/// Blocks that were taken here must be given back here: small ones are larger at `A` than asked. So a
/// module must not export its C library's `malloc` for the host to use.
#[derive(Debug)]
pub struct FreeLists<A> {
    inner: A,
    lists: [Cell<List>; LARGEST / GRAIN],
}

// SAFETY: without atomics a module has one thread, so nothing is shared.
#[cfg(all(target_family = "wasm", not(target_feature = "atomics")))]
unsafe impl<A> Sync for FreeLists<A> {}

/// Free blocks of one size.
#[derive(Clone, Copy, Debug)]
struct List {
    /// The last one given back; its first bytes name the next.
    first: *mut Free,
    blocks: u32,
}

/// A free block.
struct Free {
    next: *mut Free,
}

// === impl FreeLists ===

impl<A> FreeLists<A> {
    /// Empty lists in front of `inner`.
    pub const fn new(inner: A) -> Self {
        const EMPTY: List = List {
            first: null_mut(),
            blocks: 0,
        };
        Self {
            inner,
            lists: [const { Cell::new(EMPTY) }; LARGEST / GRAIN],
        }
    }

    /// The list of blocks for `layout`; `None` for what is not kept.
    #[inline]
    fn list(&self, layout: Layout) -> Option<&Cell<List>> {
        if layout.align() > GRAIN {
            return None;
        }
        self.lists.get(layout.size().checked_sub(1)? / GRAIN)
    }

    /// What is asked of the inner allocator for `layout`: whole grains where blocks are kept.
    #[inline]
    fn whole(&self, layout: Layout) -> Layout {
        if self.list(layout).is_none() {
            return layout;
        }
        let size = layout.size().next_multiple_of(GRAIN);
        Layout::from_size_align(size, GRAIN).unwrap_or(layout)
    }
}

impl<A: GlobalAlloc> FreeLists<A> {
    /// A block of the inner allocator's.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::alloc`].
    #[cold]
    #[inline(never)]
    unsafe fn fetch(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller promises that the size is not zero.
        unsafe { self.inner.alloc(self.whole(layout)) }
    }

    /// Gives a block back to the inner allocator.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::dealloc`].
    #[cold]
    #[inline(never)]
    unsafe fn surrender(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the inner allocator gave the block with this layout.
        unsafe { self.inner.dealloc(block, self.whole(layout)) }
    }
}

// SAFETY: a block is on a list or with one caller, never both: `dealloc` puts it there, `alloc`
// takes it off. Blocks of a list are those of one layout of the inner allocator, to which every
// layout that maps to the list fits, and they go back to it with that layout.
unsafe impl<A: GlobalAlloc> GlobalAlloc for FreeLists<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(list) = self.list(layout)
            && let List { first, blocks } = list.get()
            && !first.is_null()
        {
            list.set(List {
                // SAFETY: blocks on a list are free and begin with their link.
                first: unsafe { (*first).next },
                blocks: blocks.saturating_sub(1),
            });
            return first.cast();
        }
        // SAFETY: the caller's promise.
        unsafe { self.fetch(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if let Some(list) = self.list(layout)
            && let List { first, blocks } = list.get()
            && blocks < MOST
        {
            let free: *mut Free = block.cast();
            // SAFETY: the block is the caller's no more, aligned to `GRAIN`, with room for a link.
            unsafe { free.write(Free { next: first }) };
            list.set(List {
                first: free,
                blocks: blocks.saturating_add(1),
            });
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { self.surrender(block, layout) }
    }

    #[inline(never)]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size, rounded up, is a valid one.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (self.list(layout), self.list(new)) {
            // SAFETY: the caller's promise.
            (None, None) => return unsafe { self.inner.realloc(block, layout, size) },
            (Some(from), Some(to)) if ptr::eq(from, to) => return block,
            _ => {}
        }
        // SAFETY: the caller promises that the size is not zero.
        let moved = unsafe { self.alloc(new) };
        if !moved.is_null() {
            // SAFETY: both have that many bytes; the new one is no other's.
            unsafe { ptr::copy_nonoverlapping(block, moved, layout.size().min(size)) };
            // SAFETY: the caller's promise.
            unsafe { self.dealloc(block, layout) };
        }
        moved
    }
}
