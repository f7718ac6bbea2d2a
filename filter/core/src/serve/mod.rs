//! Adaptive buckets: which roleset a prompt's length is banded to.
//!
//! The prompt lengths of each model's traffic are kept in one shared record ([`histogram`]). A
//! VM notes the lengths of its own requests in its memory and adds them to the record about once
//! a second; a VM that dies takes what it noted since then with it. When it adds them it reads
//! what all VMs have seen, and works out the bands again ([`plan`]). A request reads neither
//! clock nor store: it notes one number and looks one up.
//!
//! Bands only advise. Selection prefers the banded roleset where it could be chosen anyway.

pub mod groups;
pub mod histogram;
pub mod plan;
pub mod report;

pub use groups::Group;
pub use histogram::Histogram;
pub use plan::{Band, Plan};

use crate::FORMAT;
use crate::fleet::{ModelFleet, Roleset};
use crate::port::{SharedStore, StoreError};
use crate::prefix::model_hash;
use pd_wire::knobs::BucketServeMode;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Time between two merges of a model, in ms.
const MERGE_MS: u64 = 1000;
/// Most lost races of a merge; what was noted waits for the next tick then.
const MAX_TRIES: u32 = 8;
/// A model without requests for this long is forgotten by the VM, in ms. The record stays.
const IDLE_MS: u64 = 60_000;
/// Most plans of a model: modes and profiles in use at the same time.
const MAX_PLANS: usize = 8;

/// What one VM knows of prompt lengths, by the models' ledger slots.
#[derive(Debug, Default)]
pub struct Serve {
    models: BTreeMap<u16, Picture>,
}

/// One model.
#[derive(Debug)]
struct Picture {
    /// Slots are given to other models.
    model: Rc<str>,
    /// Lengths noted since the last merge.
    fresh: Histogram,
    /// What all VMs had seen at the last merge.
    seen: Histogram,
    plans: Vec<Held>,
    /// When to merge next, in ms.
    merge_at: u64,
    asked_at: u64,
}

/// A plan and what it was asked for.
#[derive(Debug)]
struct Held {
    /// Of the topology the plan was made for; held, so that no other one has its address.
    rolesets: Rc<[Roleset]>,
    profile: Option<String>,
    mode: BucketServeMode,
    groups: Vec<Group>,
    plan: Plan,
    asked_at: u64,
}

/// A request that asks for its band.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The model's pods.
    pub fleet: &'a ModelFleet,
    /// Profile by which every pod's own range is looked up.
    pub profile: Option<&'a str>,
    /// Unit in which bands divide traffic.
    pub mode: BucketServeMode,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// Shared monotonic clock, in ms.
    pub now_ms: u64,
}

// === impl Serve ===

impl Serve {
    /// Notes a request's length, once per request.
    pub fn record(&mut self, ask: &Ask<'_>) {
        let picture = self.picture(ask);
        picture.fresh.record(ask.prompt_tokens, ask.now_ms);
    }

    /// The roleset, by its position in the fleet, that the request's length is banded to.
    pub fn roleset_for(&mut self, ask: &Ask<'_>) -> Option<u16> {
        self.picture(ask).roleset_for(ask)
    }

    /// Merges what is due and works out the bands again. Call at every tick of the VM.
    pub fn tick<S: SharedStore + ?Sized>(&mut self, store: &S, now_ms: u64) {
        self.models.retain(|_, picture| {
            !picture.fresh.is_empty() || now_ms.saturating_sub(picture.asked_at) < IDLE_MS
        });
        for (slot, picture) in &mut self.models {
            if now_ms >= picture.merge_at {
                picture.merge_at = now_ms.saturating_add(MERGE_MS);
                picture.merge(store, *slot, now_ms);
            }
        }
    }

