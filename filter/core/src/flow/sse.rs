//! When a held stream may be let go: at its first content event.
//!
//! A decode engine answers 200 (and, on chat, a role-only chunk) before it has pulled the KV. If
//! the pull fails, the first event that says anything is an error, and the client should get a
//! real status. So what precedes the first content event is held, and nothing else is. Chunk
//! borders carry no meaning: events are lines, wherever a chunk ends.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::borrow::Cow;

/// Most bytes held while waiting for content; more than that is let go unseen.
pub const HOLD_LIMIT: usize = 64 << 10;

/// How a line of data begins.
const DATA: &[u8] = b"data:";

/// What a held stream turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Only preamble so far: go on holding.
    Preamble,
    /// Content, or nothing we understand: let everything go.
    Content,
    /// The first event that says anything is an error.
    Error,
}

/// Reads the beginning of an event stream until it knows what it is.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Tail of the bytes seen that is not a whole line yet.
    line: Vec<u8>,
    /// Bytes seen.
    seen: usize,
    /// A line of data was seen, if not whole.
    begun: bool,
}

impl Opening {
    /// Feeds the next chunk.
    pub fn feed(&mut self, chunk: &[u8]) -> Verdict {
        self.seen = self.seen.saturating_add(chunk.len());
        if self.seen > HOLD_LIMIT {
            return Verdict::Content;
        }
        let mut rest = chunk;
        // A line ends with either or both; the blank line between the two says nothing.
        while let Some(end) = memchr::memchr2(b'\r', b'\n', rest) {
            let (head, tail) = rest.split_at(end);
            self.line.extend_from_slice(head);
            rest = tail.get(1..).unwrap_or_default();
            let verdict = line_verdict(&self.line);
            self.begun |= self.line.starts_with(DATA);
            self.line.clear();
            if verdict != Verdict::Preamble {
                return verdict;
            }
        }
        self.line.extend_from_slice(rest);
        self.begun |= self.line.starts_with(DATA);
        Verdict::Preamble
    }

    /// True once a line of data was seen. Before that there were only signs of life, such as
    /// comments.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// The stream is over: what its last line says, which may lack a line end.
    pub fn finish(&self) -> Verdict {
        line_verdict(&self.line)
    }
}

/// What one line says.
fn line_verdict(line: &[u8]) -> Verdict {
    let Some(data) = line.strip_prefix(DATA) else {
        // Blank lines, comments (keep-alives) and event names say nothing by themselves.
        return Verdict::Preamble;
    };
    let data = data.strip_prefix(b" ").unwrap_or(data);
    match serde_json::from_slice::<Data<'_>>(data) {
        Ok(event) => event.verdict(),
        Err(_) => Verdict::Content,
    }
}

/// The members that tell preamble, error and content apart in the four APIs.
#[derive(Deserialize)]
struct Data<'a> {
    #[serde(default)]
    error: Option<IgnoredAny>,
    /// `error` where the error's members stand at the top.
    #[serde(default, borrow)]
    object: Option<Cow<'a, str>>,
    /// Event type of the messages and responses APIs.
    #[serde(default, borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    choices: Option<Vec<Choice<'a>>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default, borrow)]
    delta: Option<Delta<'a>>,
    #[serde(default)]
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(default, borrow)]
    role: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(default)]
    tool_calls: Option<IgnoredAny>,
    #[serde(default)]
    reasoning: Option<IgnoredAny>,
    #[serde(default)]
    reasoning_content: Option<IgnoredAny>,
}

impl Data<'_> {
    fn verdict(&self) -> Verdict {
        if self.error.is_some() || self.object.as_deref() == Some("error") {
            return Verdict::Error;
        }
        match self.kind.as_deref() {
            Some("error" | "response.failed") => return Verdict::Error,
            Some(
                "message_start"
                | "content_block_start"
                | "ping"
                | "response.created"
                | "response.in_progress"
                | "response.queued"
                | "response.output_item.added"
                | "response.content_part.added",
            ) => return Verdict::Preamble,
            _ => {}
        }
        match &self.choices {
            Some(choices) if !choices.is_empty() && choices.iter().all(Choice::is_role_only) => {
                Verdict::Preamble
            }
            _ => Verdict::Content,
        }
    }
}

