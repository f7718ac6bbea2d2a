//! `least_request`: the pod with the fewest outstanding prefill requests.

use super::Load;

/// The request count.
pub(super) fn score(load: &Load) -> f64 {
    load.requests
}
