//! Kubernetes label selectors: which pods the `external-filter` header allows.
//!
//! Grammar and meaning are those of `labels.Parse` of Kubernetes' apimachinery (v0.34), so what
//! works with `kubectl -l` works here:
//!
//! ```text
//! selector    = [ requirement { "," requirement } ]        all must hold; an empty one always does
//! requirement = key | "!" key                              the label exists, or does not
//!             | key ( "=" | "==" | "!=" ) [ value ]        "!=" also holds without the label
//!             | key ( "in" | "notin" ) "(" [ value ] { "," [ value ] } ")"
//!             | key ( ">" | "<" ) value                    whole numbers; needs the label
//! ```
//!
//! Blanks may stand between words. There is no quoting: quotes, like all else that no label can
//! hold, are a mistake. `in` and `notin` may be keys and values too.

use pd_wire::knobs::excerpt;

/// Longest selector, in bytes.
const MAX_LENGTH: usize = 4096;
/// Most requirements of a selector.
const MAX_REQUIREMENTS: usize = 32;
/// Most values of all its requirements together.
const MAX_VALUES: usize = 256;
/// Longest name of a key, and longest value, in bytes.
const MAX_NAME: usize = 63;
/// Longest prefix of a key, in bytes.
const MAX_PREFIX: usize = 253;

/// Requirements on labels, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
    Above(i64),
    Below(i64),
}

/// What is wrong with a selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// Bytes that are no UTF-8.
    #[error("it is no text")]
    NotText,
    /// Longer than [`MAX_LENGTH`].
    #[error("it is longer than {MAX_LENGTH} bytes")]
    TooLong,
    /// More than [`MAX_REQUIREMENTS`], or more than [`MAX_VALUES`].
    #[error(
        "it has more than {MAX_REQUIREMENTS} requirements or {MAX_VALUES} values; combine them"
    )]
    TooMany,
    /// Another word was expected.
    #[error("found {found:?}, expected {expected}")]
    Unexpected {
        /// What stands there, shortened; empty at the end.
        found: String,
        /// What may stand there.
        expected: &'static str,
    },
    /// No label can have this key.
    #[error(
        "{0:?} is no label key: use an optional DNS name and a slash, then at most 63 letters, \
         digits, '-', '_' and '.' that begin and end with a letter or digit"
    )]
    Key(String),
    /// No label can have this value.
    #[error(
        "{0:?} is no label value: use at most 63 letters, digits, '-', '_' and '.' that begin and \
         end with a letter or digit, without quotes"
    )]
    Value(String),
    /// `>` and `<` compare whole numbers.
    #[error("{0:?} is no whole number")]
    Number(String),
}

// === impl Selector ===

impl Selector {
    /// Reads a selector.
    ///
    /// # Errors
    /// The first mistake.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        if text.len() > MAX_LENGTH {
            return Err(SelectorError::TooLong);
        }
        let mut parser = Parser {
            rest: text,
            values: 0,
        };
        let mut requirements = Vec::new();
        if parser.peek() == Word::End {
            return Ok(Self::default());
        }
        loop {
            if requirements.len() == MAX_REQUIREMENTS {
                return Err(SelectorError::TooMany);
            }
            requirements.push(parser.requirement()?);
            match parser.next() {
                Word::End => return Ok(Self { requirements }),
                Word::Symbol(",") => {}
                other => return Err(other.instead_of("a comma or the end")),
            }
        }
    }

    /// True when all requirements hold for these labels.
    #[must_use]
    pub fn matches(&self, labels: &[(String, String)]) -> bool {
        self.requirements.iter().all(|requirement| {
            let label = labels.iter().find(|(key, _)| *key == requirement.key);
            requirement
                .test
                .holds(label.map(|(_, value)| value.as_str()))
        })
    }
}

// === impl Test ===

