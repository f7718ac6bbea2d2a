//! `prefix_cache`: cache hits first, request counts second.

use super::{Batch, Load};

/// `(100 − match percent) · 0.1 + requests / max requests`.
pub(super) fn score(load: &Load, batch: &Batch) -> f64 {
    (100.0 - load.match_percent) * 0.1 + load.requests / batch.max_requests
}
