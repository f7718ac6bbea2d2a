//! The monotonic clock that all VMs of the process share, and what Unix time it is.

/// Milliseconds of the shared monotonic clock.
///
/// Read through WASI itself: `Instant` hides the process-wide origin that lets one VM read the
/// times another one wrote.
pub fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

/// Microseconds of the same clock, to measure with.
#[cfg(feature = "tokenizers")]
pub fn now_us() -> u64 {
    now_ns() / 1000
}

fn now_ns() -> u64 {
    let mut time = 0u64;
    // SAFETY: `time` is a valid place for the one value the call writes. A host without the
    // clock leaves zero, and no timer fires.
    unsafe { clock_time_get(MONOTONIC, 1, &raw mut time) };
    time
}

/// How far the Unix clock is ahead of the shared monotonic one, in ms.
pub fn unix_ahead_ms() -> u64 {
    let mut time = 0u64;
    // SAFETY: as above.
    unsafe { clock_time_get(REALTIME, 1, &raw mut time) };
    (time / 1_000_000).saturating_sub(now_ms())
}

#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn clock_time_get(id: u32, precision: u64, time: *mut u64) -> u32;
}

/// WASI's id of the Unix clock.
const REALTIME: u32 = 0;
/// WASI's id of the monotonic clock.
const MONOTONIC: u32 = 1;
