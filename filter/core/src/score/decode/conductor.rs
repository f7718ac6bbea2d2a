//! `conductor`: estimated time between two tokens of a request, in ms.
//!
//! The reference divides by the batch instead of multiplying, against its own description; here
//! the estimate grows with the batch.

use super::Load;

/// Time per request in the batch when the throughput is unknown, in ms.
const UNKNOWN_MS: f64 = 20.0;
/// Cache usage above which the penalty applies.
const PRESSURE: f64 = 0.9;
/// Penalty of a pod that may have to evict.
const PENALTY: f64 = 1.5;

/// `1000 · max(n, 1) / throughput`, or 20 ms per request when no throughput is known; times 1.5
/// above 90 % cache usage.
pub(super) fn score(load: &Load) -> f64 {
    let requests = load.requests().max(1.0);
    let between_tokens = match load.throughput {
        Some(throughput) if throughput > 0.0 => 1000.0 * requests / throughput,
        _ => UNKNOWN_MS * requests,
    };
    let pressed = load.kv_usage.is_some_and(|usage| usage > PRESSURE);
    if pressed {
        between_tokens * PENALTY
    } else {
        between_tokens
    }
}
