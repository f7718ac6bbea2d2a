//! Choosing and charging as one step, and every other change of the shared record.
//!
//! A choice reads the record, sums what all VMs have charged, chooses, and swaps the record with
//! the choice charged in it. When another VM was faster, the record is read again and the choice
//! made anew with the winner's charge in sight. After [`MAX_TRIES`] lost races the last choice is
//! charged as it is: in this VM's own [`Book`] it counts at once, and the record shows it at the
//! next tick.
//!
//! What happens to a charge later is published by the VM's next charge to the same model, which
//! writes the record anyway, or by its next tick. So it costs no read and no write of its own, and
//! under load, when it matters, the others know within a request.
//!
//! The record of the other format is read and never written: during an upgrade both filters serve,
//! and each has to see what the other has charged.

use super::MODEL_SLOTS;
use super::book::{Book, ChargeId, Expired, Pick};
use super::peers::{MAX_TRIES, Peers};
use super::record::{self, Cell, Record, RecordWriter};
use super::slots::{OVERFLOW, Vitals, VmId};
use super::totals::Totals;
use crate::port::{SharedStore, StoreError, Stored};
use crate::{FORMAT, other_format};

/// The ledger as one VM holds it.
#[derive(Debug)]
pub struct Ledger {
    format: u8,
    nonce: u32,
    own: Option<VmId>,
    pub(super) book: Book,
    pub(super) peers: Peers,
    others: Peers,
    totals: Totals,
    writer: RecordWriter,
    unreadable: u32,
    sweep: u16,
}

/// A choice that was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a charge has to be given back"]
pub struct Charged<T> {
    /// The charge to give back.
    pub id: ChargeId,
    /// What was chosen.
    pub decision: T,
    /// Races lost before.
    pub lost_races: u32,
    /// Who sees the charge.
    pub state: ChargeState,
}

/// Who sees a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeState {
    /// All VMs.
    Published,
    /// This VM now, the others after its next tick.
    Pending,
    /// Nobody: this VM holds [`MAX_CHARGES`](super::book::MAX_CHARGES) already.
    Uncounted,
}

/// What happened at a tick, for metrics and warnings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TickReport {
    /// This VM was declared dead by another; it took a new slot and published everything again.
    pub fenced: bool,
    /// VMs this one declared dead.
    pub declared_dead: u32,
    /// Requests that those had when they last beat. VMs that were retired have none.
    pub lost_flows: u32,
    /// This VM holds no numbered slot: it charges in an overflow cell, or in none.
    pub overflow: bool,
    /// Models whose record does not yet show what this VM has charged.
    pub dirty_models: u32,
    /// Records that could not be read since the last tick and counted as empty.
    pub unreadable: u32,
}

// === impl Ledger ===

impl Ledger {
    /// An empty ledger; takes its slot at the first tick or charge. `nonce` is random.
    pub fn new(nonce: u32) -> Self {
        Self::with_format(nonce, FORMAT)
    }

    /// A ledger as another release holds it, for tests of an upgrade.
    #[cfg(feature = "testkit")]
    pub fn of_format(nonce: u32, format: u8) -> Self {
        Self::with_format(nonce, format)
    }

    fn with_format(nonce: u32, format: u8) -> Self {
        Self {
            format,
            nonce,
            own: None,
            book: Book::default(),
            peers: Peers::new(format),
            others: Peers::new(other_format(format)),
            totals: Totals::default(),
            writer: RecordWriter::default(),
            unreadable: 0,
            sweep: 0,
        }
    }

    /// Format of the records this ledger writes.
    pub fn format(&self) -> u8 {
        self.format
    }

    /// This VM's name in cells.
    pub fn vm(&self) -> Option<VmId> {
        self.own
    }

    /// True for the VM that does what one must do for all: the live one with the lowest slot.
    pub fn is_janitor(&self) -> bool {
        let mut owners = self.peers.table().owners();
        owners.next().is_some_and(|(vm, _)| Some(vm) == self.own)
    }

    /// Charges of this VM that are not given back yet.
    pub fn live_charges(&self) -> usize {
        self.book.len()
    }

