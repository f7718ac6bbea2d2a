//! Bytes per prompt token, learned per model from what prefill engines count.
//!
//! `ratio = B / T`, clamped to 1–8, over sums that fade: a prompt of `b` bytes that an engine
//! counts as `t` tokens makes `B ← d·B + b` and `T ← d·T + t` with `d = 1 − 1/256`. Both start at
//! [`START`] bytes per token with the weight of one prompt of [`START_TOKENS`]. Sums instead of a
//! mean of ratios: the template that a short prompt is wrapped in must not count as its text. A
//! long prompt counts for [`MAX_WEIGHT`] tokens at most, so that one odd giant is soon forgotten.
//!
//! `b` is the number the estimate is made from, so whatever the template, the tools and the JSON
//! around the text add is learned with it. Every VM adds up its own samples and merges them into
//! the model's record once a second; the record is format `u8`, hash of the model's name `u64`,
//! `B` and `T` as `f64`, little endian.

use crate::FORMAT;
use crate::port::{SharedStore, StoreError};
use crate::prefix::model_hash;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Bytes per token of a model that nothing is known of, as the reference assumes.
pub const START: f64 = 4.0;
/// Least and most bytes per token.
pub const RANGE: (f64, f64) = (1.0, 8.0);
/// Weight of [`START`], in tokens.
const START_TOKENS: f64 = 1024.0;
/// What is left of all samples before when one is added.
const FADE: f64 = 1.0 - 1.0 / 256.0;
/// Most tokens a prompt counts for.
const MAX_WEIGHT: f64 = 4096.0;
/// Most prompts a VM learns from between two merges: more tell little that is new, and each costs
/// a look through the engine's reply.
const SAMPLES: u32 = 16;
/// Time between two merges, in ms.
const MERGE_MS: u64 = 1000;
/// Most tries of one compare-and-swap before it is left to the next merge.
const MAX_TRIES: u32 = 4;
/// Length of a record, in bytes.
const RECORD: usize = 25;

/// The ratios of all models this VM was asked for, by ledger slot.
#[derive(Debug, Default)]
pub struct Estimates {
    models: BTreeMap<u16, Learned>,
    merged_at: u64,
    /// Prompts learned from since then.
    samples: u32,
}

/// What is known of one model.
#[derive(Debug)]
struct Learned {
    model: Rc<str>,
    /// What all VMs have learned, as last read.
    shared: Sums,
    /// What this VM has learned since.
    own: Sums,
    /// What is left of `shared` once `own` is added.
    fade: f64,
}

/// Faded sums over prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sums {
    bytes: f64,
    tokens: f64,
}

// === impl Estimates ===

impl Estimates {
    /// Tokens of a prompt of `bytes` bytes; grows with them. The first time a model is asked for,
    /// its record is read.
    pub fn tokens<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        slot: u16,
        model: &Rc<str>,
        bytes: u64,
    ) -> u64 {
        let ratio = self.learned(store, slot, model).shared.ratio();
        // Saturates: no prompt is as long as the numbers that do not fit.
        (bytes as f64 / ratio) as u64
    }

    /// True while there is something to learn until the next merge.
    pub fn are_wanted(&self) -> bool {
        self.samples < SAMPLES
    }

    /// An engine counted `tokens` tokens for a prompt of `bytes` bytes.
    pub fn learn<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        slot: u16,
        model: &Rc<str>,
        bytes: u64,
        tokens: u64,
    ) {
        if bytes == 0 || tokens == 0 {
            return;
        }
        let ratio = (bytes as f64 / tokens as f64).clamp(RANGE.0, RANGE.1);
        let weight = (tokens as f64).min(MAX_WEIGHT);
        self.samples = self.samples.saturating_add(1);
        let learned = self.learned(store, slot, model);
        let sample = Sums {
            bytes: ratio * weight,
            tokens: weight,
        };
        learned.own = learned.own.faded(FADE).plus(sample);
        learned.fade *= FADE;
    }

    /// Once a second: adds what this VM has learned to what all VMs know, and reads that.
    pub fn tick<S: SharedStore + ?Sized>(&mut self, store: &S, now_ms: u64) {
        if now_ms.saturating_sub(self.merged_at) < MERGE_MS {
            return;
        }
        self.merged_at = now_ms;
        self.samples = 0;
        for (slot, learned) in &mut self.models {
            learned.merge(store, *slot);
        }
    }

    /// Model and bytes per token of all models this VM was asked for.
    pub fn ratios(&self) -> impl Iterator<Item = (&str, f64)> {
        self.models
            .values()
            .map(|learned| (&*learned.model, learned.shared.ratio()))
    }

    fn learned<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        slot: u16,
        model: &Rc<str>,
    ) -> &mut Learned {
        let fresh = || Learned {
            model: Rc::clone(model),
            shared: read(store, slot, model).unwrap_or(Sums::START),
            own: Sums::NONE,
            fade: 1.0,
        };
        let learned = self.models.entry(slot).or_insert_with(fresh);
        // The slot of a model that left goes to another one.
        if learned.model != *model {
            *learned = fresh();
        }
        learned
    }
}

