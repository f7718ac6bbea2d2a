//! The clock of a gateway: moved by tests only.

/// Nanoseconds in a millisecond.
pub(crate) const NANOS_PER_MS: u64 = 1_000_000;

/// Monotonic and wall time, both under test control.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    /// Monotonic nanoseconds. Starts well above zero so that a guest may subtract from it.
    pub(crate) monotonic: u64,
    /// Wall-clock nanoseconds since the epoch.
    pub(crate) wall: u64,
    /// Nanoseconds that go by between two reads, in place of what the guest's work takes.
    pub(crate) per_read: u64,
    start: u64,
}

// === impl Clock ===

impl Default for Clock {
    fn default() -> Self {
        let start = 1_000_000 * 1_000 * NANOS_PER_MS;
        Self {
            monotonic: start,
            wall: 1_800_000_000 * 1_000 * NANOS_PER_MS,
            per_read: 0,
            start,
        }
    }
}

impl Clock {
    /// Milliseconds since the gateway started.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        (self.monotonic - self.start) / NANOS_PER_MS
    }

    /// Moves both clocks forward to the monotonic instant `to`; never backwards.
    pub(crate) fn advance_to(&mut self, to: u64) {
        let step = to.saturating_sub(self.monotonic);
        self.monotonic += step;
        self.wall += step;
    }

    /// Steps the wall clock alone, as NTP may.
    pub(crate) fn step_wall(&mut self, ms: i64) {
        self.wall = self
            .wall
            .saturating_add_signed(ms.saturating_mul(NANOS_PER_MS as i64));
    }
}
