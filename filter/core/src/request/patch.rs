//! Byte-preserving edits of a scanned body.
//!
//! An existing member is replaced where it stands, a new one is put first, right behind the
//! opening brace, and a deletion takes the member with exactly one comma. Every other byte stays
//! as it came.

use super::{Member, Scan};
use std::borrow::Cow;
use std::ops::Range;

/// One change of a top-level member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit<'a> {
    /// Gives the member this JSON value.
    Set(Member, Cow<'a, [u8]>),
    /// Removes the member, if it is there.
    Delete(Member),
}

impl Edit<'_> {
    fn member(&self) -> Member {
        match self {
            Self::Set(member, _) | Self::Delete(member) => *member,
        }
    }
}

/// A change of a body's first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// How many bytes go.
    pub replace: usize,
    /// What stands there instead.
    pub bytes: Vec<u8>,
}

/// The beginning of a body up to and with its `{`: all that is needed to put members first later,
/// when the body itself is no longer at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lead {
    bytes: Vec<u8>,
    /// Nothing follows the `{` but its `}`.
    is_empty: bool,
    /// Where the value stands that may be replaced later.
    replaceable: Option<Range<usize>>,
}

/// Change to a buffered body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyEdit {
    /// None.
    Keep,
    /// New members first, everything else as it is.
    Prefix(Prefix),
    /// New members first, and one value replaced.
    Replace {
        /// The new beginning.
        prefix: Prefix,
        /// Where the value stands in the body as it came; behind the beginning.
        span: Range<usize>,
        /// What stands there instead.
        value: Vec<u8>,
    },
}

impl BodyEdit {
    /// The whole changed body.
    #[must_use]
    pub fn apply(&self, body: &[u8]) -> Vec<u8> {
        match self {
            Self::Keep => body.to_vec(),
            Self::Prefix(prefix) => splice(body, &[(0..prefix.replace, &prefix.bytes)]),
            Self::Replace {
                prefix,
                span,
                value,
            } => splice(
                body,
                &[(0..prefix.replace, &prefix.bytes), (span.clone(), value)],
            ),
        }
    }
}

impl Lead {
    /// The beginning of `body`.
    #[must_use]
    pub fn of(body: &[u8], scan: &Scan) -> Self {
        Self {
            bytes: body.get(..scan.open).unwrap_or_default().to_vec(),
            is_empty: scan.is_empty(),
            replaceable: None,
        }
    }

    /// The same, with a member of the body whose value may be replaced later.
    #[must_use]
    pub fn replacing(mut self, scan: &Scan, member: Option<Member>) -> Self {
        self.replaceable = member.and_then(|member| scan.span(member));
        self
    }

    /// Puts `members` first and gives the member chosen with [`Lead::replacing`] a value.
    #[must_use]
    pub fn edit(&self, members: &[u8], value: Option<(Member, &[u8])>) -> BodyEdit {
        match (value, &self.replaceable) {
            (Some((_, value)), Some(span)) => BodyEdit::Replace {
                prefix: self.with(members),
                span: span.clone(),
                value: value.to_vec(),
            },
            (Some((member, value)), None) => {
                let key = format!(",\"{}\":", member.name());
                BodyEdit::Prefix(self.with(&[members, key.as_bytes(), value].concat()))
            }
            (None, _) => BodyEdit::Prefix(self.with(members)),
        }
    }

    /// Puts `members` first without touching the rest, whatever its size. `members` is the text
    /// of one or more members that the body does not have, such as `"a":1,"b":2`.
    #[must_use]
    pub fn with(&self, members: &[u8]) -> Prefix {
        let comma: &[u8] = if self.is_empty || members.is_empty() {
            b""
        } else {
            b","
        };
        Prefix {
            replace: self.bytes.len(),
            bytes: [&self.bytes, members, comma].concat(),
        }
    }
}

/// The body with all edits made; of several edits of one member the last counts.
pub fn build(body: &[u8], scan: &Scan, edits: &[Edit<'_>]) -> Vec<u8> {
    let edit_of = |member: Member| edits.iter().rev().find(|edit| edit.member() == member);
    let deleted: Vec<_> = scan
        .found
        .iter()
        .filter(|found| matches!(edit_of(found.member), Some(Edit::Delete(_))))
        .collect();
    let head = new_members(scan, edits, scan.members > deleted.len());

    // A deletion takes the member up to the next one. The last member has no next one: it goes
    // with the comma before, and with it all deleted members between the two.
    let mut tail: Option<Range<usize>> = None;
    for found in deleted.iter().rev() {
        match &mut tail {
            None if found.next_start.is_some() => break,
            None => tail = Some(found.start..found.value.end),
            Some(tail) if found.next_start == Some(tail.start) => tail.start = found.start,
            Some(_) => break,
        }
    }
    let before_tail = |tail: &Range<usize>| {
        deleted
            .iter()
            .find(|found| found.start == tail.start)
            .and_then(|found| found.previous_end)
    };
    if let Some(tail) = &mut tail
        && let Some(end) = before_tail(tail)
    {
        tail.start = end;
    }

    let mut cuts: Vec<(Range<usize>, &[u8])> = vec![(scan.open..scan.open, &head)];
    for found in &scan.found {
        match edit_of(found.member) {
            Some(Edit::Set(_, json)) => cuts.push((found.value.clone(), json)),
            Some(Edit::Delete(_)) => {
                let in_tail = tail.as_ref().is_some_and(|tail| tail.start <= found.start);
                if let (false, Some(next)) = (in_tail, found.next_start) {
                    cuts.push((found.start..next, b""));
                }
            }
            None => {}
        }
    }
    if let Some(tail) = tail {
        cuts.push((tail, b""));
    }
    splice(body, &cuts)
}

/// Text of the members that `edits` set and the body does not have, with the comma that
/// separates it from what follows.
fn new_members(scan: &Scan, edits: &[Edit<'_>], others_follow: bool) -> Vec<u8> {
    let mut text = Vec::new();
    for (nth, edit) in edits.iter().enumerate() {
        let member = edit.member();
        let later = edits.iter().skip(nth.saturating_add(1));
        if scan.has(member) || later.into_iter().any(|later| later.member() == member) {
            continue;
        }
        if let Edit::Set(_, json) = edit {
            if !text.is_empty() {
                text.push(b',');
            }
            text.push(b'"');
            text.extend_from_slice(member.name().as_bytes());
            text.extend_from_slice(b"\":");
            text.extend_from_slice(json);
        }
    }
    if others_follow && !text.is_empty() {
        text.push(b',');
    }
    text
}

/// `body` with each range replaced by its text; ranges ascend and do not overlap.
fn splice(body: &[u8], cuts: &[(Range<usize>, &[u8])]) -> Vec<u8> {
    let removed: usize = cuts.iter().map(|(range, _)| range.len()).sum();
    let added: usize = cuts.iter().map(|(_, text)| text.len()).sum();
    let mut out = Vec::with_capacity(body.len().saturating_sub(removed).saturating_add(added));
    let mut at = 0;
    for (range, text) in cuts {
        out.extend_from_slice(body.get(at..range.start).unwrap_or_default());
        out.extend_from_slice(text);
        at = range.end;
    }
    out.extend_from_slice(body.get(at..).unwrap_or_default());
    out
}
