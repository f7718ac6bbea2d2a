//! One bucket of the session table as it is stored: its entries, the least recently written first.
//!
//! Layout, little-endian: version (1 byte), then per entry: session hash (8), prompt tokens (4),
//! last second at which it is remembered (4). A record of another version or of an odd length
//! counts as empty.

use crate::FORMAT;

const ENTRY: usize = 16;

/// What is remembered of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Hash of model and session key.
    pub(super) session: u64,
    /// Size of its last prompt.
    pub(super) tokens: u32,
    /// Last second of the shared monotonic clock at which it is remembered.
    pub(super) until_s: u32,
}

// === impl Entry ===

impl Entry {
    fn read(bytes: &[u8; ENTRY]) -> Self {
        let [
            h0,
            h1,
            h2,
            h3,
            h4,
            h5,
            h6,
            h7,
            t0,
            t1,
            t2,
            t3,
            u0,
            u1,
            u2,
            u3,
        ] = *bytes;
        Self {
            session: u64::from_le_bytes([h0, h1, h2, h3, h4, h5, h6, h7]),
            tokens: u32::from_le_bytes([t0, t1, t2, t3]),
            until_s: u32::from_le_bytes([u0, u1, u2, u3]),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.session.to_le_bytes());
        out.extend_from_slice(&self.tokens.to_le_bytes());
        out.extend_from_slice(&self.until_s.to_le_bytes());
    }

    fn is_live(&self, now_s: u32) -> bool {
        now_s <= self.until_s
    }
}

/// The raw entries of a record.
fn raw(record: &[u8]) -> &[[u8; ENTRY]] {
    match record.split_first() {
        Some((&FORMAT, entries)) => match entries.as_chunks() {
            (entries, []) => entries,
            _ => &[],
        },
        _ => &[],
    }
}

/// The entry of a session, unless it is too old.
pub(super) fn find(record: &[u8], session: u64, now_s: u32) -> Option<Entry> {
    let entry = raw(record)
        .iter()
        .map(Entry::read)
        .find(|entry| entry.session == session)?;
    entry.is_live(now_s).then_some(entry)
}

/// The record with this entry as the most recent of at most `ways` (at least 1). Of a full bucket
/// those go that would be forgotten first; among equals, those written first.
pub(super) fn updated(record: &[u8], entry: Entry, ways: usize, now_s: u32) -> Vec<u8> {
    let mut kept: Vec<Entry> = raw(record)
        .iter()
        .map(Entry::read)
        .filter(|other| other.session != entry.session && other.is_live(now_s))
        .collect();
    // More than one too many only after the table became smaller.
    while kept.len() >= ways.max(1) {
        let oldest = kept
            .iter()
            .enumerate()
            .min_by_key(|(_, entry)| entry.until_s);
        let Some((oldest, _)) = oldest else { break };
        kept.remove(oldest);
    }
    kept.push(entry);
    encode(&kept)
}

/// How many entries of a record are not too old, and the record without the others, if there are
/// any.
pub(super) fn swept(record: &[u8], now_s: u32) -> (usize, Option<Vec<u8>>) {
    let entries = raw(record);
    let live = entries.iter().map(Entry::read);
    let live: Vec<Entry> = live.filter(|entry| entry.is_live(now_s)).collect();
    let smaller = (live.len() < entries.len()).then(|| encode(&live));
    (live.len(), smaller)
}

fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(entries.len().saturating_mul(ENTRY).saturating_add(1));
    out.push(FORMAT);
    entries.iter().for_each(|entry| entry.write(&mut out));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(session: u64, until_s: u32) -> Entry {
        Entry {
            session,
            tokens: 7,
            until_s,
        }
    }

    fn sessions(record: &[u8]) -> Vec<u64> {
        let entries = raw(record).iter().map(Entry::read);
        entries.map(|entry| entry.session).collect()
    }

    #[test]
    fn a_record_has_this_layout() {
        let record = encode(&[Entry {
            session: 0x0102,
            tokens: 3,
            until_s: 4,
        }]);
        let expected = [FORMAT, 2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0];
        assert_eq!(record, expected);
        assert_eq!(find(&record, 0x0102, 4).unwrap().tokens, 3);
        assert_eq!(find(&record, 0x0102, 5), None);
        assert_eq!(find(&record, 0x0103, 4), None);
    }

    #[test]
    fn a_full_bucket_loses_what_would_be_forgotten_first() {
        let record = encode(&[entry(1, 9), entry(2, 8), entry(3, 8)]);
        assert_eq!(sessions(&updated(&record, entry(4, 9), 4, 0)), [1, 2, 3, 4]);
        assert_eq!(sessions(&updated(&record, entry(4, 9), 3, 0)), [1, 3, 4]);
        assert_eq!(sessions(&updated(&record, entry(4, 9), 1, 0)), [4]);
        assert_eq!(sessions(&updated(&record, entry(4, 9), 0, 0)), [4]);
        assert_eq!(sessions(&updated(&record, entry(1, 9), 3, 0)), [2, 3, 1]);
        assert_eq!(sessions(&updated(&record, entry(4, 99), 3, 9)), [1, 4]);
    }

    #[test]
    fn a_sweep_leaves_the_live_ones_and_writes_nothing_when_all_are() {
        let record = encode(&[entry(1, 9), entry(2, 8)]);
        assert_eq!(swept(&record, 8), (2, None));
        assert_eq!(swept(&record, 9), (1, Some(encode(&[entry(1, 9)]))));
        assert_eq!(swept(&record, 10), (0, Some(vec![FORMAT])));
        assert_eq!(swept(&[], 0), (0, None));
    }

    #[test]
    fn what_cannot_be_read_counts_as_empty() {
        let mut other = encode(&[entry(1, 9)]);
        other[0] = crate::OTHER_FORMAT;
        let short = &encode(&[entry(1, 9)])[..16];
        for record in [&other[..], short, b"\xff", &[0; 4096]] {
            assert_eq!(find(record, 1, 0), None);
            assert_eq!(sessions(&updated(record, entry(2, 9), 64, 0)), [2]);
        }
    }
}
