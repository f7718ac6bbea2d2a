//! The tokenizers as one VM holds them: which were pushed, which are loaded, and how fast they
//! count.

use super::catalog::{self, Entry, KEY_INDEX};
use super::lease::{Grant, Lease};
use super::pace::Pace;
use crate::port::{LoadedTokenizer, SharedStore, TokenCounter, TokenizerLoader};
use pd_wire::control::{TokenizerState, TokenizerStatus};
use std::collections::BTreeMap;

/// Time between two looks at what was pushed, in ms.
const LOOK_MS: u64 = 1000;
/// Text that a new counter's first steps are warmed with, and text that its speed is taken from.
const WARM_UP: &str = include_str!("sample_warm_up.txt");
const MEASURED: &str = include_str!("sample_measured.txt");

/// Tokenizers by model, and what this VM made of them.
#[derive(Debug, Default)]
pub struct Tokenizers {
    held: BTreeMap<String, Held>,
    /// The index as last read.
    index: Vec<u8>,
    looked_at: u64,
    lease: Lease,
}

#[derive(Debug)]
struct Held {
    entry: Entry,
    state: State,
}

#[derive(Debug)]
enum State {
    /// No request needed it.
    Idle,
    /// A request wants it; loaded at one of the next ticks.
    Wanted,
    /// Ready.
    Loaded(Loaded),
    /// It cannot be loaded, and why.
    Failed(String),
}

#[derive(Debug)]
struct Loaded {
    counter: Box<dyn TokenCounter>,
    pace: Pace,
    load_micros: u64,
    pages: (u32, u32),
    tokens_per_ms: u64,
    counted: u64,
    /// A text was too long for the speed last measured.
    was_slow: bool,
}

/// What happened at a tick, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadReport {
    /// Model whose tokenizer was loaded.
    pub model: String,
    /// How long it took, in ms, or why it failed.
    pub result: Result<u64, String>,
}

// === impl Tokenizers ===

impl Tokenizers {
    /// True when a tokenizer was pushed for the model.
    pub fn holds(&self, model: &str) -> bool {
        self.held.contains_key(model)
    }

    /// Tokens of a text of about `bytes` bytes, by the model's own tokenizer. `None` when there is
    /// none, it is not loaded yet (this asks for it), or counting would take too long; `text` is
    /// called only when it is counted.
    pub fn count(
        &mut self,
        model: &str,
        bytes: u64,
        text: impl FnOnce() -> Option<String>,
    ) -> Option<u64> {
        let state = &mut self.held.get_mut(model)?.state;
        if let State::Idle = state {
            *state = State::Wanted;
        }
        let State::Loaded(loaded) = state else {
            return None;
        };
        if !loaded.pace.allows(bytes) {
            loaded.was_slow = true;
            return None;
        }
        // The text may hold what `bytes` does not count.
        let text = text()?;
        if !loaded
            .pace
            .allows(u64::try_from(text.len()).unwrap_or(u64::MAX))
        {
            return None;
        }
        loaded.count(&text)
    }