impl Choice<'_> {
    fn is_role_only(&self) -> bool {
        self.finish_reason.is_none()
            && self.delta.as_ref().is_some_and(|delta| {
                delta.role.is_some()
                    && delta.content.as_deref().unwrap_or_default().is_empty()
                    && delta.tool_calls.is_none()
                    && delta.reasoning.is_none()
                    && delta.reasoning_content.is_none()
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
    const ERROR: &str =
        "data: {\"error\": {\"message\": \"Internal server error\", \"code\": 500}}\n\n";
    const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" char\"},\"finish_reason\":null}]}\n\n";

    fn verdict(text: &str, chunk: usize) -> Verdict {
        let mut opening = Opening::default();
        for part in text.as_bytes().chunks(chunk) {
            let verdict = opening.feed(part);
            if verdict != Verdict::Preamble {
                return verdict;
            }
        }
        Verdict::Preamble
    }

    #[test]
    fn chunk_borders_never_change_the_verdict() {
        for chunk in 1..200 {
            assert_eq!(verdict(ROLE, chunk), Verdict::Preamble);
            assert_eq!(verdict(&format!("{ROLE}{ERROR}"), chunk), Verdict::Error);
            assert_eq!(
                verdict(&format!("{ROLE}{TOKEN}{ERROR}"), chunk),
                Verdict::Content
            );
            assert_eq!(
                verdict(&format!(": ping\r\n\r\n{TOKEN}"), chunk),
                Verdict::Content
            );
            for ends in ["\r\n", "\r"] {
                let both = format!("{ROLE}{ERROR}").replace('\n', ends);
                assert_eq!(verdict(&both, chunk), Verdict::Error);
            }
        }
    }

    #[test]
    fn an_error_may_have_its_members_at_the_top() {
        let flat = "data: {\"object\":\"error\",\"message\":\"no KV\",\"code\":500}\n\n";
        assert_eq!(verdict(flat, 9), Verdict::Error);
        let chunk = TOKEN.replace(
            "{\"choices",
            "{\"object\":\"chat.completion.chunk\",\"choices",
        );
        assert_eq!(verdict(&chunk, 9), Verdict::Content);
    }

    #[test]
    fn a_stream_begins_with_its_first_data() {
        let mut opening = Opening::default();
        for (chunk, has_begun) in [
            (": ping\n\n", false),
            (": pi", false),
            ("ng\n\nevent: ping\nretry: 1\n", false),
            (": ping\n\ndata: ", true),
            (&ROLE[6..], true),
        ] {
            assert_eq!(opening.feed(chunk.as_bytes()), Verdict::Preamble);
            assert_eq!(opening.has_begun(), has_begun, "{chunk:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_let_go() {
        assert_eq!(verdict("data: [DONE]\n\n", 5), Verdict::Content);
        assert_eq!(verdict("data: {broken\n\n", 5), Verdict::Content);
        assert_eq!(verdict(&":".repeat(HOLD_LIMIT + 1), 1000), Verdict::Content);
    }

    #[test]
    fn a_last_line_counts_without_its_line_end() {
        let mut opening = Opening::default();
        assert_eq!(opening.feed(ERROR.trim_end().as_bytes()), Verdict::Preamble);
        assert_eq!(opening.finish(), Verdict::Error);
        assert_eq!(Opening::default().finish(), Verdict::Preamble);
    }

    #[test]
    fn the_other_apis_open_with_preamble_events() {
        let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n";
        assert_eq!(verdict(start, 7), Verdict::Preamble);
        let failed = "event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n";
        assert_eq!(verdict(&format!("{start}{failed}"), 7), Verdict::Error);
        let delta = "data: {\"type\":\"content_block_delta\"}\n\n";
        assert_eq!(verdict(&format!("{start}{delta}"), 7), Verdict::Content);
    }
}
