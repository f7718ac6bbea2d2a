//! When a combined pod takes a request although a pair could: the pair's side is congested and
//! the combined pod is idle.

/// A combined pod below this is idle, in seconds.
const IDLE: f64 = 0.25;
/// A prefill or decode pod above this is congested, in seconds.
const CONGESTED: f64 = 1.0;
/// Drain rates below this count as this, in requests per second.
const MIN_DRAIN_RATE: f64 = 0.01;

/// Time to drain a pod's queue, `waiting / drain rate`, in seconds. Nothing waiting is 0 whatever
/// the rate; otherwise a missing number gives `None`, which is neither idle nor congested.
#[must_use]
pub fn queue_s(waiting: Option<f64>, drain_rate: Option<f64>) -> Option<f64> {
    let waiting = waiting?;
    if waiting <= 0.0 {
        return Some(0.0);
    }
    Some(waiting / drain_rate?.max(MIN_DRAIN_RATE))
}

/// A combined pod with this queue may take overflow.
#[must_use]
pub fn is_idle(queue_s: f64) -> bool {
    queue_s < IDLE
}

/// A prefill or decode pod with this queue makes requests overflow.
#[must_use]
pub fn is_congested(queue_s: f64) -> bool {
    queue_s > CONGESTED
}
