//! The stored record of one model: cells of (pod, VM) and what that VM has charged to that pod.
//!
//! Little endian: version `u8`, three zero bytes, number of cells `u32`, then [`CELL`] bytes per
//! cell: pod `u64`, VM slot `u16`, generation `u32`, prefill requests `u32`, active `u64`, kv
//! `u64`, decode pending `u32`, decode running `u32`, decode tokens `u64`, sum of routing times
//! `u64`. Fixed width, so that a swap copies the cells of other VMs without decoding them.

use super::{Amounts, PodKey, VmId};
use crate::port::SharedStore;
use crate::{FORMAT, OTHER_FORMAT};

/// Most cells of one record (about 1.9 MB). A VM that finds no room publishes nothing for that
/// model and tries again at every tick; what it charged stays exact in its own memory.
pub const MAX_CELLS: usize = 32_768;

/// Bytes of the head.
pub const HEAD: usize = 8;
/// Bytes of one cell.
pub const CELL: usize = 58;

/// What one VM has charged to one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The pod.
    pub pod: PodKey,
    /// The VM.
    pub vm: VmId,
    /// The sum of its charges.
    pub amounts: Amounts,
}

/// Why a record cannot be read. It then counts as empty, and the next publication replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordFault {
    /// Neither this format nor the other.
    #[error("unknown version {0}")]
    Version(u8),
    /// The length does not fit the number of cells.
    #[error("{len} bytes for {cells} cells")]
    Length {
        /// Bytes found.
        len: usize,
        /// Cells announced.
        cells: u32,
    },
    /// Shorter than its head.
    #[error("truncated head")]
    Head,
}

/// A record that was checked and is read in place.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    cells: &'a [u8],
}

/// Builds a record.
#[derive(Debug, Default)]
pub struct RecordWriter {
    bytes: Vec<u8>,
}

/// Key of a model's record.
pub fn key(format: u8, model_slot: u16) -> String {
    // Without the formatting machinery: every request asks for one.
    let (format, slot) = (format.to_string(), model_slot.to_string());
    ["pd", &format, ".ledger.", &slot].concat()
}

/// True when nobody shows a charge to a model, in either format.
pub fn is_idle<S: SharedStore + ?Sized>(store: &S, model_slot: u16) -> bool {
    [FORMAT, OTHER_FORMAT].into_iter().all(|format| {
        let stored = store.get(&key(format, model_slot));
        stored.is_none_or(|stored| Record::parse(&stored.bytes).is_ok_and(|it| it.is_empty()))
    })
}

// === impl Record ===

impl<'a> Record<'a> {
    /// A record nobody has written yet.
    pub const EMPTY: Record<'static> = Record { cells: &[] };

    /// Checks version and length.
    ///
    /// # Errors
    /// Names what is wrong with the bytes.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, RecordFault> {
        let (head, cells) = bytes.split_at_checked(HEAD).ok_or(RecordFault::Head)?;
        let version = head.first().copied().unwrap_or_default();
        if version != FORMAT && version != OTHER_FORMAT {
            return Err(RecordFault::Version(version));
        }
        let count = u32_at(head, 4);
        let expected = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(CELL));
        if expected != Some(cells.len()) || cells.len() > MAX_CELLS * CELL {
            return Err(RecordFault::Length {
                len: cells.len(),
                cells: count,
            });
        }
        Ok(Self { cells })
    }

    /// The cells, each with its bytes.
    pub fn cells(&self) -> impl Iterator<Item = (Cell, &'a [u8])> + use<'a> {
        self.cells.chunks_exact(CELL).map(|raw| (decode(raw), raw))
    }

    /// Number of cells.
    pub fn len(&self) -> usize {
        self.cells.len() / CELL
    }

    /// True without cells.
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }
}

// === impl RecordWriter ===

