//! The pushed message: one line of JSON that says for which model, then the tokenizer.

use crate::topology::{MAX_MESSAGE, Stamp, WIRE_VERSION};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use xxhash_rust::xxh64::xxh64;

/// Longest name of a model, in bytes.
pub const MAX_NAME: usize = 1024;

/// A tokenizer on its way to a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Sender and order.
    pub stamp: Stamp,
    /// Name that requests carry in `model`.
    pub model: String,
    /// A `tokenizer.json`, or the part of it that counting needs.
    pub file: Cow<'a, [u8]>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    stamp: Stamp,
    model: String,
}

/// Why a message is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Larger than [`MAX_MESSAGE`] (413).
    #[error("{len} bytes are over the limit of {MAX_MESSAGE}")]
    TooLarge {
        /// Bytes received.
        len: usize,
    },
    /// Another wire version (426).
    #[error(
        "wire version {found} is unknown, this filter reads {WIRE_VERSION}: run the agent and the filter of one release"
    )]
    Version {
        /// Version received.
        found: u32,
    },
    /// The first line is not what it should be (400).
    #[error(
        "the first line is not {{\"stamp\": {{\"version\", \"agent\", \"epoch\", \"sequence\"}}, \"model\"}}: {0}"
    )]
    Malformed(String),
}

/// Identity of a tokenizer's bytes: XXH64, seed 0.
pub fn digest(file: &[u8]) -> u64 {
    xxh64(file, 0)
}

// === impl Message ===

impl<'a> Message<'a> {
    /// Takes a message apart; the tokenizer itself is not looked at.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, MessageError> {
        if bytes.len() > MAX_MESSAGE {
            return Err(MessageError::TooLarge { len: bytes.len() });
        }
        let malformed = |error: String| MessageError::Malformed(error);
        let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
        let (line, file) = (parts.next().unwrap_or_default(), parts.next());
        let head: Head =
            serde_json::from_slice(line).map_err(|error| malformed(error.to_string()))?;
        if head.stamp.version != WIRE_VERSION {
            let found = head.stamp.version;
            return Err(MessageError::Version { found });
        }
        if let Some(mistake) = head.stamp.mistakes().first() {
            return Err(malformed(format!("{} {}", mistake.path, mistake.problem)));
        }
        if head.model.is_empty() || head.model.len() > MAX_NAME {
            return Err(malformed(format!("model must have 1 to {MAX_NAME} bytes")));
        }
        let file = file.ok_or_else(|| malformed("no line ends".to_owned()))?;
        Ok(Self {
            stamp: head.stamp,
            model: head.model,
            file: Cow::Borrowed(file),
        })
    }

    /// The pushed form.
    ///
    /// # Errors
    /// When the first line cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let head = Head {
            stamp: self.stamp.clone(),
            model: self.model.clone(),
        };
        let mut out = serde_json::to_vec(&head)?;
        out.reserve(self.file.len().saturating_add(1));
        out.push(b'\n');
        out.extend_from_slice(&self.file);
        Ok(out)
    }
}
