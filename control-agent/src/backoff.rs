//! Waiting times that double up to a limit, with jitter so that agents do not act in step.

use std::time::Duration;

/// Doubling waits between `least` and `most`.
#[derive(Clone, Debug)]
pub struct Backoff {
    least: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `least`; no wait is longer than `most`.
    pub fn new(least: Duration, most: Duration) -> Self {
        Self {
            least,
            most: most.max(least),
            next: least,
        }
    }

    /// The next wait: between half and all of the doubling step. `word` is a random word.
    pub fn wait(&mut self, word: u64) -> Duration {
        let step = self.next;
        self.next = step.saturating_mul(2).min(self.most);
        step.mul_f64(0.5 + 0.5 * fraction(word))
    }

    /// Starts again at the least wait, after a success.
    pub fn reset(&mut self) {
        self.next = self.least;
    }
}

/// A random word; zero when the system has none to give (jitter is then constant, which is
/// harmless).
pub fn random_word() -> u64 {
    getrandom::u64().unwrap_or(0)
}

/// Maps a random word to [0, 1).
pub fn fraction(word: u64) -> f64 {
    // 53 bits are what an f64 holds exactly.
    (word >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_start_over_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_millis(350));
        let waits: Vec<_> = (0..4).map(|_| backoff.wait(u64::MAX).as_millis()).collect();
        // fraction(MAX) is so close to 1 that each wait is its whole step.
        assert_eq!(waits, [100, 200, 350, 350]);
        backoff.reset();
        assert_eq!(backoff.wait(0), Duration::from_millis(50));
    }

    #[test]
    fn a_fraction_stays_below_one() {
        assert_eq!(fraction(0), 0.0);
        assert!(fraction(u64::MAX) < 1.0);
    }
}