    /// Chooses with everybody's charges in sight and charges the choice.
    ///
    /// # Errors
    /// What `choose` returns; nothing is charged then.
    pub fn charge<S: SharedStore + ?Sized, T, E>(
        &mut self,
        store: &S,
        model_slot: u16,
        now_ms: u64,
        mut choose: impl FnMut(&Totals) -> Result<(Pick, T), E>,
    ) -> Result<Charged<T>, E> {
        if self.own.is_none() {
            self.own = self.peers.join(store, self.nonce);
            self.others.observe(store);
        }
        let key = record::key(self.format, model_slot);
        let mut lost_races = 0;
        loop {
            let stored = store.get(&key);
            self.gather(store, model_slot, stored.as_ref());
            let (pick, decision) = choose(&self.totals)?;
            let Some(id) = self.book.charge(model_slot, pick, now_ms) else {
                let state = ChargeState::Uncounted;
                return Ok(Charged {
                    id: ChargeId(0),
                    decision,
                    lost_races,
                    state,
                });
            };
            let state = match self.write(store, &key, model_slot, stored.as_ref()) {
                Ok(()) => ChargeState::Published,
                Err(StoreError::Raced) => {
                    lost_races += 1;
                    if lost_races < MAX_TRIES {
                        self.book.release(id);
                        continue;
                    }
                    ChargeState::Pending
                }
                Err(StoreError::Refused) => ChargeState::Pending,
            };
            self.book
                .set_dirty(model_slot, state == ChargeState::Pending);
            return Ok(Charged {
                id,
                decision,
                lost_races,
                state,
            });
        }
    }

    /// The prefill pod has computed the prompt: its computing part is given back, the KV stays
    /// charged. False when that was known already or the charge is gone.
    pub fn prefill_done(&mut self, id: ChargeId) -> bool {
        let changed = self.book.prefill_done(id);
        self.note(changed)
    }

    /// The decode leg was sent. False when that was known already or the charge is gone.
    pub fn decode_sent(&mut self, id: ChargeId) -> bool {
        let changed = self.book.decode_sent(id);
        self.note(changed)
    }

    /// Gives back whatever is left of a charge. False when it is gone already.
    pub fn release(&mut self, id: ChargeId) -> bool {
        let changed = self.book.release(id);
        self.note(changed)
    }

    /// Shows the other VMs at once what became of this VM's charges.
    pub fn publish<S: SharedStore + ?Sized>(&mut self, store: &S) {
        for model_slot in self.book.dirty() {
            self.publish_model(store, model_slot);
        }
    }

    /// Gives back charges that outlived their TTL; each deserves a warning.
    pub fn expire<S: SharedStore + ?Sized>(&mut self, store: &S, now_ms: u64) -> Vec<Expired> {
        let expired = self.book.expired(now_ms);
        for charge in &expired {
            if let Some(model_slot) = self.book.release(charge.id) {
                self.book.set_dirty(model_slot, true);
            }
        }
        self.publish(store);
        expired
    }

    /// Beats, judges the beats of others, publishes what is not shown yet, and drops what dead VMs
    /// held. Call at every root tick, once per VM.
    pub fn tick<S: SharedStore + ?Sized>(&mut self, store: &S, vitals: Vitals) -> TickReport {
        self.peers.observe(store);
        self.others.observe(store);
        let beat = self.peers.beat(store, self.own, self.nonce, vitals);
        if beat.fenced || self.own != beat.own {
            self.own = beat.own;
            self.book.set_all_dirty();
        }
        self.publish(store);
        if beat.declared_dead > 0 {
            (0..MODEL_SLOTS).for_each(|model_slot| self.publish_model(store, model_slot));
        } else {
            // A dead VM's last write may come after its cells were dropped.
            self.publish_model(store, self.sweep);
            self.sweep = self.sweep.wrapping_add(1) % MODEL_SLOTS;
        }
        TickReport {
            fenced: beat.fenced,
            declared_dead: beat.declared_dead,
            lost_flows: beat.lost_flows,
            overflow: self.own.is_none_or(|vm| vm.slot == OVERFLOW),
            dirty_models: u32::try_from(self.book.dirty().len()).unwrap_or(u32::MAX),
            unreadable: std::mem::take(&mut self.unreadable)
                .saturating_add(self.peers.take_unreadable())
                .saturating_add(self.others.take_unreadable()),
        }
    }

