//! One pass over a request body: is it JSON, what does it ask for, where do the members stand
//! that the gateway may edit.
//!
//! Keys are compared after unescaping, so a reserved member cannot be smuggled in by spelling it
//! with escapes.

use super::cursor::{Cursor, JsonError, Text};
use super::text::unescape;
use super::{BodyError, Endpoint, Member};
use std::ops::Range;

/// Most pieces of prompt identity remembered; the text of later messages is counted but not part
/// of the identity, which is then that of a shorter prefix.
pub const MAX_PIECES: usize = 1 << 15;

/// Containers open around a top-level value.
const TOP: u32 = 1;

/// What a valid body says. All positions are byte offsets into that body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// `model`, never empty.
    pub model: String,
    /// `stream`; absent and null are false.
    pub stream: bool,
    /// One prompt, one answer: the KV of a prefill can be handed to a decode pod.
    ///
    /// False for a list of prompts, `n` or `best_of` other than 1, and prompts given as
    /// embeddings: a hand-over names the blocks of one sequence only.
    pub hands_over: bool,
    /// Position behind the opening brace.
    pub open: usize,
    /// Number of top-level members.
    pub members: usize,
    pub(super) found: Vec<Found>,
    pieces: Vec<Range<usize>>,
    text_bytes: usize,
}

/// Where a controlled member stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) member: Member,
    /// First byte of the key.
    pub(super) start: usize,
    pub(super) value: Range<usize>,
    /// End of the value before, if there is one.
    pub(super) previous_end: Option<usize>,
    /// First byte of the key behind, if there is one.
    pub(super) next_start: Option<usize>,
}

impl Scan {
    /// True for a body without any member.
    pub fn is_empty(&self) -> bool {
        self.members == 0
    }

    /// True when the body has this member, also when it is null.
    pub fn has(&self, member: Member) -> bool {
        self.find(member).is_some()
    }

    /// Raw JSON of a member of `body`, the text that was scanned.
    pub fn value<'b>(&self, body: &'b [u8], member: Member) -> Option<&'b [u8]> {
        body.get(self.find(member)?.value.clone())
    }

    /// Where the value of a member stands.
    pub fn span(&self, member: Member) -> Option<Range<usize>> {
        self.find(member).map(|found| found.value.clone())
    }

    /// Raw JSON that identifies the prompt, in the order the engine renders it.
    ///
    /// Chat: `tools`, then role and content of each message; completions: `prompt`; responses:
    /// `tools`, `input`; messages: `system`, `tools`, then role and content of each message.
    pub fn identity<'b>(&self, body: &'b [u8]) -> impl Iterator<Item = &'b [u8]> {
        self.pieces
            .iter()
            .map(|piece| body.get(piece.clone()).unwrap_or_default())
    }

    /// Bytes of the prompt's text: the length of what [`Scan::identity`] stands for.
    pub fn text_bytes(&self) -> usize {
        self.text_bytes
    }

    fn find(&self, member: Member) -> Option<&Found> {
        self.found.iter().find(|found| found.member == member)
    }
}

/// Reads a request body.
///
/// # Errors
/// See [`BodyError`]: no UTF-8, no JSON object, a controlled member twice, a reserved member, no
/// usable `model`, a `stream` that is no boolean.
pub fn scan(endpoint: Endpoint, body: &[u8]) -> Result<Scan, BodyError> {
    if simdutf8::basic::from_utf8(body).is_err() {
        let at = simdutf8::compat::from_utf8(body).map_or_else(|e| e.valid_up_to(), str::len);
        return Err(BodyError::NotUtf8 { at });
    }
    let mut cursor = Cursor::new(body);
    match cursor.peek() {
        None => return Err(BodyError::Empty),
        Some(b'{') => {}
        Some(_) => {
            cursor.value(0)?;
            cursor.end()?;
            return Err(BodyError::NotAnObject);
        }
    }
    let mut reader = Reader::new(endpoint, cursor.at().saturating_add(1));
    cursor.object(0, |cursor, key| reader.member(cursor, &key))?;
    cursor.end()?;
    reader.finish()
}

/// What has been read so far.
struct Reader {
    endpoint: Endpoint,
    model: Option<String>,
    stream: bool,
    one_sequence: bool,
    open: usize,
    members: usize,
    previous_end: Option<usize>,
    /// The member before this one is the last of `found`.
    follows_found: bool,
    found: Vec<Found>,
    tools: Option<Range<usize>>,
    system: Option<Range<usize>>,
    /// Pieces of `messages`, `prompt` or `input`.
    prompt: Vec<Range<usize>>,
    text_bytes: usize,
}

impl Reader {
    fn new(endpoint: Endpoint, open: usize) -> Self {
        Self {
            endpoint,
            model: None,
            stream: false,
            one_sequence: true,
            open,
            members: 0,
            previous_end: None,
            follows_found: false,
            found: Vec::new(),
            tools: None,
            system: None,
            prompt: Vec::new(),
            text_bytes: 0,
        }
    }

    fn member(&mut self, cursor: &mut Cursor<'_>, key: &Text) -> Result<(), BodyError> {
        if self.follows_found
            && let Some(last) = self.found.last_mut()
        {
            last.next_start = Some(key.span.start);
        }
        self.members = self.members.saturating_add(1);
        let value = match controlled(cursor, key) {
            Some(member) if member.is_reserved() => {
                return Err(BodyError::Reserved(member.name()));
            }
            Some(member) => {
                if self.found.iter().any(|found| found.member == member) {
                    return Err(BodyError::Duplicate(member.name()));
                }
                let value = self.controlled(cursor, member)?;
                self.found.push(Found {
                    member,
                    start: key.span.start,
                    value: value.clone(),
                    previous_end: self.previous_end,
                    next_start: None,
                });
                self.follows_found = true;
                value
            }
            None => {
                self.follows_found = false;
                cursor.value(TOP)?
            }
        };
        self.previous_end = Some(value.end);
        Ok(())
    }