// === impl Learned ===

impl Learned {
    /// After [`MAX_TRIES`] lost races, what was learned waits for the next merge.
    fn merge<S: SharedStore + ?Sized>(&mut self, store: &S, slot: u16) {
        let key = key(slot);
        for _ in 0..MAX_TRIES {
            let stored = store.get(&key);
            let held = stored
                .as_ref()
                .and_then(|stored| Sums::parse(&stored.bytes, &self.model));
            self.shared = held.unwrap_or(Sums::START);
            if self.own == Sums::NONE {
                return;
            }
            let merged = self.shared.faded(self.fade).plus(self.own);
            let bytes = merged.encode(&self.model);
            let written = store.replace(&key, stored.as_ref(), &bytes);
            match written {
                Ok(()) => {
                    self.shared = merged;
                    self.own = Sums::NONE;
                    self.fade = 1.0;
                    return;
                }
                Err(StoreError::Raced) => {}
                Err(StoreError::Refused) => return,
            }
        }
    }
}

// === impl Sums ===

impl Sums {
    const NONE: Self = Self {
        bytes: 0.0,
        tokens: 0.0,
    };
    const START: Self = Self {
        bytes: START * START_TOKENS,
        tokens: START_TOKENS,
    };

    fn ratio(self) -> f64 {
        (self.bytes / self.tokens).clamp(RANGE.0, RANGE.1)
    }

    fn faded(self, fade: f64) -> Self {
        Self {
            bytes: self.bytes * fade,
            tokens: self.tokens * fade,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            tokens: self.tokens + other.tokens,
        }
    }

    /// `None` for the record of another model or format, or one that no filter wrote.
    fn parse(record: &[u8], model: &str) -> Option<Self> {
        let (head, sums) = record.split_first_chunk::<9>()?;
        let (bytes, rest) = sums.split_first_chunk::<8>()?;
        let (tokens, rest) = rest.split_first_chunk::<8>()?;
        let sums = Self {
            bytes: f64::from_le_bytes(*bytes),
            tokens: f64::from_le_bytes(*tokens),
        };
        let is_sum = |sum: f64| sum.is_finite() && sum > 0.0;
        (rest.is_empty() && *head == owner(model) && is_sum(sums.bytes) && is_sum(sums.tokens))
            .then_some(sums)
    }

    fn encode(self, model: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(RECORD);
        out.extend_from_slice(&owner(model));
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.tokens.to_le_bytes());
        out
    }
}

/// What a model's record begins with.
fn owner(model: &str) -> [u8; 9] {
    let mut head = [FORMAT; 9];
    for (place, byte) in head.iter_mut().skip(1).zip(model_hash(model).to_le_bytes()) {
        *place = byte;
    }
    head
}

fn read<S: SharedStore + ?Sized>(store: &S, slot: u16, model: &str) -> Option<Sums> {
    Sums::parse(&store.get(&key(slot))?.bytes, model)
}

fn key(slot: u16) -> String {
    format!("pd{FORMAT}.estimate.{slot}")
}

#[cfg(test)]
mod tests;
