//! `load_balancing`: requests and slowness, against free KV cache.

use super::{Batch, Load, Weights};

/// `(w_run · n/max n + w_thru · (1 − throughput/max throughput)) / (free / max free)`.
pub(super) fn score(load: &Load, batch: &Batch, weights: &Weights) -> f64 {
    let requests = load.requests() / batch.max_requests;
    let throughput = load.throughput.unwrap_or(0.0) / batch.max_throughput;
    let free = load.free_percent() / batch.max_free;
    (weights.running * requests + weights.throughput * (1.0 - throughput)) / free
}
