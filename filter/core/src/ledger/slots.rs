//! The table of live VMs: who writes under which slot and generation, and whose cells are dead.
//!
//! A VM is named by a slot and the generation of that slot. Freeing a slot, by its owner or by
//! somebody who saw the owner's beat stand still, raises the generation, so cells of the owner
//! before are recognised wherever they turn up, also when a VM declared dead by mistake writes
//! them later. VMs beyond [`SLOTS`] share the slot number [`OVERFLOW`] and are told apart by a
//! random generation; they are listed, beat and die like the others.
//!
//! Little endian: version `u8`, three zero bytes, entries `u16`, overflow entries `u16`, then
//! [`ENTRY`] bytes each: claimed `u8`, generation `u32`, beat `u32`, live flows `u32`, memory
//! pages `u32`.

use super::record::{u16_at, u32_at};
use crate::{FORMAT, OTHER_FORMAT};

/// Numbered slots.
pub const SLOTS: usize = 256;
/// Slot number of the VMs that found no numbered slot.
pub const OVERFLOW: u16 = u16::MAX;
/// Most VMs beyond the numbered slots. One that finds no place here either keeps its charges to
/// itself: they are exact and invisible to other VMs.
pub const MAX_OVERFLOW: usize = 1024;

const HEAD: usize = 8;
const ENTRY: usize = 17;

/// Name of a VM in cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId {
    /// Slot number, or [`OVERFLOW`].
    pub slot: u16,
    /// Life of the slot; a random number in an overflow slot.
    pub generation: u32,
}

/// What a VM shows of itself at every beat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Requests it is working on, orphaned ones included.
    pub live_flows: u32,
    /// Linear memory, in pages of 64 KiB.
    pub memory_pages: u32,
}

/// One slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// A VM owns it.
    pub claimed: bool,
    /// Life of the slot; raised when it is freed.
    pub generation: u32,
    /// Counts the owner's ticks; wraps.
    pub beat: u32,
    /// The owner's state at its last beat.
    pub vitals: Vitals,
}

/// What the table says about the writer of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It owns its slot.
    Alive,
    /// Its slot has moved on to a later generation.
    Dead,
    /// The table does not know it: claimed since the table was read, or never.
    Unknown,
}

/// All slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    slots: Vec<Slot>,
    overflow: Vec<Slot>,
}

/// Why a table cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unreadable VM table of {len} bytes")]
pub struct TableFault {
    /// Bytes found.
    pub len: usize,
}

/// Key of a format's table.
pub fn key(format: u8) -> String {
    format!("pd{format}.vms")
}

// === impl Table ===

impl Table {
    /// A table in place of one that cannot be read. Generations start at a random number, so that
    /// cells written under the lost table are not taken for those of new owners.
    pub fn reset(nonce: u32) -> Self {
        let slot = Slot {
            generation: nonce,
            ..Slot::default()
        };
        Self {
            slots: vec![slot; SLOTS],
            overflow: Vec::new(),
        }
    }

