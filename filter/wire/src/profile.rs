//! The config annotation `model.aibrix.ai/config`: profiles of a model.
//!
//! Parsed leniently, because a mistake in one pod's annotation must not take a model down: a bad
//! field is reported and the value that would hold without it stands; unknown fields are
//! reported and ignored; text that is no JSON object counts as no annotation. `null` means "not given".
//!
//! The types carry no optional serde fields, so that formats without a schema can store them.

mod members;
mod parse;

use crate::knobs::Overrides;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Value of the profile header that lets the request's size choose.
pub const AUTO: &str = "auto";
/// Profile of requests that name none, unless the annotation names another.
pub const DEFAULT: &str = "default";

/// Parsed annotation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelConfig {
    /// Strategy that no request can change, trimmed.
    pub locked_routing_strategy: Option<String>,
    /// Profile used when a request names none; [`DEFAULT`] without one.
    pub default_profile: Option<String>,
    /// Profiles by name.
    pub profiles: BTreeMap<String, Profile>,
}

/// One profile. Knob overrides are kept sparse.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Profile {
    /// Strategy of the profile's requests, trimmed.
    pub routing_strategy: Option<String>,
    /// Most requests per second over all replicas; 0 = no limit.
    pub requests_per_second: u32,
    /// A standard pod with this profile takes overflow.
    pub combined: bool,
    /// Shortest prompt a pod with this profile takes, in tokens, inclusive.
    pub prompt_min: u64,
    /// Longest prompt a pod with this profile takes, in tokens, inclusive; absent = no limit.
    pub prompt_max: Option<u64>,
    /// Requests that [`AUTO`] sends to this profile.
    pub auto: AutoHints,
    /// Knobs this profile overrides.
    pub knobs: Overrides,
}

/// Sizes of requests a profile is meant for; all that are given must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AutoHints {
    /// Prompt tokens, at least.
    pub prompt_tokens_gte: Option<u64>,
    /// Prompt tokens, below.
    pub prompt_tokens_lt: Option<u64>,
    /// Tokens the request allows to generate, at least.
    pub max_tokens_gte: Option<u64>,
    /// Tokens the request allows to generate, below.
    pub max_tokens_lt: Option<u64>,
}

impl ModelConfig {
    /// The profile called `requested`, else the default profile, else none. With its name.
    pub fn named_profile(&self, requested: Option<&str>) -> Option<(&str, &Profile)> {
        let by_name = |name: &str| self.profiles.get_key_value(name);
        requested
            .and_then(by_name)
            .or_else(|| by_name(self.default_profile.as_deref().unwrap_or(DEFAULT)))
            .map(|(name, profile)| (name.as_str(), profile))
    }

    /// The profile called `requested`, else the default profile, else none.
    pub fn profile(&self, requested: Option<&str>) -> Option<&Profile> {
        self.named_profile(requested).map(|(_, profile)| profile)
    }

    /// The profile whose hints fit a request of this size best: the one with more hints, then
    /// the narrower one (larger lower bounds, smaller upper bounds), then the first by name. A
    /// hint about an unknown size does not hold. None: no profile with hints fits.
    pub fn auto_profile(
        &self,
        prompt_tokens: Option<u64>,
        max_tokens: Option<u64>,
    ) -> Option<(&str, &Profile)> {
        self.profiles
            .iter()
            .filter(|(_, profile)| profile.auto.fit(prompt_tokens, max_tokens))
            // Names are visited in order and the first of equals wins.
            .min_by_key(|(_, profile)| profile.auto.rank())
            .map(|(name, profile)| (name.as_str(), profile))
    }
}

impl Profile {
    /// Whether a pod with this profile takes prompts of this length.
    pub fn takes(&self, prompt_tokens: u64) -> bool {
        self.prompt_min <= prompt_tokens && self.prompt_max.is_none_or(|max| prompt_tokens <= max)
    }
}

impl AutoHints {
    fn all(&self) -> [Option<u64>; 4] {
        [
            self.prompt_tokens_gte,
            self.prompt_tokens_lt,
            self.max_tokens_gte,
            self.max_tokens_lt,
        ]
    }

    fn count(&self) -> usize {
        self.all().iter().flatten().count()
    }

    fn fit(&self, prompt: Option<u64>, max: Option<u64>) -> bool {
        let from = |size: Option<u64>, bound: Option<u64>| {
            bound.is_none_or(|bound| size.is_some_and(|size| size >= bound))
        };
        let below = |size: Option<u64>, bound: Option<u64>| {
            bound.is_none_or(|bound| size.is_some_and(|size| size < bound))
        };
        self.count() > 0
            && from(prompt, self.prompt_tokens_gte)
            && below(prompt, self.prompt_tokens_lt)
            && from(max, self.max_tokens_gte)
            && below(max, self.max_tokens_lt)
    }

    /// Smaller is better.
    fn rank(&self) -> impl Ord + use<> {
        (
            Reverse(self.count()),
            Reverse(self.prompt_tokens_gte.unwrap_or(0)),
            self.prompt_tokens_lt.unwrap_or(u64::MAX),
            Reverse(self.max_tokens_gte.unwrap_or(0)),
            self.max_tokens_lt.unwrap_or(u64::MAX),
        )
    }
}

#[cfg(test)]
mod tests;
