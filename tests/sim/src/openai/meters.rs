//! What is measured about requests, whatever the engine calls it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::answer::Finish;
use crate::core::Count;
use crate::measure::Histogram;

const FIRST_TOKEN_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_SECONDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// Buckets of what takes as long as a request.
const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

const MICROS: f64 = 1e6;

/// A rate is measured over at least this.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// An answered request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) finish: Finish,
    pub(crate) prompt_tokens: u32,
    /// Tokens generated, over all choices.
    pub(crate) tokens: u32,
    pub(crate) arrived: Instant,
    /// When work on the prompt began.
    pub(crate) started: Instant,
    pub(crate) first_token: Instant,
}

/// The counts and histograms of a process.
pub(crate) struct Meters {
    pub(crate) stop: Count,
    pub(crate) length: Count,
    pub(crate) aborted: Count,
    pub(crate) failed: Count,
    pub(crate) prompt_tokens: Count,
    /// Counted when a request ends.
    pub(crate) generated: Count,
    /// Counted token by token.
    pub(crate) decoded: Count,
    pub(crate) first_token: Histogram,
    pub(crate) per_token: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    rate: Mutex<Rate>,
}

/// Tokens per second since a while ago.
struct Rate {
    since: Instant,
    tokens: u64,
    value: f64,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let request = || Histogram::new(REQUEST_SECONDS, MICROS);
        Self {
            stop: Count::default(),
            length: Count::default(),
            aborted: Count::default(),
            failed: Count::default(),
            prompt_tokens: Count::default(),
            generated: Count::default(),
            decoded: Count::default(),
            first_token: Histogram::new(FIRST_TOKEN_SECONDS, MICROS),
            per_token: Histogram::new(TOKEN_SECONDS, MICROS),
            e2e: request(),
            queue: request(),
            prefill: request(),
            decode: request(),
            rate: Mutex::new(Rate {
                since: Instant::now(),
                tokens: 0,
                value: 0.0,
            }),
        }
    }

    /// A request was answered.
    pub(crate) fn ended(&self, ended: Ended) {
        let Ended { finish, tokens, .. } = ended;
        match finish {
            Finish::Stop => self.stop.up(),
            Finish::Length => self.length.up(),
            Finish::Abort => self.aborted.up(),
        }
        self.prompt_tokens.add(u64::from(ended.prompt_tokens));
        self.generated.add(u64::from(tokens));
        let now = Instant::now();
        let since = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        self.first_token
            .observe(since(ended.arrived, ended.first_token));
        self.e2e.observe(since(ended.arrived, now));
        self.queue.observe(since(ended.arrived, ended.started));
        self.prefill
            .observe(since(ended.started, ended.first_token));
        let decode = since(ended.first_token, now);
        self.decode.observe(decode);
        if tokens > 1 {
            self.per_token.observe(decode / f64::from(tokens - 1));
        }
    }

    /// Generated tokens per second.
    pub(crate) fn throughput(&self) -> f64 {
        let mut rate = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let (elapsed, tokens) = (rate.since.elapsed(), self.decoded.get());
        if elapsed >= RATE_WINDOW {
            let new = tokens.saturating_sub(rate.tokens) as f64;
            *rate = Rate {
                since: Instant::now(),
                tokens,
                value: new / elapsed.as_secs_f64(),
            };
        }
        rate.value
    }

    /// A new process starts at zero.
    pub(crate) fn reset(&self) {
        for count in [
            &self.stop,
            &self.length,
            &self.aborted,
            &self.failed,
            &self.prompt_tokens,
            &self.generated,
            &self.decoded,
        ] {
            count.reset();
        }
        for histogram in [
            &self.first_token,
            &self.per_token,
            &self.e2e,
            &self.queue,
            &self.prefill,
            &self.decode,
        ] {
            histogram.reset();
        }
    }
}
