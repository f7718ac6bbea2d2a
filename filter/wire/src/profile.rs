//! The config annotation: profiles of a model.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Parsed annotation `model.aibrix.ai/config`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelConfig {
    /// Strategy that no request can change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked_routing_strategy: Option<String>,
    /// Profile used when a request names none; `default` without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_profile: Option<String>,
    /// Profiles by name.
    pub profiles: BTreeMap<String, Profile>,
}

/// One profile. Knob overrides are kept sparse, see [`crate::knobs::Overrides`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Profile {
    /// Strategy of the profile's requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_strategy: Option<String>,
    /// Most requests per second over all replicas; 0 = no limit.
    pub requests_per_second: u32,
    /// This pod takes overflow.
    pub combined: bool,
    /// Shortest prompt, in tokens, inclusive.
    pub prompt_min: u64,
    /// Longest prompt, in tokens, inclusive; absent = no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_max: Option<u64>,
    /// Knobs this profile overrides.
    #[serde(skip_serializing_if = "crate::knobs::Overrides::is_empty")]
    pub knobs: crate::knobs::Overrides,
}