impl Test {
    fn holds(&self, label: Option<&str>) -> bool {
        let among = |values: &[String]| {
            label.is_some_and(|label| values.iter().any(|value| value == label))
        };
        let number = || label?.parse::<i64>().ok();
        match self {
            Self::Exists => label.is_some(),
            Self::Absent => label.is_none(),
            Self::In(values) => among(values),
            Self::NotIn(values) => !among(values),
            Self::Above(bound) => number().is_some_and(|number| number > *bound),
            Self::Below(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

/// A word of a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word<'a> {
    /// A key, a value, `in` or `notin`.
    Name(&'a str),
    /// An operator, a comma, a parenthesis.
    Symbol(&'a str),
    End,
}

impl Word<'_> {
    fn instead_of(self, expected: &'static str) -> SelectorError {
        let found = match self {
            Self::Name(text) | Self::Symbol(text) => excerpt(text),
            Self::End => String::new(),
        };
        SelectorError::Unexpected { found, expected }
    }
}

struct Parser<'a> {
    rest: &'a str,
    /// Values read so far.
    values: usize,
}

// === impl Parser ===

impl<'a> Parser<'a> {
    /// The word at the front and what follows it.
    fn split(&self) -> (Word<'a>, &'a str) {
        let text = self.rest.trim_start_matches(is_blank);
        let Some(first) = text.chars().next() else {
            return (Word::End, "");
        };
        let symbol = is_symbol(first);
        let length = if text.starts_with("==") || text.starts_with("!=") {
            2
        } else if symbol {
            1
        } else {
            text.find(|c| is_blank(c) || is_symbol(c))
                .unwrap_or(text.len())
        };
        let (word, rest) = text.split_at_checked(length).unwrap_or((text, ""));
        let word = if symbol {
            Word::Symbol(word)
        } else {
            Word::Name(word)
        };
        (word, rest)
    }

    fn peek(&self) -> Word<'a> {
        self.split().0
    }

    fn next(&mut self) -> Word<'a> {
        let (word, rest) = self.split();
        self.rest = rest;
        word
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let absent = self.peek() == Word::Symbol("!");
        if absent {
            self.next();
        }
        let key = match self.next() {
            Word::Name(key) if is_key(key) => key.to_owned(),
            Word::Name(other) => return Err(SelectorError::Key(excerpt(other))),
            other => return Err(other.instead_of("a label key")),
        };
        let test = if absent { Test::Absent } else { self.test()? };
        Ok(Requirement { key, test })
    }

    /// What follows a key.
    fn test(&mut self) -> Result<Test, SelectorError> {
        if matches!(self.peek(), Word::End | Word::Symbol(",")) {
            return Ok(Test::Exists);
        }
        match self.next() {
            Word::Symbol("=" | "==") => Ok(Test::In(vec![self.value()?])),
            Word::Symbol("!=") => Ok(Test::NotIn(vec![self.value()?])),
            Word::Symbol(">") => self.number().map(Test::Above),
            Word::Symbol("<") => self.number().map(Test::Below),
            Word::Name("in") => self.set().map(Test::In),
            Word::Name("notin") => self.set().map(Test::NotIn),
            other => Err(other.instead_of("=, ==, !=, in, notin, > or <")),
        }
    }

    /// A value, also the empty one.
    fn value(&mut self) -> Result<String, SelectorError> {
        self.values = self.values.saturating_add(1);
        if self.values > MAX_VALUES {
            return Err(SelectorError::TooMany);
        }
        match self.peek() {
            Word::Name(value) if is_name(value) => {
                self.next();
                Ok(value.to_owned())
            }
            Word::Name(other) => Err(SelectorError::Value(excerpt(other))),
            Word::End | Word::Symbol("," | ")") => Ok(String::new()),
            other => Err(other.instead_of("a label value")),
        }
    }

    fn number(&mut self) -> Result<i64, SelectorError> {
        let value = self.value()?;
        value
            .parse()
            .map_err(|_| SelectorError::Number(excerpt(&value)))
    }

    /// Values in parentheses.
    fn set(&mut self) -> Result<Vec<String>, SelectorError> {
        match self.next() {
            Word::Symbol("(") => {}
            other => return Err(other.instead_of("(")),
        }
        let mut values = Vec::new();
        loop {
            let value = self.value()?;
            if !values.contains(&value) {
                values.push(value);
            }
            match self.next() {
                Word::Symbol(")") => return Ok(values),
                Word::Symbol(",") => {}
                other => return Err(other.instead_of("a comma or )")),
            }
        }
    }
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

fn is_symbol(c: char) -> bool {
    matches!(c, '=' | '!' | '(' | ')' | ',' | '>' | '<')
}

/// `[prefix/]name`, the prefix being a DNS subdomain.
fn is_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name(name),
        None => is_name(text),
    }
}

fn is_subdomain(text: &str) -> bool {
    let lower = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= MAX_PREFIX
        && text
            .split('.')
            .all(|part| spans(part, lower, |byte| byte == b'-'))
}

/// What a label's name and value are made of; never empty.
fn is_name(text: &str) -> bool {
    let inner = |byte| matches!(byte, b'-' | b'_' | b'.');
    text.len() <= MAX_NAME && spans(text, |byte| byte.is_ascii_alphanumeric(), inner)
}

/// One or more bytes; the first and the last are `outer`, those between may also be `inner`.
fn spans(text: &str, outer: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
        return false;
    };
    outer(*first) && outer(*last) && bytes.iter().all(|byte| outer(*byte) || inner(*byte))
}

#[cfg(test)]
mod tests;
