//! How fast a VM counts, and which texts it counts within the time a request may take.

/// Time that counting may take from a request and from all others of its worker, in µs.
const BUDGET_MICROS: f64 = 5_000.0;
/// Longest text that is counted whatever the clock says, in bytes.
const MAX_TEXT: u64 = 1 << 20;
/// Shorter texts say nothing about speed, in bytes.
const MIN_SAMPLE: usize = 512;
/// A VM that was held up is trusted with this part of its first speed again.
const FLOOR: f64 = 1.0 / 8.0;

/// Speed of one counter, in bytes per µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    first: f64,
    now: f64,
}

// === impl Pace ===

impl Pace {
    /// As measured when the tokenizer was loaded.
    pub(super) fn new(bytes: usize, micros: u64) -> Self {
        let first = speed(bytes, micros);
        Self { first, now: first }
    }

    /// True when a text of so many bytes is counted in time.
    pub(super) fn allows(&self, bytes: u64) -> bool {
        bytes <= MAX_TEXT && bytes as f64 <= self.now * BUDGET_MICROS
    }

    /// A text was counted. Slower is believed at once, faster by and by. False when the text was
    /// too short to tell.
    pub(super) fn measured(&mut self, bytes: usize, micros: u64) -> bool {
        if bytes < MIN_SAMPLE {
            return false;
        }
        let speed = speed(bytes, micros);
        let smoothed = speed.min((3.0 * self.now + speed) / 4.0);
        self.now = smoothed.max(self.first * FLOOR);
        true
    }
}

fn speed(bytes: usize, micros: u64) -> f64 {
    bytes as f64 / micros.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_longer_than_the_budget_is_not_counted() {
        // 3.4 MB/s: 17,000 bytes in 5 ms.
        let pace = Pace::new(3400, 1000);
        assert!(pace.allows(0) && pace.allows(17_000) && !pace.allows(17_001));
        // A clock that stands still does not open the door for everything.
        let frozen = Pace::new(5000, 0);
        assert!(frozen.allows(MAX_TEXT) && !frozen.allows(MAX_TEXT + 1));
    }

    #[test]
    fn slower_is_believed_at_once_and_faster_by_and_by() {
        let mut pace = Pace::new(4000, 1000);
        assert!(pace.measured(2000, 1000));
        assert!(pace.allows(10_000) && !pace.allows(10_001));
        pace.measured(4000, 1000);
        assert!(pace.allows(12_500) && !pace.allows(12_501));
        // Too short to tell.
        assert!(!pace.measured(100, 100_000));
        assert!(pace.allows(12_500));
        // Held up for a second; short texts are still counted, and bring the speed back.
        pace.measured(4000, 1_000_000);
        assert!(pace.allows(2500) && !pace.allows(2501));
        for _ in 0..20 {
            pace.measured(2400, 600);
        }
        assert!(pace.allows(19_900));
    }
}
