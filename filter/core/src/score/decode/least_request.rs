//! `least_request`: the pod with the fewest running and pending requests.

use super::Load;

/// Running and pending requests.
pub(super) fn score(load: &Load) -> f64 {
    load.requests()
}
