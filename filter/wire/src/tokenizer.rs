//! The tokenizer of a model: what of a Hugging Face `tokenizer.json` is needed to count tokens,
//! and the message that pushes it.
//!
//! Reading is strict where the program that counts would stumble: only byte-pair encodings (which
//! all served generative models use) with the normalizers and pre-tokenizers listed here are
//! taken, and merges that a builder could trip over are refused. What counting does not need
//! (decoder, post-processor, truncation, padding, dropout) is left out, so the pushed form is a
//! half to a third of the file.

mod message;
mod parts;
mod vocabulary;

pub use message::{MAX_NAME, Message, MessageError, digest};
pub use parts::{Behavior, Normalizer, Pattern, PreTokenizer, PrependScheme};

use crate::topology::MAX_MESSAGE;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Largest file an agent reads, in bytes.
pub const MAX_FILE: usize = 32 << 20;
/// Largest pushed form, in bytes: a message less its first line.
pub const MAX_PUSHED: usize = MAX_MESSAGE - (8 << 10);
/// Most tokenizers a filter holds.
pub const MAX_TOKENIZERS: usize = 8;
/// Most entries of a vocabulary.
const MAX_VOCABULARY: usize = 1 << 20;
/// Most added tokens.
const MAX_ADDED: usize = 1 << 16;

/// What counting needs of a `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerFile {
    /// Tokens that are found before anything else.
    #[serde(default)]
    pub added_tokens: Vec<AddedToken>,
    /// How the text is changed first.
    #[serde(default)]
    pub normalizer: Option<Normalizer>,
    /// How the text is cut into words.
    #[serde(default)]
    pub pre_tokenizer: Option<PreTokenizer>,
    /// How words are cut into tokens.
    pub model: Bpe,
}

/// A token outside the model's vocabulary, or one that words never hide.
///
/// That some of these also swallow white space beside them is left out: the count differs by one
/// token at most, and the library's code for it can be made to panic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedToken {
    /// Its text.
    pub content: String,
    /// Only where it is a word of its own.
    #[serde(default)]
    pub single_word: bool,
    /// Looked for in the normalized text.
    #[serde(default)]
    pub normalized: bool,
}

/// A byte-pair encoding.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bpe {
    /// Always `BPE`.
    #[serde(rename = "type", default)]
    pub kind: BpeKind,
    /// Stands for what the vocabulary lacks.
    #[serde(default)]
    pub unk_token: Option<String>,
    /// Written before every part of a word but the first.
    #[serde(default)]
    pub continuing_subword_prefix: Option<String>,
    /// Written behind every word.
    #[serde(default)]
    pub end_of_word_suffix: Option<String>,
    /// Neighbours that the vocabulary lacks are one token.
    #[serde(default)]
    pub fuse_unk: bool,
    /// What the vocabulary lacks is written as its bytes.
    #[serde(default)]
    pub byte_fallback: bool,
    /// A word of the vocabulary is one token whatever the merges say.
    #[serde(default)]
    pub ignore_merges: bool,
    /// Tokens and their numbers.
    #[serde(with = "vocabulary::tokens")]
    pub vocab: Vec<(String, u32)>,
    /// Pairs that become one token, the earliest first.
    #[serde(with = "vocabulary::merges")]
    pub merges: Vec<(String, String)>,
}

/// Type of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BpeKind {
    /// Byte-pair encoding; files of old versions do not say so.
    #[default]
    #[serde(rename = "BPE")]
    Bpe,
}

/// Why a tokenizer is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// No JSON, not of this shape, or of a kind that is not counted.
    #[error("not a tokenizer.json that can be counted with: {0}")]
    Malformed(String),
    /// Of the right shape and wrong.
    #[error("{}", .0.join("; "))]
    Mistakes(Vec<String>),
    /// Too large to be pushed.
    #[error("what is needed for counting takes {len} bytes, more than {MAX_PUSHED}")]
    TooLarge {
        /// Bytes of the pushed form.
        len: usize,
    },
}

