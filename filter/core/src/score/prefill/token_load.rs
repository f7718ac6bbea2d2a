//! `token_load`: the token-weighted work charged to a pod.

use super::{Load, Weights};

/// `active tokens + kv weight · resident tokens`.
pub(super) fn score(load: &Load, weights: &Weights) -> f64 {
    load.active_tokens + weights.kv * load.kv_tokens
}