    /// Walks over the value of a controlled member and takes from it what matters.
    fn controlled(
        &mut self,
        cursor: &mut Cursor<'_>,
        member: Member,
    ) -> Result<Range<usize>, BodyError> {
        use Endpoint::{Chat, Completions, Messages, Other, Responses};
        let start = cursor.at();
        match (member, self.endpoint) {
            (Member::Model, _) => {
                if cursor.peek() != Some(b'"') {
                    return Err(BodyError::ModelNotAName);
                }
                let text = cursor.string("expected a string")?;
                let name = unescape(cursor.slice(text.inner()));
                if name.as_deref().is_none_or(str::is_empty) {
                    return Err(BodyError::ModelNotAName);
                }
                self.model = name;
            }
            (Member::Stream, _) => {
                let span = cursor.value(TOP)?;
                self.stream = match cursor.slice(span) {
                    b"true" => true,
                    b"false" | b"null" => false,
                    _ => return Err(BodyError::StreamNotBoolean),
                };
            }
            (Member::N | Member::BestOf, _) => {
                let span = cursor.value(TOP)?;
                self.one_sequence &= is_at_most_one(cursor.slice(span));
            }
            (Member::PromptEmbeds, Completions) => {
                let span = cursor.value(TOP)?;
                self.one_sequence &= cursor.slice(span) == b"null";
            }
            (Member::Messages, Chat | Messages) if cursor.peek() == Some(b'[') => {
                cursor.array(TOP, |cursor| self.message(cursor))?;
            }
            (Member::Prompt, Completions) => {
                self.one_sequence &= is_one_prompt(cursor)?;
                self.piece(start..cursor.at());
            }
            (Member::Input, Responses) => {
                let span = cursor.value(TOP)?;
                self.piece(span);
            }
            (Member::Tools, Chat | Messages | Responses) => {
                self.tools = Some(cursor.value(TOP)?);
            }
            (Member::System, Messages) => self.system = Some(cursor.value(TOP)?),
            (_, Chat | Completions | Responses | Messages | Other) => {
                cursor.value(TOP)?;
            }
        }
        Ok(start..cursor.at())
    }

    /// Walks over one entry of `messages`. As engines do, the last of equal keys counts.
    fn message(&mut self, cursor: &mut Cursor<'_>) -> Result<(), JsonError> {
        const MESSAGE: u32 = TOP + 1;
        if cursor.peek() != Some(b'{') {
            cursor.value(MESSAGE)?;
            return Ok(());
        }
        let (mut role, mut content) = (None, None);
        cursor.object::<JsonError>(MESSAGE, |cursor, key| {
            let part = match (key.escaped, cursor.slice(key.inner())) {
                (false, b"role") => Some(&mut role),
                (false, b"content") => Some(&mut content),
                _ => None,
            };
            let value = cursor.value(MESSAGE + 1)?;
            if let Some(part) = part {
                *part = Some(value);
            }
            Ok(())
        })?;
        for piece in [role, content].into_iter().flatten() {
            self.piece(piece);
        }
        Ok(())
    }

    fn piece(&mut self, piece: Range<usize>) {
        self.text_bytes = self.text_bytes.saturating_add(piece.len());
        if self.prompt.len() < MAX_PIECES {
            self.prompt.push(piece);
        }
    }

    fn finish(self) -> Result<Scan, BodyError> {
        let head: Vec<_> = [self.system, self.tools].into_iter().flatten().collect();
        let head_bytes: usize = head.iter().map(Range::len).sum();
        let mut pieces = self.prompt;
        pieces.splice(..0, head);
        Ok(Scan {
            model: self.model.ok_or(BodyError::ModelMissing)?,
            stream: self.stream,
            hands_over: self.one_sequence,
            open: self.open,
            members: self.members,
            found: self.found,
            pieces,
            text_bytes: self.text_bytes.saturating_add(head_bytes),
        })
    }
}

/// The controlled member that `key` spells, with or without escapes.
fn controlled(cursor: &Cursor<'_>, key: &Text) -> Option<Member> {
    let raw = cursor.slice(key.inner());
    if !key.escaped {
        return Member::of_key(raw);
    }
    // An escape takes at most six bytes for one.
    if raw.len() > Member::LONGEST_NAME * 6 {
        return None;
    }
    Member::of_key(unescape(raw)?.as_bytes())
}

/// True for a count that asks for one sequence. Values that are no number are for the engine to
/// judge, in one leg: engines convert some of them.
fn is_at_most_one(raw: &[u8]) -> bool {
    raw == b"null"
        || str::from_utf8(raw)
            .ok()
            .and_then(|text| text.parse::<f64>().ok())
            .is_some_and(|count| count <= 1.0)
}

/// Walks over `prompt`: text and a list of token ids are one prompt, a list of texts or of such
/// lists as many as it has entries.
fn is_one_prompt(cursor: &mut Cursor<'_>) -> Result<bool, JsonError> {
    if cursor.peek() != Some(b'[') {
        cursor.value(TOP)?;
        return Ok(true);
    }
    let mut entries = 0usize;
    let mut of_prompts = false;
    cursor.array::<JsonError>(TOP, |cursor| {
        cursor.integers();
        of_prompts |= !matches!(cursor.peek(), Some(b'-' | b'0'..=b'9'));
        entries = entries.saturating_add(1);
        cursor.value(TOP + 1)?;
        Ok(())
    })?;
    Ok(entries <= 1 || !of_prompts)
}