// === impl TokenizerFile ===

impl TokenizerFile {
    /// Reads and checks a `tokenizer.json`, or the pushed form of one.
    ///
    /// # Errors
    /// Says what is wrong; all mistakes at once when the shape is right.
    pub fn parse(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut file: Self = serde_json::from_slice(bytes)
            .map_err(|error| TokenizerError::Malformed(error.to_string()))?;
        file.model.drop_empty_options();
        let mistakes = file.mistakes();
        if mistakes.is_empty() {
            Ok(file)
        } else {
            Err(TokenizerError::Mistakes(mistakes))
        }
    }

    /// The pushed form.
    ///
    /// # Errors
    /// [`TokenizerError::TooLarge`].
    pub fn to_json(&self) -> Result<Vec<u8>, TokenizerError> {
        let json = serde_json::to_vec(self)
            .map_err(|error| TokenizerError::Malformed(error.to_string()))?;
        if json.len() > MAX_PUSHED {
            return Err(TokenizerError::TooLarge { len: json.len() });
        }
        Ok(json)
    }

    fn mistakes(&self) -> Vec<String> {
        let mut found = self.model.mistakes();
        if self.added_tokens.len() > MAX_ADDED {
            found.push(format!("added_tokens: more than {MAX_ADDED}"));
        }
        if let Some(normalizer) = &self.normalizer {
            normalizer.check(&mut found);
        }
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.check(&mut found);
        }
        found
    }

    /// The first merge whose parts or result are not in the vocabulary: no model can be built
    /// then. Not part of [`TokenizerFile::parse`], because the builder finds it too.
    pub fn impossible_merge(&self) -> Option<String> {
        let model = &self.model;
        let known: HashSet<&str> = model.vocab.iter().map(|(token, _)| &**token).collect();
        let prefix = model.prefix();
        let (left, right) = model.merges.iter().find(|(left, right)| {
            let merged = format!("{left}{}", right.strip_prefix(prefix).unwrap_or(right));
            ![left.as_str(), right, &merged]
                .iter()
                .all(|token| known.contains(token))
        })?;
        Some(format!(
            "model.merges: {left:?} and {right:?} and what they make are not all in model.vocab"
        ))
    }
}

// === impl Bpe ===

impl Bpe {
    fn prefix(&self) -> &str {
        self.continuing_subword_prefix.as_deref().unwrap_or("")
    }

    /// Some files write "none" as an empty text.
    fn drop_empty_options(&mut self) {
        for option in [
            &mut self.unk_token,
            &mut self.continuing_subword_prefix,
            &mut self.end_of_word_suffix,
        ] {
            option.take_if(|text| text.is_empty());
        }
    }

    fn mistakes(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.vocab.is_empty() || self.vocab.len() > MAX_VOCABULARY {
            let entries = self.vocab.len();
            found.push(format!(
                "model.vocab: {entries} entries, must be 1 to {MAX_VOCABULARY}"
            ));
        }
        if self.merges.len() > 2 * MAX_VOCABULARY {
            found.push(format!("model.merges: more than {}", 2 * MAX_VOCABULARY));
        }
        if let Some(unknown) = &self.unk_token
            && !self.vocab.iter().any(|(token, _)| token == unknown)
        {
            found.push(format!(
                "model.unk_token: {unknown:?} is not in model.vocab"
            ));
        }
        // The builder cuts the prefix off and copies both parts to where the longest token fits.
        let longest = self.vocab.iter().map(|(token, _)| token.len()).max();
        let (prefix, longest) = (self.prefix(), longest.unwrap_or_default());
        let odd = self.merges.iter().find(|(left, right)| {
            let rest = right.strip_prefix(prefix);
            rest.is_none_or(|rest| left.len().saturating_add(rest.len()) > longest)
        });
        if let Some((left, right)) = odd {
            found.push(format!(
                "model.merges: {left:?} and {right:?} make no token of model.vocab"
            ));
        }
        found
    }
}

#[cfg(test)]
mod tests;