    fn picture(&mut self, ask: &Ask<'_>) -> &mut Picture {
        let new = || Picture::new(Rc::clone(&ask.fleet.name), ask.now_ms);
        let picture = self.models.entry(ask.fleet.slot).or_insert_with(new);
        if picture.model != ask.fleet.name {
            *picture = new();
        }
        picture.asked_at = ask.now_ms;
        picture
    }
}

/// Key of a model's record.
#[must_use]
pub fn key(slot: u16) -> String {
    format!("pd{FORMAT}.serve.{slot}")
}

// === impl Picture ===

impl Picture {
    /// Knows nothing; is merged at the next tick.
    fn new(model: Rc<str>, now_ms: u64) -> Self {
        Self {
            model,
            fresh: Histogram::new(now_ms),
            seen: Histogram::new(now_ms),
            plans: Vec::new(),
            merge_at: now_ms,
            asked_at: now_ms,
        }
    }

    fn merge<S: SharedStore + ?Sized>(&mut self, store: &S, slot: u16, now_ms: u64) {
        if self.publish(store, slot, now_ms) {
            self.fresh = Histogram::new(now_ms);
        } else {
            self.fresh.settle(now_ms);
        }
        for held in &mut self.plans {
            held.plan = Plan::of(&self.seen, &held.groups, held.mode);
        }
    }

    /// Reads what all VMs have seen and adds what is fresh. False when that could not be written.
    fn publish<S: SharedStore + ?Sized>(&mut self, store: &S, slot: u16, now_ms: u64) -> bool {
        let (key, model) = (key(slot), model_hash(&self.model));
        for _ in 0..MAX_TRIES {
            let stored = store.get(&key);
            let read = stored
                .as_ref()
                .and_then(|stored| Histogram::decode(&stored.bytes, model));
            self.seen = read.unwrap_or_else(|| Histogram::new(now_ms));
            self.seen.settle(now_ms);
            if self.fresh.is_empty() {
                return true;
            }
            self.seen.merge(&self.fresh);
            let bytes = self.seen.encode(model);
            let written = store.replace(&key, stored.as_ref(), &bytes);
            match written {
                Ok(()) => return true,
                Err(StoreError::Raced) => {}
                Err(StoreError::Refused) => return false,
            }
        }
        false
    }

    /// By the plan for the request, which is made now when the tick has none.
    fn roleset_for(&mut self, ask: &Ask<'_>) -> Option<u16> {
        // A name that no pod knows stands for every pod's default profile, and clients may think
        // of many.
        let known = |name: &&str| {
            let mut configs = ask.fleet.configs.iter();
            configs.any(|config| config.profiles.contains_key(*name))
        };
        let profile = ask.profile.filter(known);
        let wanted = |held: &Held| held.mode == ask.mode && held.profile.as_deref() == profile;
        let current = |held: &Held| Rc::ptr_eq(&held.rolesets, &ask.fleet.rolesets);
        let mut plans = self.plans.iter_mut();
        if let Some(held) = plans.find(|held| wanted(held) && current(held)) {
            held.asked_at = ask.now_ms;
            return held.plan.roleset_for(ask.prompt_tokens);
        }
        let held = Held::new(ask, profile, &self.seen);
        let roleset = held.plan.roleset_for(ask.prompt_tokens);
        self.plans.retain(current);
        if self.plans.len() >= MAX_PLANS {
            self.plans.sort_by_key(|held| Reverse(held.asked_at));
            self.plans.truncate(MAX_PLANS.saturating_sub(1));
        }
        self.plans.push(held);
        roleset
    }
}

// === impl Held ===

impl Held {
    fn new(ask: &Ask<'_>, profile: Option<&str>, seen: &Histogram) -> Self {
        let groups = Group::all(ask.fleet, profile);
        Self {
            rolesets: Rc::clone(&ask.fleet.rolesets),
            profile: profile.map(str::to_owned),
            mode: ask.mode,
            plan: Plan::of(seen, &groups, ask.mode),
            groups,
            asked_at: ask.now_ms,
        }
    }
}

#[cfg(test)]
mod tests;
