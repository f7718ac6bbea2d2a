//! `conductor`: estimated time to first token, in ms.
//!
//! Queue, then cached prefix, then the rest, whose cost grows faster than its length because of
//! attention. Lengths are bytes of text. The constants are AIBrix's.

use super::{Batch, Load};

/// Length whose cost stands for a queued request when the pod reports no mean.
const TYPICAL_LENGTH: f64 = 512.0;

/// `requests · mean prefill ms + prefix(matched) + prefill(unmatched)`.
pub(super) fn score(load: &Load, batch: &Batch) -> f64 {
    let mean_ms = load
        .prefill_ms
        .unwrap_or_else(|| prefill_ms(TYPICAL_LENGTH));
    let matched = batch.text_bytes * load.match_percent / 100.0;
    load.requests * mean_ms + prefix_ms(matched) + prefill_ms(batch.text_bytes - matched)
}

/// Time to read a cached prefix: `0.005 · length + 1`, nothing for none.
fn prefix_ms(length: f64) -> f64 {
    if length > 0.0 {
        0.005 * length + 1.0
    } else {
        0.0
    }
}

/// Time to compute what is not cached: `0.001 · length^1.5 + 5`, nothing for none.
fn prefill_ms(length: f64) -> f64 {
    if length > 0.0 {
        0.001 * length * libm::sqrt(length) + 5.0
    } else {
        0.0
    }
}
