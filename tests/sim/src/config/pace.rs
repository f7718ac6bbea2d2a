//! The delays of an engine, which a test may change while it runs. All times are milliseconds.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The delays of a running engine, which the admin endpoint may change.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pace {
    /// Fixed time to compute any prompt.
    pub prefill_delay_ms: f64,
    /// Time to compute 1024 bytes of prompt.
    pub prefill_ms_per_kilobyte: f64,
    /// Gap between generated tokens.
    pub token_interval_ms: f64,
    /// Time to pull remote KV.
    pub transfer_delay_ms: f64,
    /// Tokens generated unless the request asks for fewer.
    pub tokens: u32,
    /// How long one leg waits for the other.
    pub lease_ms: u64,
}

/// New values for some of a [`Pace`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaceChange {
    /// See [`Pace::prefill_delay_ms`].
    pub prefill_delay_ms: Option<f64>,
    /// See [`Pace::prefill_ms_per_kilobyte`].
    pub prefill_ms_per_kilobyte: Option<f64>,
    /// See [`Pace::token_interval_ms`].
    pub token_interval_ms: Option<f64>,
    /// See [`Pace::transfer_delay_ms`].
    pub transfer_delay_ms: Option<f64>,
    /// See [`Pace::tokens`].
    pub tokens: Option<u32>,
    /// See [`Pace::lease_ms`]; applies to KV held from now on.
    pub lease_ms: Option<u64>,
}

/// Why a configuration cannot be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// A number is outside what the engine can hold.
    OutOfRange(&'static str),
}

// === impl Pace ===

impl Pace {
    /// This pace with the given values replaced.
    ///
    /// # Errors
    /// A value outside its range.
    pub fn changed(mut self, change: PaceChange) -> Result<Self, ConfigError> {
        fn set<T>(slot: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *slot = value;
            }
        }
        set(&mut self.prefill_delay_ms, change.prefill_delay_ms);
        set(
            &mut self.prefill_ms_per_kilobyte,
            change.prefill_ms_per_kilobyte,
        );
        set(&mut self.token_interval_ms, change.token_interval_ms);
        set(&mut self.transfer_delay_ms, change.transfer_delay_ms);
        set(&mut self.tokens, change.tokens);
        set(&mut self.lease_ms, change.lease_ms);
        self.validate()?;
        Ok(self)
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        // A day: keeps every deadline representable.
        const LONGEST_MS: f64 = 86_400_000.0;
        let millis = [
            ("prefill_delay_ms", self.prefill_delay_ms),
            ("prefill_ms_per_kilobyte", self.prefill_ms_per_kilobyte),
            ("token_interval_ms", self.token_interval_ms),
            ("transfer_delay_ms", self.transfer_delay_ms),
        ];
        for (name, value) in millis {
            if !(0.0..=LONGEST_MS).contains(&value) {
                return Err(ConfigError::OutOfRange(name));
            }
        }
        if self.lease_ms == 0 || self.lease_ms > 86_400_000 {
            return Err(ConfigError::OutOfRange("lease_ms"));
        }
        if self.tokens == 0 || self.tokens > 1 << 20 {
            return Err(ConfigError::OutOfRange("tokens"));
        }
        Ok(())
    }

    /// Time to compute a prompt of this many bytes.
    pub(crate) fn prefill(&self, prompt_bytes: usize) -> Duration {
        let kilobytes = prompt_bytes as f64 / 1024.0;
        millis(self.prefill_delay_ms + self.prefill_ms_per_kilobyte * kilobytes)
    }

    /// Gap between tokens.
    pub(crate) fn token_interval(&self) -> Duration {
        millis(self.token_interval_ms)
    }

    /// Time to pull remote KV.
    pub(crate) fn transfer(&self) -> Duration {
        millis(self.transfer_delay_ms)
    }

    /// Time KV is held.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
}

fn millis(value: f64) -> Duration {
    Duration::try_from_secs_f64(value / 1000.0).unwrap_or(Duration::ZERO)
}

// === impl ConfigError ===

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange(name) => write!(f, "{name} is out of range"),
        }
    }
}

impl std::error::Error for ConfigError {}
