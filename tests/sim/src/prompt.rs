//! What is known of a prompt without reading it.

use serde::de::IgnoredAny;

use crate::identity::prompt_hash;

/// Hash and size of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) hash: u64,
    pub(crate) bytes: usize,
    /// A token per four bytes, at least four.
    pub(crate) tokens: u32,
    /// Prompts in a list.
    pub(crate) count: u32,
}

impl Prompt {
    /// The prompt of this JSON text; `batch` when a list may be several prompts.
    pub(crate) fn measure(text: &str, batch: bool) -> Self {
        let inner = text.get(1..).unwrap_or_default().trim_start();
        // A list of strings or of token lists is several prompts; a list of numbers is one.
        let several = batch && text.starts_with('[') && inner.starts_with(['"', '[']);
        let count = if several {
            serde_json::from_str::<Vec<IgnoredAny>>(text).map_or(1, |all| all.len())
        } else {
            1
        };
        let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let each = text.len().div_ceil(count as usize);
        Self {
            hash: prompt_hash(text.as_bytes()),
            bytes: text.len(),
            tokens: u32::try_from(each.div_ceil(4)).unwrap_or(u32::MAX).max(4),
            count,
        }
    }

    /// The token ids of this prompt: the hash in four, then filler. A decode engine given these
    /// knows the prompt without its text.
    pub(crate) fn token_ids(&self) -> Vec<u32> {
        let hash = (0..4u32).map(|part| ((self.hash >> (16 * part)) & 0xffff) as u32);
        let filler = (4..self.tokens).map(|at| 100 + at % 1000);
        hash.chain(filler).collect()
    }

    /// The prompt of such token ids.
    pub(crate) fn from_token_ids(ids: &[u32]) -> Self {
        let hash = ids.iter().take(4).rev();
        Self {
            hash: hash.fold(0, |hash, id| (hash << 16) | u64::from(*id & 0xffff)),
            bytes: ids.len().saturating_mul(4),
            tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX).max(1),
            count: 1,
        }
    }
}
