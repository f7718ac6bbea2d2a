//! Formulas that rank pods. Numbers in, number out; **lower is better** everywhere.
//!
//! Nothing here knows pods, ledgers or snapshots: [`crate::select`] fills the inputs. The formulas
//! are AIBrix's ("Pod Selection Algorithm"), so that the same load gives the same ranking. Floats
//! go through `libm`, so native and wasm builds agree bit by bit. A score that is not finite makes
//! a pod ineligible; the caller counts it.

pub mod decode;
pub mod overflow;
pub mod prefill;

/// Least divisor of prefill scores in the pair score.
const PREFILL_FLOOR: f64 = 1.0;
/// Least divisor of decode scores in the pair score.
const DECODE_FLOOR: f64 = 0.01;

/// Largest of the scores, losers included, and never below the floor of their side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Largest(f64);

impl Largest {
    /// Divisor of prefill scores before any pod was scored.
    #[must_use]
    pub const fn prefill() -> Self {
        Self(PREFILL_FLOOR)
    }

    /// Divisor of decode scores before any pod was scored.
    #[must_use]
    pub const fn decode() -> Self {
        Self(DECODE_FLOOR)
    }

    /// Takes one more score into account.
    pub fn take(&mut self, score: f64) {
        self.0 = self.0.max(score);
    }

    /// The score relative to the largest one.
    #[must_use]
    pub fn share(self, score: f64) -> f64 {
        score / self.0
    }
}

/// Score of a pair: `prefill / max_prefill + decode / max_decode`.
#[must_use]
pub fn pair(prefill: f64, max_prefill: Largest, decode: f64, max_decode: Largest) -> f64 {
    max_prefill.share(prefill) + max_decode.share(decode)
}

#[cfg(test)]
mod tests;
