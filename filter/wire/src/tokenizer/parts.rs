//! Normalizers and pre-tokenizers that are counted with, as `tokenizer.json` writes them.

use serde::{Deserialize, Serialize};

/// Deepest sequence in a sequence, and most steps of one.
const MAX_DEPTH: u32 = 3;
const MAX_STEPS: usize = 32;
/// Longest text of a pattern or of what replaces it, in bytes.
const MAX_TEXT: usize = 4096;

/// A change of the text before it is cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Normalizer {
    /// One after the other.
    Sequence {
        /// The steps.
        normalizers: Vec<Normalizer>,
    },
    /// Unicode normalization form C.
    NFC,
    /// Unicode normalization form D.
    NFD,
    /// Unicode normalization form KC.
    NFKC,
    /// Unicode normalization form KD.
    NFKD,
    /// Lower case.
    Lowercase,
    /// A text before everything.
    Prepend {
        /// The text.
        prepend: String,
    },
    /// A text for another. Only a fixed one: an expression that matches nothing at all breaks the
    /// library's bookkeeping.
    Replace {
        /// What is replaced.
        pattern: Pattern,
        /// By what.
        content: String,
    },
}

/// A way to cut text into words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum PreTokenizer {
    /// One after the other.
    Sequence {
        /// The steps.
        pretokenizers: Vec<PreTokenizer>,
    },
    /// At a pattern.
    Split {
        /// The pattern.
        pattern: Pattern,
        /// What becomes of what it matches.
        behavior: Behavior,
        /// Between the matches instead.
        #[serde(default)]
        invert: bool,
    },
    /// Bytes as printable characters.
    ByteLevel {
        /// A space before the first word.
        #[serde(default = "yes")]
        add_prefix_space: bool,
        /// Cut as GPT-2 does.
        #[serde(default = "yes")]
        use_regex: bool,
    },
    /// Numbers apart.
    Digits {
        /// Every digit apart.
        #[serde(default)]
        individual_digits: bool,
    },
    /// Punctuation apart.
    Punctuation {
        /// What becomes of it.
        #[serde(default)]
        behavior: Behavior,
    },
    /// Words and punctuation; white space is dropped.
    Whitespace,
    /// At white space, which is dropped.
    WhitespaceSplit,
    /// White space as a visible character, cut before it.
    Metaspace {
        /// The character.
        replacement: char,
        /// Where one is added in front.
        #[serde(default)]
        prepend_scheme: PrependScheme,
        /// Cut at all.
        #[serde(default = "yes")]
        split: bool,
    },
}

/// What a text is searched for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pattern {
    /// This very text.
    String(String),
    /// A regular expression.
    Regex(String),
}

/// What becomes of a delimiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Behavior {
    /// Dropped.
    Removed,
    /// A word of its own.
    #[default]
    Isolated,
    /// End of the word before.
    MergedWithPrevious,
    /// Beginning of the word behind.
    MergedWithNext,
    /// One word with its like.
    Contiguous,
}

/// Where a space is added in front.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrependScheme {
    /// Before the text.
    First,
    /// Nowhere.
    Never,
    /// Before every piece between added tokens.
    #[default]
    Always,
}

fn yes() -> bool {
    true
}

// === impl Normalizer ===

impl Normalizer {
    pub(super) fn check(&self, found: &mut Vec<String>) {
        self.check_at(0, found);
    }

    fn check_at(&self, depth: u32, found: &mut Vec<String>) {
        match self {
            Self::Sequence { normalizers } => {
                if is_wide_or_deep("normalizer", normalizers.len(), depth, found) {
                    return;
                }
                for step in normalizers {
                    step.check_at(depth.saturating_add(1), found);
                }
            }
            Self::Prepend { prepend } => check_text("normalizer.prepend", prepend, found),
            Self::Replace { pattern, content } => {
                match pattern {
                    Pattern::String(text) => check_text("normalizer.pattern", text, found),
                    Pattern::Regex(_) => found.push(
                        "normalizer.pattern: Regex is not counted with, only String".to_owned(),
                    ),
                }
                if content.len() > MAX_TEXT {
                    found.push(format!("normalizer.content: longer than {MAX_TEXT} bytes"));
                }
            }
            Self::NFC | Self::NFD | Self::NFKC | Self::NFKD | Self::Lowercase => {}
        }
    }
}

// === impl PreTokenizer ===

impl PreTokenizer {
    pub(super) fn check(&self, found: &mut Vec<String>) {
        self.check_at(0, found);
    }

    fn check_at(&self, depth: u32, found: &mut Vec<String>) {
        match self {
            Self::Sequence { pretokenizers } => {
                if is_wide_or_deep("pre_tokenizer", pretokenizers.len(), depth, found) {
                    return;
                }
                for step in pretokenizers {
                    step.check_at(depth.saturating_add(1), found);
                }
            }
            Self::Split { pattern, .. } => {
                let (Pattern::String(text) | Pattern::Regex(text)) = pattern;
                check_text("pre_tokenizer.pattern", text, found);
            }
            Self::ByteLevel { .. }
            | Self::Digits { .. }
            | Self::Punctuation { .. }
            | Self::Whitespace
            | Self::WhitespaceSplit
            | Self::Metaspace { .. } => {}
        }
    }
}

fn is_wide_or_deep(part: &str, steps: usize, depth: u32, found: &mut Vec<String>) -> bool {
    let is_wrong = steps > MAX_STEPS || depth >= MAX_DEPTH;
    if is_wrong {
        found.push(format!(
            "{part}: a Sequence of {steps} steps {depth} deep, at most {MAX_STEPS} steps and \
             {MAX_DEPTH} deep"
        ));
    }
    is_wrong
}

fn check_text(place: &str, text: &str, found: &mut Vec<String>) {
    if text.is_empty() || text.len() > MAX_TEXT {
        let len = text.len();
        found.push(format!("{place}: {len} bytes, must be 1 to {MAX_TEXT}"));
    }
}
