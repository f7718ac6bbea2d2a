//! Ejection: pods, and pairs of pods, that failed several times in a row are left alone for a
//! while.
//!
//! ```text
//!             N failures in a row                  its time is over
//! in service ─────────────────────▶ out of service ────────────────▶ due for a trial
//!     ▲  ▲                                ▲                                │ one request
//!     │  └── an answer ── on trial ◀──────┼────────────────────────────────┘ of one VM
//!     │                      └── failure ─┘ for twice the time
//!     └── calm for the longest time: the time starts small again
//! ```
//!
//! A *pair* fails when the decode pod could not take the KV that the prefill pod handed over:
//! transfers between two pods can break while both serve everybody else, and then only their
//! meeting is to be avoided. What fails of one pod alone is that pod's.
//!
//! Rules:
//! - Only what says something about the pod counts: no connection, a cut answer, silence, a 5xx.
//!   Overload (429, 503), the request's own fault (4xx) and a client that left say nothing. The
//!   first connection that ends before its answer does not count either: engines close idle
//!   connections, and a request may be under way on one.
//! - What becomes of requests chosen before an ejection is over is old news, its trial excepted:
//!   it neither lengthens nor ends it.
//! - Never more than a share of the model's pairs, never the last one ([`view`]). And when a
//!   request finds nobody among those left, it is served as if nobody were ejected: a wrong
//!   ejection costs some quality of the choice and never an answer.
//! - A trial is one ordinary request, so it always is a whole pair. It is the first that may go
//!   there and is no retry; of several VMs the one that wins the swap of the record sends it. A
//!   trial that says nothing is given up after a time, and another request may try.
//!
//! One bounded record per model ([`record`]), shared by all VMs, is read at the tick. A request
//! reads this VM's memory only. A write happens at a failure, at the first success after
//! failures, and for a trial; a healthy fleet writes nothing. The alternative, counting in each
//! VM and sharing ejections alone, needs N failures *per VM*: with sixteen workers a dead pod
//! would cost eighty requests.

mod choose;
mod entry;
mod record;
mod report;
mod view;

#[cfg(test)]
mod tests;

pub use choose::choose;
pub use entry::{Cause, Change, Entry, Phase, Subject};
pub use record::MAX_ENTRIES;
pub use view::View;

use crate::fleet::{FleetCache, ModelFleet};
use crate::ledger::PodKey;
use crate::port::{SharedStore, StoreError};
use pd_wire::knobs::Knobs;
use std::collections::BTreeMap;

/// Tries of one write before it is given up: the next failure or success tries again.
const MAX_TRIES: u32 = 8;
/// Records read at one tick (at about 1 µs each); with more models each is read every few ticks.
const READ_PER_TICK: usize = 64;
/// Time between two looks for what can be forgotten, in ms.
const TIDY_MS: u64 = 1000;

/// When and for how long something is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Failures in a row that eject; 0 = nothing is ever ejected.
    pub after: u16,
    /// Time of a first ejection, in ms; doubled with each further one.
    pub base_ms: u64,
    /// Longest time of an ejection, and the time after which one is forgotten, in ms.
    pub max_ms: u64,
    /// Share of the model's pairs that may be ejected at a time, in percent.
    pub percent: u64,
    /// Time after which a trial that said nothing is given up, in ms.
    pub trial_ms: u64,
}

/// What the end of a leg says about who served it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Who served.
    pub subject: Subject,
    /// How it went.
    pub outcome: Outcome,
    /// When the request's pods were chosen, in ms of the shared clock.
    pub chosen_at_ms: u64,
}

/// How a leg went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The engine has begun to answer: enough to end an ejection, on parole.
    Answers,
    /// The leg ended well.
    Works,
    /// It did not.
    Fails(Cause),
}

/// The ejections as one VM knows them.
#[derive(Debug, Default)]
pub struct Ejections {
    /// Entries by the model's slot; models without any are left out.
    models: BTreeMap<u16, Vec<Entry>>,
    /// The slot at which the next tick goes on reading.
    next: u16,
    tidied_at_ms: u64,
}