    /// Looks once a second what was pushed, and loads a tokenizer that is wanted when no other VM
    /// is loading one. `own` names this VM.
    pub fn tick<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        loader: &dyn TokenizerLoader,
        own: u32,
        now_ms: u64,
    ) -> Option<LoadReport> {
        if now_ms.saturating_sub(self.looked_at) >= LOOK_MS {
            self.looked_at = now_ms;
            self.look(store);
            self.measure_again();
        }
        let wanted = |held: &&mut Held| matches!(held.state, State::Wanted);
        let held = self.held.values_mut().find(wanted)?;
        // 0 stands for nobody.
        let own = own.max(1);
        match self.lease.take(store, own, held.entry.digest) {
            Grant::Busy => return None,
            Grant::Deadly => {
                let problem = "a VM died while it loaded this file: push another one";
                held.state = State::Failed(problem.to_owned());
            }
            Grant::Taken => {
                let key = catalog::key(held.entry.slot);
                let stored = store.get(&key);
                // Being replaced: the index names the new one at the next look.
                let file = catalog::file_of(stored.as_ref(), held.entry.digest);
                let loaded = file.map(|file| loader.load(file).and_then(Loaded::new));
                Lease::give_back(store, own);
                held.state = match loaded? {
                    Ok(loaded) => State::Loaded(loaded),
                    Err(problem) => State::Failed(problem),
                };
            }
        }
        held.report()
    }

    /// What is held, for the status page of this VM.
    pub fn status(&self, now_ms: u64) -> Vec<TokenizerStatus> {
        self.held.values().map(|held| held.status(now_ms)).collect()
    }

    /// New code is slow until the host has compiled it well, and a VM that was held up seems slow
    /// for longer than it is: where that kept a text from being counted, the speed is taken again.
    fn measure_again(&mut self) {
        for held in self.held.values_mut() {
            if let State::Loaded(loaded) = &mut held.state
                && std::mem::take(&mut loaded.was_slow)
            {
                loaded.measure(MEASURED);
            }
        }
    }

    fn look<S: SharedStore + ?Sized>(&mut self, store: &S) {
        let index = store.get(KEY_INDEX);
        if index.as_ref().is_none_or(|index| index.bytes == self.index) {
            return;
        }
        let entries = catalog::read(index.as_ref());
        self.index = index.map(|index| index.bytes).unwrap_or_default();
        let mut before = std::mem::take(&mut self.held);
        for entry in entries {
            let state = match before.remove(&entry.model) {
                Some(same) if same.entry.digest == entry.digest => same.state,
                // Gone before its successor is loaded: both would take twice the memory.
                Some(Held {
                    state: State::Loaded(_) | State::Wanted,
                    ..
                }) => State::Wanted,
                _ => State::Idle,
            };
            self.held.insert(entry.model.clone(), Held { entry, state });
        }
    }
}

// === impl Held ===

impl Held {
    fn report(&self) -> Option<LoadReport> {
        let result = match &self.state {
            State::Idle | State::Wanted => return None,
            State::Loaded(loaded) => Ok(loaded.load_micros / 1000),
            State::Failed(problem) => Err(problem.clone()),
        };
        let model = self.entry.model.clone();
        Some(LoadReport { model, result })
    }

    fn status(&self, now_ms: u64) -> TokenizerStatus {
        let Entry {
            model,
            digest,
            bytes,
            origin,
            ..
        } = &self.entry;
        let mut status = TokenizerStatus {
            model: model.clone(),
            digest: format!("{digest:016x}"),
            bytes: *bytes,
            agent: origin.agent.clone(),
            epoch: origin.epoch,
            sequence: origin.sequence,
            age_ms: now_ms.saturating_sub(origin.stored_at_ms),
            ..TokenizerStatus::default()
        };
        match &self.state {
            State::Idle => status.state = TokenizerState::Idle,
            State::Wanted => status.state = TokenizerState::Wanted,
            State::Failed(problem) => {
                status.state = TokenizerState::Failed;
                status.error.clone_from(problem);
            }
            State::Loaded(loaded) => {
                status.state = TokenizerState::Loaded;
                status.load_ms = loaded.load_micros / 1000;
                (status.pages_before, status.pages_after) = loaded.pages;
                status.tokens_per_ms = loaded.tokens_per_ms;
                status.counted = loaded.counted;
            }
        }
        status
    }
}

// === impl Loaded ===

impl Loaded {
    /// Counts a text that every tokenizer has tokens for, and takes the speed.
    fn new(tokenizer: LoadedTokenizer) -> Result<Self, String> {
        let LoadedTokenizer {
            counter,
            micros,
            pages,
        } = tokenizer;
        let counted = counter.count(WARM_UP).and_then(|_| counter.count(MEASURED));
        let counted = counted.ok_or("it has no tokens for plain text")?;
        Ok(Self {
            counter,
            pace: Pace::new(MEASURED.len(), counted.micros),
            load_micros: micros,
            pages,
            tokens_per_ms: per_ms(counted.tokens, counted.micros),
            counted: 0,
            was_slow: false,
        })
    }

    fn count(&mut self, text: &str) -> Option<u64> {
        let tokens = self.measure(text)?;
        self.counted = self.counted.saturating_add(1);
        Some(tokens)
    }

    /// Counts and takes the speed.
    fn measure(&mut self, text: &str) -> Option<u64> {
        let counted = self.counter.count(text)?;
        if self.pace.measured(text.len(), counted.micros) {
            self.tokens_per_ms = per_ms(counted.tokens, counted.micros);
        }
        Some(counted.tokens)
    }
}

fn per_ms(tokens: u64, micros: u64) -> u64 {
    tokens.saturating_mul(1000) / micros.max(1)
}

#[cfg(test)]
mod tests;
