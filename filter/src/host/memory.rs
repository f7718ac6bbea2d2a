//! The VM's linear memory, which grows and never shrinks.

/// Its size, in pages of 64 KiB.
pub fn pages() -> u32 {
    u32::try_from(core::arch::wasm32::memory_size(0)).unwrap_or(u32::MAX)
}
