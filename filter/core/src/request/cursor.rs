//! A walk over JSON text that validates as it goes and builds nothing.
//!
//! Accepts exactly RFC 8259 with paired surrogate escapes, to a nesting of [`MAX_DEPTH`]. Numbers
//! are checked for form only, so values beyond an `f64` pass. The text must be valid UTF-8;
//! that is the caller's to check.

use super::text::{code_unit, integer_run, is_short_escape, text_run};
use std::ops::Range;

/// Deepest nesting accepted, the outermost object included; the limit of `serde_json`.
pub const MAX_DEPTH: u32 = 127;

/// Where and why a text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {at}")]
pub struct JsonError {
    /// Offset of the offending byte.
    pub at: usize,
    /// What was expected or found.
    pub what: &'static str,
}

/// A string token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    /// From the opening quote to behind the closing one.
    pub(crate) span: Range<usize>,
    /// Holds at least one escape.
    pub(crate) escaped: bool,
}

impl Text {
    /// Between the quotes.
    pub(crate) fn inner(&self) -> Range<usize> {
        self.span.start.saturating_add(1)..self.span.end.saturating_sub(1)
    }
}

/// A position in a text.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// At the first byte that is neither byte order mark nor white space.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        let at = if bytes.starts_with(b"\xef\xbb\xbf") {
            3
        } else {
            0
        };
        let mut cursor = Self { bytes, at };
        cursor.space();
        cursor
    }

    /// Offset of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The next byte.
    #[inline]
    pub(crate) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    /// The bytes of a span seen before.
    pub(crate) fn slice(&self, span: Range<usize>) -> &'a [u8] {
        self.bytes.get(span).unwrap_or_default()
    }

    #[inline]
    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// A refusal at the next byte.
    #[cold]
    pub(crate) fn error(&self, what: &'static str) -> JsonError {
        let what = if self.at < self.bytes.len() {
            what
        } else {
            "the text ends too early"
        };
        JsonError { at: self.at, what }
    }

    /// Skips white space.
    #[inline]
    pub(crate) fn space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Succeeds when only white space is left.
    pub(crate) fn end(&mut self) -> Result<(), JsonError> {
        self.space();
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("unexpected text after the end")),
        }
    }

    #[inline]
    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    /// Walks the object that begins here; `depth` containers are open around it.
    ///
    /// `member` is called with the cursor at each value and has to walk over it.
    pub(crate) fn object<E: From<JsonError>>(
        &mut self,
        depth: u32,
        mut member: impl FnMut(&mut Self, Text) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'{', depth)?;
        if self.eat(b'}') {
            return Ok(());
        }
        loop {
            let key = self.key()?;
            member(self, key)?;
            self.space();
            if self.eat(b',') {
                self.space();
            } else if self.eat(b'}') {
                return Ok(());
            } else {
                return Err(self.error("expected ',' or '}'").into());
            }
        }
    }

    /// Walks the array that begins here; `depth` containers are open around it.
    ///
    /// `element` is called with the cursor at each value and has to walk over it.
    pub(crate) fn array<E: From<JsonError>>(
        &mut self,
        depth: u32,
        mut element: impl FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'[', depth)?;
        if self.eat(b']') {
            return Ok(());
        }
        loop {
            element(self)?;
            self.space();
            if self.eat(b',') {
                self.space();
            } else if self.eat(b']') {
                return Ok(());
            } else {
                return Err(self.error("expected ',' or ']'").into());
            }
        }
    }

    fn open(&mut self, bracket: u8, depth: u32) -> Result<(), JsonError> {
        if depth >= MAX_DEPTH {
            return Err(self.error("nested too deep"));
        }
        if !self.eat(bracket) {
            return Err(self.error("expected an object or an array"));
        }
        self.space();
        Ok(())
    }

    /// A key, its colon and the white space around it.
    fn key(&mut self) -> Result<Text, JsonError> {
        let key = self.string("expected a key in double quotes")?;
        self.space();
        if !self.eat(b':') {
            return Err(self.error("expected ':'"));
        }
        self.space();
        Ok(key)
    }

    /// Walks over the value that begins here and returns its span; `depth` containers are open
    /// around it.
    #[inline]
    pub(crate) fn value(&mut self, depth: u32) -> Result<Range<usize>, JsonError> {
        let start = self.at;
        match self.peek() {
            Some(b'{' | b'[') => self.container(depth)?,
            _ => self.scalar()?,
        }
        Ok(start..self.at)
    }

    /// Walks over a value that is neither object nor array.
    fn scalar(&mut self) -> Result<(), JsonError> {
        match self.peek() {
            Some(b'"') => self.string("expected a string").map(drop),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            _ => Err(self.error("expected a value")),
        }
    }

    /// Walks over the object or array that begins here, whatever is in it.
    fn container(&mut self, depth: u32) -> Result<(), JsonError> {
        // One bit per container opened here, the innermost lowest: 1 for an object.
        let mut kinds = 0u128;
        let mut level = depth;
        loop {
            match self.peek() {
                Some(bracket @ (b'{' | b'[')) => {
                    self.open(bracket, level)?;
                    level += 1;
                    let object = bracket == b'{';
                    kinds = kinds << 1 | u128::from(object);
                    // An empty container falls through to the closing bracket below.
                    match (self.peek(), object) {
                        (Some(b'}'), true) | (Some(b']'), false) => {}
                        (_, true) => {
                            self.key()?;
                            continue;
                        }
                        (_, false) => {
                            self.integers();
                            continue;
                        }
                    }
                }
                _ => self.scalar()?,
            }
            // Behind a value: close what ends here, up to the comma before the next value.
            loop {
                if level == depth {
                    return Ok(());
                }
                self.space();
                let object = kinds & 1 == 1;
                match (self.peek(), object) {
                    (Some(b','), true) => {
                        self.at += 1;
                        self.space();
                        self.key()?;
                        break;
                    }
                    (Some(b','), false) => {
                        self.at += 1;
                        self.space();
                        self.integers();
                        break;
                    }
                    (Some(b'}'), true) | (Some(b']'), false) => {
                        self.at += 1;
                        level -= 1;
                        kinds >>= 1;
                    }
                    (_, true) => return Err(self.error("expected ',' or '}'")),
                    (_, false) => return Err(self.error("expected ',' or ']'")),
                }
            }
        }
    }

    /// Skips array elements that are plain whole numbers, up to the beginning of another one.
    #[inline]
    pub(crate) fn integers(&mut self) {
        self.at += integer_run(self.rest());
        self.space();
    }

    /// Walks over the string that begins here.
    // Once in the module: it is the inner loop, and what calls it is large enough.
    #[inline(never)]
    pub(crate) fn string(&mut self, expected: &'static str) -> Result<Text, JsonError> {
        let start = self.at;
        let mut escaped = false;
        if !self.eat(b'"') {
            return Err(self.error(expected));
        }
        loop {
            self.at += text_run(self.rest(), &mut escaped);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(Text {
                        span: start..self.at,
                        escaped,
                    });
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                _ => return Err(self.error("control character in a string")),
            }
        }
    }

    /// Walks over the escape that begins here.
    fn escape(&mut self) -> Result<(), JsonError> {
        self.at += 1;
        match self.peek() {
            Some(byte) if is_short_escape(byte) => {
                self.at += 1;
                Ok(())
            }
            Some(b'u') => self.unicode_escape(),
            _ => Err(self.error("unknown escape")),
        }
    }

    fn unicode_escape(&mut self) -> Result<(), JsonError> {
        self.at += 1;
        match self.hex()? {
            0xD800..0xDC00 => {
                let pair = self.eat(b'\\') && self.eat(b'u');
                if pair && (0xDC00..0xE000).contains(&self.hex()?) {
                    Ok(())
                } else {
                    Err(self.error("unpaired surrogate"))
                }
            }
            0xDC00..0xE000 => Err(self.error("unpaired surrogate")),
            _ => Ok(()),
        }
    }

    fn hex(&mut self) -> Result<u16, JsonError> {
        let (unit, _) =
            code_unit(self.rest()).ok_or_else(|| self.error("expected four hex digits"))?;
        self.at += 4;
        Ok(unit)
    }

    #[inline]
    fn number(&mut self) -> Result<(), JsonError> {
        self.eat(b'-');
        if !self.eat(b'0') {
            self.digits()?;
        }
        if self.eat(b'.') {
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if !self.eat(b'-') {
                self.eat(b'+');
            }
            self.digits()?;
        }
        Ok(())
    }

    /// At least one digit.
    #[inline]
    fn digits(&mut self) -> Result<(), JsonError> {
        if !self.peek().is_some_and(|b| b.is_ascii_digit()) {
            return Err(self.error("expected a digit"));
        }
        while self.peek().is_some_and(|b| b.is_ascii_digit()) {
            self.at += 1;
        }
        Ok(())
    }

    fn literal(&mut self, word: &[u8]) -> Result<(), JsonError> {
        if !self.rest().starts_with(word) {
            return Err(self.error("expected true, false or null"));
        }
        self.at += word.len();
        Ok(())
    }
}