    /// What all VMs have charged to the pods of a model.
    pub fn totals<S: SharedStore + ?Sized>(&mut self, store: &S, model_slot: u16) -> Totals {
        let stored = store.get(&record::key(self.format, model_slot));
        self.gather(store, model_slot, stored.as_ref());
        self.totals.clone()
    }

    /// Notes that the record does not show this VM's sums any more.
    fn note(&mut self, changed: Option<u16>) -> bool {
        if let Some(model_slot) = changed {
            self.book.set_dirty(model_slot, true);
        }
        changed.is_some()
    }

    /// Makes a model's record show this VM's sums, and drops cells of dead VMs. After
    /// [`MAX_TRIES`] lost races the model stays dirty until the next tick.
    fn publish_model<S: SharedStore + ?Sized>(&mut self, store: &S, model_slot: u16) {
        let key = record::key(self.format, model_slot);
        let mut written = Err(StoreError::Raced);
        for _ in 0..MAX_TRIES {
            let stored = store.get(&key);
            if stored.is_none() && self.book.sums(model_slot).is_empty() {
                written = Ok(());
                break;
            }
            self.keep_others(store, stored.as_ref());
            written = self.write(store, &key, model_slot, stored.as_ref());
            if written != Err(StoreError::Raced) {
                break;
            }
        }
        self.book.set_dirty(model_slot, written.is_err());
    }

    /// Starts the record to be written with the live cells of other VMs.
    fn keep_others<S: SharedStore + ?Sized>(&mut self, store: &S, stored: Option<&Stored>) {
        let record = read(stored, &mut self.unreadable);
        self.writer.begin(self.format);
        let mut fresh = false;
        for (cell, raw) in record.cells() {
            if Some(cell.vm) != self.own && self.peers.counts(store, &cell, &mut fresh) {
                self.writer.copy(raw);
            }
        }
    }

    /// Sums up what everybody has charged, and starts the record to be written.
    fn gather<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        model_slot: u16,
        stored: Option<&Stored>,
    ) {
        self.totals.clear();
        self.writer.begin(self.format);
        let mut fresh = false;
        for (cell, raw) in read(stored, &mut self.unreadable).cells() {
            if Some(cell.vm) != self.own && self.peers.counts(store, &cell, &mut fresh) {
                self.totals.add(cell.pod, &cell.amounts);
                self.writer.copy(raw);
            }
        }
        if self.others.any_beats() {
            let stored = store.get(&record::key(other_format(self.format), model_slot));
            let mut fresh = false;
            for (cell, _) in read(stored.as_ref(), &mut self.unreadable).cells() {
                if self.others.counts(store, &cell, &mut fresh)
                    && !self.others.stands_still(cell.vm)
                {
                    self.totals.add(cell.pod, &cell.amounts);
                }
            }
        }
        for (pod, amounts) in self.book.sums(model_slot) {
            self.totals.add(*pod, amounts);
        }
    }

    /// Finishes the record with this VM's cells and swaps it in, unless it is what is stored.
    fn write<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        key: &str,
        model_slot: u16,
        stored: Option<&Stored>,
    ) -> Result<(), StoreError> {
        let sums = self.book.sums(model_slot);
        // Without a slot there is no name to write under; what others see stays as it is.
        let complete = self.own.is_some() || sums.is_empty();
        if let Some(vm) = self.own {
            for (pod, amounts) in sums {
                self.writer.push(&Cell {
                    pod: *pod,
                    vm,
                    amounts: *amounts,
                });
            }
        }
        let bytes = self
            .writer
            .finish()
            .filter(|_| complete)
            .ok_or(StoreError::Refused)?;
        match stored {
            Some(stored) if stored.bytes == bytes => Ok(()),
            stored => store.replace(key, stored, bytes),
        }
    }
}

fn read<'a>(stored: Option<&'a Stored>, unreadable: &mut u32) -> Record<'a> {
    let Some(stored) = stored else {
        return Record::EMPTY;
    };
    Record::parse(&stored.bytes).unwrap_or_else(|_| {
        *unreadable = unreadable.saturating_add(1);
        Record::EMPTY
    })
}

#[cfg(test)]
mod tests;
