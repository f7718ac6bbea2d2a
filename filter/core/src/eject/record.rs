//! The stored record of one model.
//!
//! Little endian: version `u8`, three zero bytes, then [`ENTRY`] bytes per entry, sorted by
//! subject: kind `u8` (0 a pod, 1 a pair), cause `u8`, flags `u8` (1 spared, 2 ejected), times `u8`, failures `u16`,
//! pod `u64`, second pod `u64` (0 for a pod), until `u64`, trial until `u64`, forget at `u64`. What cannot be read, the other format's included, counts as empty.

use super::entry::{Cause, Entry, Subject};
use crate::FORMAT;
use crate::ledger::PodKey;
use crate::ledger::record::{u16_at, u64_at};

/// Most entries of one model (about 12 kB).
pub const MAX_ENTRIES: usize = 256;
const HEAD: usize = 4;
const ENTRY: usize = 46;
const SPARED: u8 = 1;
const EJECTED: u8 = 2;

/// Causes by their stored number.
const CAUSES: [Cause; 6] = [
    Cause::Transport,
    Cause::Cut,
    Cause::Timeout,
    Cause::Status,
    Cause::BadResponse,
    Cause::HandOver,
];

/// Key of a model's record.
pub(super) fn key(slot: u16) -> String {
    format!("pd{FORMAT}.eject.{slot}")
}

/// Makes room for one more entry: the one that is forgotten first goes, one that is ejected only
/// when all are.
pub(super) fn make_room(entries: &mut Vec<Entry>) {
    while entries.len() >= MAX_ENTRIES {
        let least = (0..).zip(entries.iter()).min_by_key(|(_, entry)| {
            (
                entry.ejected,
                entry.forget_at_ms,
                entry.until_ms,
                entry.subject,
            )
        });
        let Some((at, _)) = least else { return };
        entries.swap_remove(at);
    }
}

/// The stored form.
pub(super) fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD.saturating_add(entries.len().saturating_mul(ENTRY)));
    out.extend_from_slice(&[FORMAT, 0, 0, 0]);
    for entry in entries {
        let (kind, first, second) = match entry.subject {
            Subject::Pod(pod) => (0, pod, PodKey(0)),
            Subject::Pair(prefill, decode) => (1, prefill, decode),
        };
        let cause = CAUSES.iter().position(|cause| *cause == entry.cause);
        let cause = cause.and_then(|at| u8::try_from(at).ok()).unwrap_or(0);
        let spared = if entry.spared { SPARED } else { 0 };
        let ejected = if entry.ejected { EJECTED } else { 0 };
        out.extend_from_slice(&[kind, cause, spared | ejected, entry.times]);
        out.extend_from_slice(&entry.failures.to_le_bytes());
        for word in [
            first.0,
            second.0,
            entry.until_ms,
            entry.trial_until_ms,
            entry.forget_at_ms,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    out
}

/// Reads the stored form.
pub(super) fn decode(bytes: &[u8]) -> Vec<Entry> {
    let Some((head, entries)) = bytes.split_at_checked(HEAD) else {
        return Vec::new();
    };
    let whole = entries.len().is_multiple_of(ENTRY) && entries.len() <= MAX_ENTRIES * ENTRY;
    if head.first() != Some(&FORMAT) || !whole {
        return Vec::new();
    }
    entries.chunks_exact(ENTRY).map(entry).collect()
}

fn entry(raw: &[u8]) -> Entry {
    let byte = |at: usize| raw.get(at).copied().unwrap_or_default();
    let (first, second) = (PodKey(u64_at(raw, 6)), PodKey(u64_at(raw, 14)));
    Entry {
        subject: if byte(0) == 0 {
            Subject::Pod(first)
        } else {
            Subject::Pair(first, second)
        },
        cause: CAUSES
            .get(usize::from(byte(1)))
            .copied()
            .unwrap_or(Cause::Transport),
        spared: byte(2) & SPARED != 0,
        ejected: byte(2) & EJECTED != 0,
        times: byte(3),
        failures: u16_at(raw, 4),
        until_ms: u64_at(raw, 22),
        trial_until_ms: u64_at(raw, 30),
        forget_at_ms: u64_at(raw, 38),
    }
}
