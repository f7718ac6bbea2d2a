//! What is remembered of one pod or pair, and how evidence changes it.

use super::Rules;
use crate::ledger::PodKey;

/// What can be ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// A pod.
    Pod(PodKey),
    /// A prefill pod together with a decode pod: each still serves with others.
    Pair(PodKey, PodKey),
}

/// How somebody failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No connection, or an answer that was cut.
    Transport,
    /// The connection ended before an answer began: an idle one that the engine closed looks the
    /// same, so the first one after a success does not count.
    Cut,
    /// No answer in time.
    Timeout,
    /// A 5xx other than 503.
    Status,
    /// A success whose body is none.
    BadResponse,
    /// The decode pod could not take the prefill pod's KV.
    HandOver,
}

/// Where a subject stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Serves as any other.
    InService,
    /// Ejected.
    Out,
    /// Its time is over: the next request that is chosen for it is its trial.
    Due,
    /// A trial is under way.
    OnTrial,
}

/// What the evidence led to, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Ejected.
    Ejected {
        /// For how long, in ms.
        for_ms: u64,
        /// Failures in a row; 1 when a trial failed.
        failures: u16,
    },
    /// Serves again.
    Back,
}

/// What is remembered of one subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Of whom.
    pub subject: Subject,
    /// The last failure that counted.
    pub cause: Cause,
    /// Failures in a row, at most as many as eject.
    pub failures: u16,
    /// A connection ended before its answer, and that was let pass.
    pub spared: bool,
    /// Ejections with no long calm between them.
    pub times: u8,
    /// It is ejected, or on trial.
    pub ejected: bool,
    /// When the last ejection ends or ended, its trial left out; 0 = never ejected. What became
    /// of requests chosen before is old news.
    pub until_ms: u64,
    /// When the trial under way is given up; 0 = none.
    pub trial_until_ms: u64,
    /// When all this is forgotten, unless it is ejected then.
    pub forget_at_ms: u64,
}

// === impl Subject ===

impl Subject {
    /// The pods concerned.
    pub fn pods(self) -> impl Iterator<Item = PodKey> {
        let (first, second) = match self {
            Self::Pod(pod) => (pod, None),
            Self::Pair(prefill, decode) => (prefill, Some(decode)),
        };
        std::iter::once(first).chain(second)
    }
}

// === impl Cause ===

impl Cause {
    /// Label value.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Transport => "transport",
            Self::Cut => "connection_ended",
            Self::Timeout => "timeout",
            Self::Status => "http_status",
            Self::BadResponse => "bad_response",
            Self::HandOver => "hand_over",
        }
    }

    /// What an engine's own answer says against it: a 5xx, but not the 503 of one that is busy.
    #[must_use]
    pub fn of_status(status: u16) -> Option<Self> {
        matches!(status, 500..=599 if status != 503).then_some(Self::Status)
    }
}

// === impl Phase ===

impl Phase {
    /// True when one more request may be sent.
    #[must_use]
    pub fn admits(self) -> bool {
        matches!(self, Self::InService | Self::Due)
    }
}

// === impl Entry ===

impl Entry {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(subject: Subject) -> Self {
        Self {
            subject,
            cause: Cause::Transport,
            failures: 0,
            spared: false,
            times: 0,
            ejected: false,
            until_ms: 0,
            trial_until_ms: 0,
            forget_at_ms: 0,
        }
    }

    /// Where it stands.
    #[must_use]
    pub fn phase(&self, now_ms: u64) -> Phase {
        if !self.ejected {
            Phase::InService
        } else if now_ms < self.until_ms {
            Phase::Out
        } else if now_ms < self.trial_until_ms {
            Phase::OnTrial
        } else {
            Phase::Due
        }
    }

    /// True when nothing is lost by dropping it.
    #[must_use]
    pub fn is_forgotten(&self, now_ms: u64) -> bool {
        let clean = self.failures == 0 && !self.spared && self.times == 0;
        !self.ejected && (clean || now_ms >= self.forget_at_ms)
    }

    /// True when a success would change anything; `ends` as for [`Entry::works`].
    #[must_use]
    pub fn cares_for_success(&self, ends: bool, chosen_at_ms: u64) -> bool {
        let counts = self.failures > 0 || self.spared;
        chosen_at_ms >= self.until_ms && (self.ejected || (ends && counts))
    }

    /// True when a failure would change anything.
    #[must_use]
    pub fn cares_for_failure(&self, chosen_at_ms: u64) -> bool {
        chosen_at_ms >= self.until_ms
    }

    /// A request chosen now is the trial, if one is due.
    pub fn begin_trial(&mut self, now_ms: u64, rules: &Rules) {
        if self.phase(now_ms) == Phase::Due {
            self.trial_until_ms = now_ms.saturating_add(rules.trial_ms);
        }
    }

    /// It failed. `may_eject` says whether the model can do without it.
    pub fn fails(
        &mut self,
        cause: Cause,
        chosen_at_ms: u64,
        now_ms: u64,
        rules: &Rules,
        may_eject: impl FnOnce() -> bool,
    ) -> Option<Change> {
        if !self.cares_for_failure(chosen_at_ms) {
            return None;
        }
        if !self.ejected && now_ms >= self.forget_at_ms {
            // The failures of one streak come within this time.
            *self = Self {
                forget_at_ms: now_ms.saturating_add(rules.max_ms),
                ..Self::new(self.subject)
            };
        }
        if cause == Cause::Cut && !self.spared {
            self.spared = true;
            self.trial_until_ms = 0;
            return None;
        }
        self.cause = cause;
        if self.ejected {
            return Some(self.eject(1, now_ms, rules));
        }
        self.failures = self.failures.saturating_add(1).min(rules.after);
        (self.failures >= rules.after && may_eject())
            .then(|| self.eject(rules.after, now_ms, rules))
    }

    /// It answered. An answer that has only begun (`ends` false) brings it back on parole: the
    /// next failure ejects again, a leg that ended well clears it.
    pub fn works(
        &mut self,
        ends: bool,
        chosen_at_ms: u64,
        now_ms: u64,
        rules: &Rules,
    ) -> Option<Change> {
        if !self.cares_for_success(ends, chosen_at_ms) {
            return None;
        }
        let back = std::mem::take(&mut self.ejected);
        if back {
            self.trial_until_ms = 0;
            self.forget_at_ms = now_ms.saturating_add(rules.max_ms);
        }
        self.failures = if ends {
            0
        } else {
            rules.after.saturating_sub(1)
        };
        self.spared = false;
        back.then_some(Change::Back)
    }

    fn eject(&mut self, failures: u16, now_ms: u64, rules: &Rules) -> Change {
        let doubled = rules
            .base_ms
            .checked_shl(u32::from(self.times))
            .filter(|time| time >> self.times == rules.base_ms);
        let for_ms = doubled.unwrap_or(u64::MAX).min(rules.max_ms);
        self.times = self.times.saturating_add(1);
        self.ejected = true;
        self.until_ms = now_ms.saturating_add(for_ms);
        self.trial_until_ms = 0;
        self.spared = false;
        Change::Ejected { for_ms, failures }
    }
}