    /// Reads a table.
    ///
    /// # Errors
    /// When version or length do not fit.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableFault> {
        let fault = TableFault { len: bytes.len() };
        let (head, entries) = bytes.split_at_checked(HEAD).ok_or(fault)?;
        let version = head.first().copied().unwrap_or_default();
        let (slots, overflow) = (usize::from(u16_at(head, 4)), usize::from(u16_at(head, 6)));
        if (version != FORMAT && version != OTHER_FORMAT)
            || slots > SLOTS
            || overflow > MAX_OVERFLOW
            || entries.len() != slots.saturating_add(overflow).saturating_mul(ENTRY)
        {
            return Err(fault);
        }
        let mut all = entries.chunks_exact(ENTRY).map(|raw| Slot {
            claimed: raw.first().is_some_and(|flag| *flag != 0),
            generation: u32_at(raw, 1),
            beat: u32_at(raw, 5),
            vitals: Vitals {
                live_flows: u32_at(raw, 9),
                memory_pages: u32_at(raw, 13),
            },
        });
        let slots = all.by_ref().take(slots).collect();
        Ok(Self {
            slots,
            overflow: all.collect(),
        })
    }

    /// The stored form of a format.
    pub fn encode(&self, format: u8) -> Vec<u8> {
        let entries = self.slots.len().saturating_add(self.overflow.len());
        let mut out = Vec::with_capacity(HEAD.saturating_add(entries.saturating_mul(ENTRY)));
        out.extend_from_slice(&[format, 0, 0, 0]);
        for len in [self.slots.len(), self.overflow.len()] {
            // Both are bounded far below 2^16 by `claim`.
            out.extend_from_slice(&u16::try_from(len).unwrap_or_default().to_le_bytes());
        }
        for slot in self.slots.iter().chain(&self.overflow) {
            out.push(u8::from(slot.claimed));
            for word in [
                slot.generation,
                slot.beat,
                slot.vitals.live_flows,
                slot.vitals.memory_pages,
            ] {
                out.extend_from_slice(&word.to_le_bytes());
            }
        }
        out
    }

    /// The VMs that own a slot, in the order of slots.
    pub fn owners(&self) -> impl Iterator<Item = (VmId, &Slot)> {
        let numbered = (0_u16..).zip(&self.slots).filter(|(_, slot)| slot.claimed);
        let overflow = self.overflow.iter().map(|slot| (OVERFLOW, slot));
        numbered.chain(overflow).map(|(number, slot)| {
            (
                VmId {
                    slot: number,
                    generation: slot.generation,
                },
                slot,
            )
        })
    }

    /// What is known about a writer of cells.
    pub fn standing(&self, vm: VmId) -> Standing {
        if vm.slot == OVERFLOW {
            let listed = self
                .overflow
                .iter()
                .any(|slot| slot.generation == vm.generation);
            return if listed {
                Standing::Alive
            } else {
                Standing::Unknown
            };
        }
        let Some(slot) = self.slots.get(usize::from(vm.slot)) else {
            return Standing::Unknown;
        };
        match vm.generation.wrapping_sub(slot.generation).cast_signed() {
            0 if slot.claimed => Standing::Alive,
            older if older < 0 => Standing::Dead,
            _ => Standing::Unknown,
        }
    }

    /// The slot a VM owns.
    pub fn get(&self, vm: VmId) -> Option<&Slot> {
        self.owners()
            .find(|(owner, _)| *owner == vm)
            .map(|(_, slot)| slot)
    }

    /// Takes the lowest free slot, else a place in the overflow; `None` when that is full too.
    pub fn claim(&mut self, nonce: u32) -> Option<VmId> {
        if let Some(vm) = self.claim_numbered() {
            return Some(vm);
        }
        if self.overflow.len() >= MAX_OVERFLOW {
            return None;
        }
        // Two VMs may draw the same number; the list is far smaller than the number space.
        let mut generation = nonce;
        while self
            .overflow
            .iter()
            .any(|slot| slot.generation == generation)
        {
            generation = generation.wrapping_add(1);
        }
        self.overflow.push(Slot {
            claimed: true,
            generation,
            ..Slot::default()
        });
        Some(VmId {
            slot: OVERFLOW,
            generation,
        })
    }

    /// Takes the lowest free numbered slot.
    pub fn claim_numbered(&mut self) -> Option<VmId> {
        let at = match self.slots.iter().position(|slot| !slot.claimed) {
            Some(at) => at,
            None if self.slots.len() < SLOTS => {
                self.slots.push(Slot {
                    generation: 1,
                    ..Slot::default()
                });
                self.slots.len().saturating_sub(1)
            }
            None => return None,
        };
        let slot = self.slots.get_mut(at)?;
        *slot = Slot {
            claimed: true,
            generation: slot.generation,
            ..Slot::default()
        };
        Some(VmId {
            slot: u16::try_from(at).ok()?,
            generation: slot.generation,
        })
    }

    /// Frees what a VM owns; its cells are dead from now on.
    pub fn free(&mut self, vm: VmId) {
        if vm.slot == OVERFLOW {
            self.overflow
                .retain(|slot| slot.generation != vm.generation);
        } else if let Some(slot) = self.owned(vm) {
            *slot = Slot {
                generation: slot.generation.wrapping_add(1),
                ..Slot::default()
            };
        }
    }

    /// Shows that a VM is alive.
    pub fn beat(&mut self, vm: VmId, vitals: Vitals) {
        if let Some(slot) = self.owned(vm) {
            slot.beat = slot.beat.wrapping_add(1);
            slot.vitals = vitals;
        }
    }

    fn owned(&mut self, vm: VmId) -> Option<&mut Slot> {
        let slot = if vm.slot == OVERFLOW {
            self.overflow
                .iter_mut()
                .find(|slot| slot.generation == vm.generation)
        } else {
            self.slots.get_mut(usize::from(vm.slot))
        };
        slot.filter(|slot| slot.claimed && slot.generation == vm.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken_and_a_live_one_never() {
        let mut table = Table::default();
        let first = table.claim(9).unwrap();
        let second = table.claim(9).unwrap();
        assert_eq!(
            first,
            VmId {
                slot: 0,
                generation: 1
            }
        );
        assert_eq!(
            second,
            VmId {
                slot: 1,
                generation: 1
            }
        );

        table.free(first);
        assert_eq!(table.standing(first), Standing::Dead);
        assert_eq!(
            table.claim(9).unwrap(),
            VmId {
                slot: 0,
                generation: 2
            }
        );
        assert_eq!(
            table.claim(9).unwrap(),
            VmId {
                slot: 2,
                generation: 1
            }
        );
        assert_eq!(table.standing(second), Standing::Alive);
        assert_eq!(
            table.standing(VmId {
                slot: 0,
                generation: 3
            }),
            Standing::Unknown
        );

        table.free(first);
        assert_eq!(
            table.standing(VmId {
                slot: 0,
                generation: 2
            }),
            Standing::Alive
        );
    }

    #[test]
    fn overflow_vms_are_told_apart_even_with_one_nonce() {
        let mut table = Table::default();
        for _ in 0..SLOTS {
            assert_ne!(table.claim(5).unwrap().slot, OVERFLOW);
        }
        let a = table.claim(u32::MAX).unwrap();
        let b = table.claim(u32::MAX).unwrap();
        assert_eq!(
            a,
            VmId {
                slot: OVERFLOW,
                generation: u32::MAX
            }
        );
        assert_eq!(
            b,
            VmId {
                slot: OVERFLOW,
                generation: 0
            }
        );
        table.free(a);
        assert_eq!(table.standing(a), Standing::Unknown);
        assert_eq!(table.standing(b), Standing::Alive);
        assert_eq!(table.claim_numbered(), None);

        while table.overflow.len() < MAX_OVERFLOW {
            table.claim(1).unwrap();
        }
        assert_eq!(table.claim(1), None);
        assert_eq!(Table::parse(&table.encode(FORMAT)).unwrap(), table);
    }

    #[test]
    fn beats_and_vitals_survive_the_stored_form() {
        let mut table = Table::default();
        let vm = table.claim(0).unwrap();
        let vitals = Vitals {
            live_flows: 3,
            memory_pages: 20,
        };
        table.beat(vm, vitals);
        let read = Table::parse(&table.encode(FORMAT)).unwrap();
        assert_eq!(
            read.get(vm),
            Some(&Slot {
                claimed: true,
                generation: 1,
                beat: 1,
                vitals
            })
        );
    }

    #[test]
    fn a_table_that_cannot_be_read_is_a_fault() {
        let mut table = Table::default();
        table.claim(0).unwrap();
        let bytes = table.encode(FORMAT);
        for len in 0..bytes.len() {
            assert_eq!(Table::parse(&bytes[..len]), Err(TableFault { len }));
        }
        assert!(Table::parse(&[FORMAT, 0, 0, 0, 255, 255, 255, 255]).is_err());
    }

    #[test]
    fn generations_after_a_reset_are_not_those_before() {
        let mut table = Table::reset(77);
        assert_eq!(
            table.claim(0).unwrap(),
            VmId {
                slot: 0,
                generation: 77
            }
        );
    }
}