// === impl Rules ===

impl From<&Knobs> for Rules {
    fn from(knobs: &Knobs) -> Self {
        Self {
            after: u16::try_from(knobs.eject_after_failures).unwrap_or(u16::MAX),
            base_ms: knobs.eject_time_ms,
            max_ms: knobs.eject_time_max_ms,
            percent: knobs.eject_max_percent,
            trial_ms: knobs.eject_time_ms.max(knobs.prefill_request_timeout_ms),
        }
    }
}

// === impl Ejections ===

impl Ejections {
    /// Who is to be avoided now; `None` when nobody is.
    #[must_use]
    pub fn view(&self, fleet: &ModelFleet, rules: &Rules, now_ms: u64) -> Option<View> {
        let entries = self.models.get(&fleet.slot)?;
        if rules.after == 0 {
            return None;
        }
        View::of(fleet, entries, rules.percent, now_ms)
    }

    /// Takes note of how a leg went. Success of somebody who never failed costs nothing.
    pub fn report<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        fleet: &ModelFleet,
        evidence: &Evidence,
        rules: &Rules,
        now_ms: u64,
    ) -> Option<Change> {
        if rules.after == 0 || !self.is_news(fleet.slot, evidence) {
            return None;
        }
        self.update(store, fleet.slot, |entries| {
            apply(entries, fleet, evidence, rules, now_ms)
        })
        .flatten()
    }

    /// Everything that is ejected now, as stored, for the status page.
    pub fn list<S: SharedStore + ?Sized>(
        store: &S,
        fleet: &mut FleetCache,
        now_ms: u64,
    ) -> Vec<pd_wire::control::Ejected> {
        report::list(store, fleet, now_ms)
    }

    /// May a request go to the pods chosen for it? Takes the trials of those that are due for
    /// one; false when another request has one under way.
    pub fn admit<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        slot: u16,
        trials: &[Subject],
        rules: &Rules,
        now_ms: u64,
    ) -> bool {
        if trials.is_empty() {
            return true;
        }
        let won = self.update(store, slot, |entries| {
            let wanted = |entry: &Entry| trials.contains(&entry.subject);
            let free = entries
                .iter()
                .filter(|entry| wanted(entry))
                .all(|entry| entry.phase(now_ms).admits());
            if free {
                for entry in entries.iter_mut().filter(|entry| wanted(entry)) {
                    entry.begin_trial(now_ms, rules);
                }
            }
            free
        });
        won.unwrap_or(false)
    }

    /// Brings this VM's memory up to date; the janitor also drops what is of no use any more.
    /// Once per tick.
    pub fn tick<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        fleet: &mut FleetCache,
        now_ms: u64,
        is_janitor: bool,
    ) {
        self.refresh(store, fleet);
        if is_janitor && now_ms.saturating_sub(self.tidied_at_ms) >= TIDY_MS {
            self.tidied_at_ms = now_ms;
            self.tidy(store, fleet, now_ms);
        }
    }

    fn refresh<S: SharedStore + ?Sized>(&mut self, store: &S, fleet: &FleetCache) {
        let mut slots: Vec<u16> = fleet.slots().collect();
        slots.sort_unstable();
        self.models
            .retain(|slot, _| slots.binary_search(slot).is_ok());
        let after = slots.partition_point(|slot| *slot < self.next);
        let (first, last) = slots.split_at(after);
        let mut turn = last.iter().chain(first);
        for slot in turn.by_ref().take(READ_PER_TICK) {
            let entries = store
                .get(&record::key(*slot))
                .map_or_else(Vec::new, |it| record::decode(&it.bytes));
            self.remember(*slot, entries);
        }
        self.next = turn.next().copied().unwrap_or_default();
    }

    /// Drops entries of pods that left, and of those that were calm for long.
    fn tidy<S: SharedStore + ?Sized>(&mut self, store: &S, fleet: &mut FleetCache, now_ms: u64) {
        let slots: Vec<u16> = self.models.keys().copied().collect();
        for slot in slots {
            let name = fleet.name_of_slot(slot).map(str::to_owned);
            let Some(model) = name.and_then(|name| fleet.model(&name)) else {
                continue;
            };
            let is_here = |key: PodKey| model.pods.iter().any(|pod| pod.key == key);
            let stays =
                |entry: &Entry| !entry.is_forgotten(now_ms) && entry.subject.pods().all(is_here);
            let held = self
                .models
                .get(&slot)
                .is_some_and(|it| it.iter().all(stays));
            if !held {
                self.update(store, slot, |entries| entries.retain(stays));
            }
        }
    }

    /// False when the evidence cannot change what this VM knows.
    fn is_news(&self, slot: u16, evidence: &Evidence) -> bool {
        let known = self.models.get(&slot);
        let entry = known.and_then(|entries| {
            entries
                .iter()
                .find(|entry| entry.subject == evidence.subject)
        });
        match evidence.outcome {
            Outcome::Fails(_) => {
                entry.is_none_or(|entry| entry.cares_for_failure(evidence.chosen_at_ms))
            }
            outcome => entry.is_some_and(|entry| {
                entry.cares_for_success(outcome == Outcome::Works, evidence.chosen_at_ms)
            }),
        }
    }

    /// Changes the stored record; `None` when that was not possible now.
    fn update<S: SharedStore + ?Sized, T>(
        &mut self,
        store: &S,
        slot: u16,
        mut change: impl FnMut(&mut Vec<Entry>) -> T,
    ) -> Option<T> {
        let key = record::key(slot);
        for _ in 0..MAX_TRIES {
            let stored = store.get(&key);
            let before = stored
                .as_ref()
                .map_or_else(Vec::new, |stored| record::decode(&stored.bytes));
            let mut entries = before.clone();
            let outcome = change(&mut entries);
            entries.sort_unstable_by_key(|entry| entry.subject);
            let written = if entries == before {
                Ok(())
            } else {
                let bytes = record::encode(&entries);
                store.replace(&key, stored.as_ref(), &bytes)
            };
            match written {
                Ok(()) => {
                    self.remember(slot, entries);
                    return Some(outcome);
                }
                Err(StoreError::Raced) => {}
                Err(StoreError::Refused) => return None,
            }
        }
        None
    }

    fn remember(&mut self, slot: u16, entries: Vec<Entry>) {
        if entries.is_empty() {
            self.models.remove(&slot);
        } else {
            self.models.insert(slot, entries);
        }
    }
}

/// What a piece of evidence makes of a model's entries.
fn apply(
    entries: &mut Vec<Entry>,
    fleet: &ModelFleet,
    evidence: &Evidence,
    rules: &Rules,
    now_ms: u64,
) -> Option<Change> {
    let Evidence {
        subject,
        outcome,
        chosen_at_ms,
    } = *evidence;
    let at = entries.iter().position(|entry| entry.subject == subject);
    let Outcome::Fails(cause) = outcome else {
        let entry = entries.get_mut(at?)?;
        let change = entry.works(outcome == Outcome::Works, chosen_at_ms, now_ms, rules);
        entries.retain(|entry| !entry.is_forgotten(now_ms));
        return change;
    };
    // Whoever left meanwhile is nobody's concern.
    let is_here = |key: PodKey| fleet.pods.iter().any(|pod| pod.key == key);
    let mut entry = match at {
        Some(at) => entries.swap_remove(at),
        None if subject.pods().all(is_here) => Entry::new(subject),
        None => return None,
    };
    let may_eject = || View::may_take(fleet, entries, subject, rules.percent);
    let change = entry.fails(cause, chosen_at_ms, now_ms, rules, may_eject);
    record::make_room(entries);
    entries.push(entry);
    change
}
