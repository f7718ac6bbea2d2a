//! How long a decode leg may be silent.
//!
//! The limits are data ([`Timers`]); [`Watch`] knows what they are measured from. A leg without a
//! prefill, and a leg whose prefill has not succeeded, has the backstop alone.

use crate::engine::Engine;
use pd_wire::knobs::Knobs;

/// Limits of a decode leg, in ms. `None` = no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timers {
    /// From the prefill's success to the first body chunk of a streamed answer. Headers do not end
    /// it: engines send them before the first token.
    pub(super) first_response: Option<u64>,
    /// From the prefill's success to the end of an answer that is not streamed.
    pub(super) response: Option<u64>,
    /// From a body chunk of a streamed answer, and not before the prefill's success, to the next.
    pub(super) stream_idle: Option<u64>,
    /// From any sign of life of the pod, or from when the request was sent, to the next.
    pub(super) backstop: u64,
}

/// One decode leg under its limits. Times are in ms of the shared clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    timers: Timers,
    /// The client asked for a stream.
    streams: bool,
    prefilled_at: Option<u64>,
    /// When the pod was last heard of, or the request was sent.
    heard_at: u64,
    /// A body chunk has come.
    begun: bool,
}

/// The limit that a silent leg has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdue {
    /// The limit, in ms.
    pub(super) limit_ms: u64,
    /// What was awaited.
    pub(super) awaited: Awaited,
}

/// What a silent leg owes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// The first body chunk.
    Start,
    /// The whole of an answer that is not streamed.
    End,
    /// The next chunk.
    Next,
}

// === impl Timers ===

impl Timers {
    /// The limits that the settings of a request give a leg at a pod of `engine`.
    pub(super) fn of(knobs: &Knobs, engine: &Engine) -> Self {
        let some = |ms: u64| (ms > 0).then_some(ms);
        let by_default = engine.answers_after_prefill();
        let given = knobs.timers_given;
        Self {
            first_response: some(knobs.decode_first_response_timeout_ms)
                .filter(|_| by_default || given.first_response),
            response: some(knobs.decode_response_timeout_ms),
            stream_idle: some(knobs.decode_stream_idle_timeout_ms)
                .filter(|_| by_default || given.stream_idle),
            backstop: knobs.stream_idle_backstop_ms,
        }
    }
}

// === impl Watch ===

impl Watch {
    /// A leg that is sent now.
    pub(super) fn new(timers: Timers, streams: bool, now_ms: u64) -> Self {
        Self {
            timers,
            streams,
            prefilled_at: None,
            heard_at: now_ms,
            begun: false,
        }
    }

    /// The prefill has succeeded: the decode pod owes an answer. Counts once.
    pub(super) fn prefilled(&mut self, now_ms: u64) {
        self.prefilled_at.get_or_insert(now_ms);
    }

    /// Response headers came.
    pub(super) fn headers(&mut self, now_ms: u64) {
        self.heard_at = now_ms;
    }

    /// A body chunk came.
    pub(super) fn chunk(&mut self, now_ms: u64) {
        self.heard_at = now_ms;
        self.begun = true;
    }

    /// For `ms` nobody listened, so that time was no silence.
    pub(super) fn unheard_for(&mut self, ms: u64) {
        self.heard_at = self.heard_at.saturating_add(ms);
        if let Some(at) = &mut self.prefilled_at {
            *at = at.saturating_add(ms);
        }
    }

    /// When the first limit is reached.
    pub(super) fn deadline(&self) -> u64 {
        let own = self.own_timer().map(|(at, _)| at);
        own.unwrap_or(u64::MAX).min(self.backstop_at())
    }

    /// The limit that has been reached, if one has.
    pub(super) fn overdue(&self, now_ms: u64) -> Option<Overdue> {
        if let Some((at, overdue)) = self.own_timer()
            && at <= now_ms
        {
            return Some(overdue);
        }
        (self.backstop_at() <= now_ms).then_some(Overdue {
            limit_ms: self.timers.backstop,
            awaited: if self.begun {
                Awaited::Next
            } else {
                Awaited::Start
            },
        })
    }

    fn backstop_at(&self) -> u64 {
        self.heard_at.saturating_add(self.timers.backstop)
    }

    /// The one of the three timers that runs, and when it ends.
    fn own_timer(&self) -> Option<(u64, Overdue)> {
        let prefilled_at = self.prefilled_at?;
        let (limit_ms, since, awaited) = match (self.streams, self.begun) {
            (false, _) => (self.timers.response?, prefilled_at, Awaited::End),
            (true, false) => (self.timers.first_response?, prefilled_at, Awaited::Start),
            (true, true) => {
                let since = self.heard_at.max(prefilled_at);
                (self.timers.stream_idle?, since, Awaited::Next)
            }
        };
        Some((
            since.saturating_add(limit_ms),
            Overdue { limit_ms, awaited },
        ))
    }
}

// === impl Awaited ===

impl Awaited {
    /// The words of the client's answer.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Start => "start responding",
            Self::End => "finish responding",
            Self::Next => "go on responding",
        }
    }

    /// Label value of the timer.
    pub(super) fn phase(self) -> &'static str {
        match self {
            Self::Start | Self::End => "first_response",
            Self::Next => "stream_idle",
        }
    }
}