impl RecordWriter {
    /// Starts an empty record of a format.
    pub fn begin(&mut self, format: u8) {
        self.bytes.clear();
        self.bytes.extend_from_slice(&[format, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Takes over a cell as it is stored.
    pub fn copy(&mut self, raw: &[u8]) {
        self.bytes.extend_from_slice(raw);
    }

    /// Adds a cell.
    pub fn push(&mut self, cell: &Cell) {
        let mut raw = [0_u8; CELL];
        let a = &cell.amounts;
        let fields: [&[u8]; 10] = [
            &cell.pod.0.to_le_bytes(),
            &cell.vm.slot.to_le_bytes(),
            &cell.vm.generation.to_le_bytes(),
            &a.prefill_requests.to_le_bytes(),
            &a.active_tokens.to_le_bytes(),
            &a.kv_tokens.to_le_bytes(),
            &a.decode_pending.to_le_bytes(),
            &a.decode_running.to_le_bytes(),
            &a.decode_tokens.to_le_bytes(),
            &a.routed_at_sum_ms.to_le_bytes(),
        ];
        let mut rest = raw.as_mut_slice();
        for field in fields {
            let Some((into, tail)) = rest.split_at_mut_checked(field.len()) else {
                break;
            };
            into.copy_from_slice(field);
            rest = tail;
        }
        self.bytes.extend_from_slice(&raw);
    }

    /// The finished record; `None` with more than [`MAX_CELLS`].
    pub fn finish(&mut self) -> Option<&[u8]> {
        let cells = self.bytes.len().checked_sub(HEAD)? / CELL;
        if cells > MAX_CELLS {
            return None;
        }
        let count = u32::try_from(cells).ok()?;
        self.bytes
            .get_mut(4..HEAD)?
            .copy_from_slice(&count.to_le_bytes());
        Some(&self.bytes)
    }
}

fn decode(raw: &[u8]) -> Cell {
    Cell {
        pod: PodKey(u64_at(raw, 0)),
        vm: VmId {
            slot: u16_at(raw, 8),
            generation: u32_at(raw, 10),
        },
        amounts: Amounts {
            prefill_requests: u32_at(raw, 14),
            active_tokens: u64_at(raw, 18),
            kv_tokens: u64_at(raw, 26),
            decode_pending: u32_at(raw, 34),
            decode_running: u32_at(raw, 38),
            decode_tokens: u64_at(raw, 42),
            routed_at_sum_ms: u64_at(raw, 50),
        },
    }
}

/// Little-endian `u16` at an offset; 0 past the end, which the length checks exclude.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    array_at(bytes, at).map_or(0, u16::from_le_bytes)
}

/// Little-endian `u32` at an offset; 0 past the end, which the length checks exclude.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    array_at(bytes, at).map_or(0, u32::from_le_bytes)
}

/// Little-endian `u64` at an offset; 0 past the end, which the length checks exclude.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    array_at(bytes, at).map_or(0, u64::from_le_bytes)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(pod: u64, slot: u16) -> Cell {
        Cell {
            pod: PodKey(pod),
            vm: VmId {
                slot,
                generation: 7,
            },
            amounts: Amounts {
                prefill_requests: 1,
                active_tokens: 2,
                kv_tokens: 3,
                decode_pending: 4,
                decode_running: 5,
                decode_tokens: u64::MAX,
                routed_at_sum_ms: 6,
            },
        }
    }

    #[test]
    fn a_record_reads_back_as_written() {
        let mut writer = RecordWriter::default();
        writer.begin(FORMAT);
        writer.push(&cell(u64::MAX, 3));
        writer.push(&cell(1, u16::MAX));
        let bytes = writer.finish().unwrap().to_vec();
        assert_eq!(bytes.len(), HEAD + 2 * CELL);

        let record = Record::parse(&bytes).unwrap();
        let cells: Vec<Cell> = record.cells().map(|(cell, _)| cell).collect();
        assert_eq!(cells, [cell(u64::MAX, 3), cell(1, u16::MAX)]);

        writer.begin(FORMAT);
        record.cells().for_each(|(_, raw)| writer.copy(raw));
        assert_eq!(writer.finish().unwrap(), bytes);
    }

    #[test]
    fn garbage_is_a_fault_and_never_a_panic() {
        assert_eq!(Record::parse(b"").unwrap_err(), RecordFault::Head);
        assert_eq!(Record::parse(&[9; 8]).unwrap_err(), RecordFault::Version(9));
        let announced = [FORMAT, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(
            Record::parse(&announced).unwrap_err(),
            RecordFault::Length {
                len: 0,
                cells: u32::MAX
            }
        );
        let mut writer = RecordWriter::default();
        writer.begin(FORMAT);
        writer.push(&cell(1, 1));
        let bytes = writer.finish().unwrap();
        for len in 0..bytes.len() {
            assert!(
                Record::parse(&bytes[..len]).is_err(),
                "{len} of {} bytes",
                bytes.len()
            );
        }
    }

    #[test]
    fn a_record_over_the_limit_is_not_written() {
        let mut writer = RecordWriter::default();
        writer.begin(FORMAT);
        (0..=MAX_CELLS as u64).for_each(|pod| writer.push(&cell(pod, 0)));
        assert_eq!(writer.finish(), None);
    }
}
