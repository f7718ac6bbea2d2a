//! Counters of one engine → rates over a window.
//!
//! A rate is (newest − base) / elapsed, where the base is the newest point at least one window
//! old, or, before there is one, the oldest point if it is old enough to say anything. A short
//! window would mostly see noise: an engine reports generated tokens in steps. A counter that
//! goes down was reset (the engine restarted) and counts from zero again.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// How a rate is measured.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Time to look back.
    pub length: Duration,
    /// Shortest time that gives a rate at all.
    pub least: Duration,
    /// Least time between remembered points; bounds their number to `length / spacing` + 2.
    pub spacing: Duration,
}

/// Window of the generation throughput.
pub const THROUGHPUT: Window = Window {
    length: Duration::from_secs(1),
    least: Duration::from_secs(1),
    spacing: Duration::from_millis(100),
};

/// Window of the generation throughput of an engine that counts a request's tokens at its end:
/// long enough to see some requests end.
pub const FINISHED_THROUGHPUT: Window = Window {
    length: Duration::from_secs(10),
    least: Duration::from_secs(1),
    spacing: Duration::from_millis(500),
};

/// Window of the drain rate; the reference gives a rate after 10 s as well.
pub const DRAIN: Window = Window {
    length: Duration::from_secs(60),
    least: Duration::from_secs(10),
    spacing: Duration::from_secs(1),
};

/// One counter and the points its rate is made of.
#[derive(Clone, Debug)]
pub struct Counter {
    window: Window,
    /// Last value the engine reported.
    raw: Option<f64>,
    /// What was counted since the first point, resets bridged.
    total: f64,
    points: VecDeque<(Instant, f64)>,
}

impl Counter {
    /// A counter that was not read yet.
    pub fn new(window: Window) -> Self {
        Self {
            window,
            raw: None,
            total: 0.0,
            points: VecDeque::new(),
        }
    }

    /// Takes a value read at `now` and gives the rate per second, if it is known.
    pub fn record(&mut self, now: Instant, raw: f64) -> Option<f64> {
        if let Some(last) = self.raw {
            self.total += if raw >= last { raw - last } else { raw };
        }
        self.raw = Some(raw);
        let age = |at: Instant| now.saturating_duration_since(at);
        // Of the points a window old only the newest can be the base from now on.
        while self
            .points
            .get(1)
            .is_some_and(|point| age(point.0) >= self.window.length)
        {
            self.points.pop_front();
        }
        let rate = self.points.front().and_then(|(at, total)| {
            let elapsed = age(*at);
            (elapsed >= self.window.least).then(|| (self.total - total) / elapsed.as_secs_f64())
        });
        if self
            .points
            .back()
            .is_none_or(|(at, _)| age(*at) >= self.window.spacing)
        {
            self.points.push_back((now, self.total));
        }
        rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    #[test]
    fn throughput_needs_a_second_and_then_follows_the_last_one() {
        let start = Instant::now();
        let mut counter = Counter::new(THROUGHPUT);
        let mut rates = Vec::new();
        for step in 0..=15 {
            // 100 tokens per 200 ms, nothing more after two seconds.
            let tokens = 1000.0 + 100.0 * f64::from(step.min(10));
            rates.push(counter.record(ms(start, 200 * u64::from(step as u32)), tokens));
        }
        assert_eq!(&rates[..5], [None; 5]);
        assert_eq!(&rates[5..=10], [Some(500.0); 6]);
        assert_eq!(&rates[11..], [400.0, 300.0, 200.0, 100.0, 0.0].map(Some));
    }

    #[test]
    fn a_reset_counts_from_zero_and_never_gives_a_negative_rate() {
        let start = Instant::now();
        let mut counter = Counter::new(THROUGHPUT);
        assert_eq!(counter.record(start, 5000.0), None);
        assert_eq!(counter.record(ms(start, 500), 5100.0), None);
        // Restarted: 60 since then.
        assert_eq!(counter.record(ms(start, 1000), 60.0), Some(160.0));
    }

    #[test]
    fn the_drain_rate_looks_back_a_minute_and_keeps_few_points() {
        let start = Instant::now();
        let mut counter = Counter::new(DRAIN);
        assert_eq!(counter.record(start, 0.0), None);
        assert_eq!(counter.record(ms(start, 9_900), 99.0), None);
        assert_eq!(counter.record(ms(start, 10_000), 100.0), Some(10.0));
        for step in 1..=600u32 {
            counter.record(ms(start, 10_000 + 200 * u64::from(step)), 100.0);
        }
        // 130 s in: the last request finished two minutes ago.
        assert_eq!(counter.record(ms(start, 130_200), 100.0), Some(0.0));
        assert!(counter.points.len() <= 62, "{}", counter.points.len());
    }

    #[test]
    fn a_stretched_interval_is_its_own_window() {
        let start = Instant::now();
        let mut counter = Counter::new(THROUGHPUT);
        counter.record(start, 0.0);
        assert_eq!(counter.record(ms(start, 4_000), 400.0), Some(100.0));
        assert_eq!(counter.record(ms(start, 8_000), 1200.0), Some(200.0));
    }
}
