//! The VMs of one format as one of them sees them: its own place among them, whose beat stands
//! still, and whose cells count.
//!
//! A beat is judged by the observer's own ticks, never by a clock: when the whole process was
//! paused, nobody ticked, and nobody is declared dead.

use super::record::Cell;
use super::slots::{self, OVERFLOW, Standing, Table, Vitals, VmId};
use crate::port::{SharedStore, StoreError};
use std::collections::BTreeMap;

/// Own ticks after which a beat that did not change means a dead VM (2 s at 100 ms).
pub const STILL_TICKS: u8 = 20;
/// Most tries of one compare-and-swap before it is left to the next tick.
pub const MAX_TRIES: u32 = 8;

/// The table of a format and what was observed of it.
#[derive(Debug)]
pub struct Peers {
    format: u8,
    key: String,
    table: Table,
    watched: BTreeMap<VmId, Watched>,
    unreadable: u32,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    beat: u32,
    still: u8,
}

/// What became of this VM's place at a beat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beat {
    /// The place now; none when every place is taken or the write was lost.
    pub own: Option<VmId>,
    /// The place held before was taken away.
    pub fenced: bool,
    /// VMs that were declared dead.
    pub declared_dead: u32,
    /// Requests that those had when they last beat.
    pub lost_flows: u32,
}

// === impl Peers ===

impl Peers {
    /// Nothing observed yet.
    pub fn new(format: u8) -> Self {
        Self {
            format,
            key: slots::key(format),
            table: Table::default(),
            watched: BTreeMap::new(),
            unreadable: 0,
        }
    }

    /// The table as last read.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Tables that could not be read since the last call.
    pub fn take_unreadable(&mut self) -> u32 {
        std::mem::take(&mut self.unreadable)
    }

    /// Reads the table and compares every beat with the one before. Once per tick.
    pub fn observe<S: SharedStore + ?Sized>(&mut self, store: &S) {
        self.refresh(store);
        let before = std::mem::take(&mut self.watched);
        self.watched = self
            .table
            .owners()
            .map(|(vm, slot)| {
                let still = before
                    .get(&vm)
                    .filter(|seen| seen.beat == slot.beat)
                    .map_or(0, |seen| seen.still.saturating_add(1));
                (
                    vm,
                    Watched {
                        beat: slot.beat,
                        still,
                    },
                )
            })
            .collect();
    }

    /// True while a VM beats (or was not watched long enough to tell).
    pub fn any_beats(&self) -> bool {
        self.watched.values().any(|seen| seen.still < STILL_TICKS)
    }

    /// Takes a place without waiting for the tick; `None` when it was not possible now.
    pub fn join<S: SharedStore + ?Sized>(&mut self, store: &S, nonce: u32) -> Option<VmId> {
        self.update(store, nonce, |table| table.claim(nonce))
            .flatten()
    }

    /// Shows that this VM is alive, takes a (better) place when it has none, and frees the places
    /// of VMs whose beat stood still, all in one swap. Call [`Peers::observe`] before.
    pub fn beat<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        own: Option<VmId>,
        nonce: u32,
        vitals: Vitals,
    ) -> Beat {
        let still: Vec<(VmId, u32)> = self
            .watched
            .iter()
            .filter(|(vm, seen)| Some(**vm) != own && seen.still >= STILL_TICKS)
            .map(|(vm, seen)| (*vm, seen.beat))
            .collect();
        let beaten = self.update(store, nonce, |table| {
            let (mut declared_dead, mut lost_flows) = (0_u32, 0_u32);
            for (vm, beat) in &still {
                if let Some(slot) = table.get(*vm).filter(|slot| slot.beat == *beat) {
                    lost_flows = lost_flows.saturating_add(slot.vitals.live_flows);
                    table.free(*vm);
                    declared_dead = declared_dead.saturating_add(1);
                }
            }
            let held = own.filter(|vm| table.standing(*vm) == Standing::Alive);
            let now = match held {
                Some(vm) if vm.slot == OVERFLOW => match table.claim_numbered() {
                    Some(better) => {
                        table.free(vm);
                        Some(better)
                    }
                    None => Some(vm),
                },
                Some(vm) => Some(vm),
                None => table.claim(nonce),
            };
            if let Some(vm) = now {
                table.beat(vm, vitals);
            }
            Beat {
                own: now,
                fenced: own.is_some() && held.is_none(),
                declared_dead,
                lost_flows,
            }
        });
        beaten.unwrap_or_else(|| {
            // Nothing was written. The table just read still tells whether the place is ours.
            let held = own.filter(|vm| self.table.standing(*vm) != Standing::Dead);
            Beat {
                own: held,
                fenced: own.is_some() && held.is_none(),
                declared_dead: 0,
                lost_flows: 0,
            }
        })
    }

    /// True when a cell's writer lives. A writer the table does not know may have come since it
    /// was read: `fresh` says whether it was read during this transaction, after the record.
    pub fn counts<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        cell: &Cell,
        fresh: &mut bool,
    ) -> bool {
        let mut standing = self.table.standing(cell.vm);
        if standing == Standing::Unknown && !*fresh {
            *fresh = true;
            self.refresh(store);
            standing = self.table.standing(cell.vm);
        }
        standing == Standing::Alive
    }

    /// True when a writer was seen to stand still: reason not to count it where this VM may not
    /// free its slot, because the table is the other format's.
    pub fn stands_still(&self, vm: VmId) -> bool {
        self.watched
            .get(&vm)
            .is_some_and(|seen| seen.still >= STILL_TICKS)
    }

    fn refresh<S: SharedStore + ?Sized>(&mut self, store: &S) {
        let Some(stored) = store.get(&self.key) else {
            self.table = Table::default();
            return;
        };
        self.table = Table::parse(&stored.bytes).unwrap_or_else(|_| {
            self.unreadable = self.unreadable.saturating_add(1);
            Table::default()
        });
    }

    /// Changes the stored table; `None` after [`MAX_TRIES`] lost races or when the host refuses.
    fn update<S: SharedStore + ?Sized, T>(
        &mut self,
        store: &S,
        nonce: u32,
        change: impl Fn(&mut Table) -> T,
    ) -> Option<T> {
        for _ in 0..MAX_TRIES {
            let stored = store.get(&self.key);
            let mut table = match &stored {
                None => Table::default(),
                Some(stored) => Table::parse(&stored.bytes).unwrap_or_else(|_| {
                    self.unreadable = self.unreadable.saturating_add(1);
                    Table::reset(nonce)
                }),
            };
            // Should the swap fail for good, this is at least the newest table seen.
            self.table.clone_from(&table);
            let outcome = change(&mut table);
            let bytes = table.encode(self.format);
            let written = store.replace(&self.key, stored.as_ref(), &bytes);
            match written {
                Ok(()) => {
                    self.table = table;
                    return Some(outcome);
                }
                Err(StoreError::Raced) => {}
                Err(StoreError::Refused) => return None,
            }
        }
        None
    }
}
