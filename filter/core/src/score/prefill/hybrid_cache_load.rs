//! `hybrid_cache_load`: the cache decides between idle pods, the load between busy ones.

use super::{Load, Weights, token_load};

/// `load · discount`, or the bare discount of an idle pod (load below 1), with
/// `discount = 1 − (match / 100)² · factor`. The square keeps small matches from deciding.
pub(super) fn score(load: &Load, weights: &Weights) -> f64 {
    let matched = load.match_percent / 100.0;
    let discount = 1.0 - matched * matched * weights.hybrid_factor;
    let tokens = token_load::score(load, weights);
    if tokens < 1.0 {
        discount
    } else {
        tokens * discount
    }
}
