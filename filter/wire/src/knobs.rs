//! Settings: one table of name, default, range, variable, profile field and reader.

use serde::{Deserialize, Serialize};

/// Knobs that a profile overrides, by camelCase name; validated when parsed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overrides(pub std::collections::BTreeMap<String, serde_json::Value>);

impl Overrides {
    /// True when nothing is overridden.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Formula that ranks prefill pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefillPolicy {
    /// Prefix-cache match first, request count second.
    #[default]
    PrefixCache,
    /// Fewest outstanding prefill requests.
    LeastRequest,
    /// Estimated time to first token.
    Conductor,
    /// Fewest outstanding tokens.
    TokenLoad,
    /// Outstanding tokens, discounted by the prefix-cache match.
    HybridCacheLoad,
}

/// Formula that ranks decode pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecodePolicy {
    /// Requests and throughput against free KV cache.
    #[default]
    LoadBalancing,
    /// Fewest outstanding decode requests.
    LeastRequest,
    /// Estimated time between tokens.
    Conductor,
    /// Fewest outstanding tokens, generated ones included.
    TokenLoad,
}

/// What happens when no prefill pod can serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefillFallback {
    /// The request fails.
    Strict,
    /// A combined pod serves.
    #[default]
    Combined,
    /// A decode pod computes the prompt itself.
    Decode,
}
