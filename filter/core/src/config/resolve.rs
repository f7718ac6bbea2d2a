//! What applies to one request: profile, settings, strategy.

use super::Config;
use pd_wire::knobs::{Choice, Knobs, Strategy, excerpt};
use pd_wire::profile::{AUTO, ModelConfig, Profile};
use std::sync::Arc;

/// What a request says about its own routing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestHints<'a> {
    /// Value of the `routing-strategy` header.
    pub strategy: Option<&'a str>,
    /// Value of the `config-profile` header.
    pub profile: Option<&'a str>,
    /// Length of the prompt, for [`AUTO`].
    pub prompt_tokens: Option<u64>,
    /// Tokens the request allows to generate, for [`AUTO`].
    pub max_tokens: Option<u64>,
}

impl<'a> RequestHints<'a> {
    /// Whether resolving needs the sizes: only [`AUTO`] does, in upper or lower case as in AIBrix.
    pub fn is_auto(&self) -> bool {
        trimmed(self.profile).is_some_and(|name| name.eq_ignore_ascii_case(AUTO))
    }
}

/// What applies to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved<'a> {
    /// How a pod or a pair is chosen.
    pub strategy: Strategy,
    /// What decided the strategy.
    pub source: StrategySource,
    /// Settings, the profile's changes included.
    pub knobs: Arc<Knobs>,
    /// Name of the request's profile, if one applies.
    pub profile_name: Option<&'a str>,
    /// Name by which every pod's own profile is looked up ([`ModelConfig::profile`]): what the
    /// request asked for, also when its own config has no such profile.
    pub pod_profile: Option<&'a str>,
    /// The profile was chosen by size: its name goes into the response.
    pub auto: bool,
    /// Most requests per second over all replicas; 0 = no limit.
    pub requests_per_second: u32,
}

/// What decided the strategy of a request, strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StrategySource {
    /// `lockedRoutingStrategy` of the annotation.
    Lock,
    /// The `routing-strategy` header.
    Header,
    /// The profile.
    Profile,
    /// `routingAlgorithm` of the plugin config, or `ROUTING_ALGORITHM`.
    Config,
    /// Nobody: what the model's pods allow.
    Automatic,
}

impl StrategySource {
    /// Name in explanations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Header => "header",
            Self::Profile => "profile",
            Self::Config => "config",
            Self::Automatic => "automatic",
        }
    }
}

/// The `routing-strategy` header names no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown routing-strategy {given:?}: use one of {}", Strategy::NAMES.join(", "))]
pub struct UnknownStrategy {
    /// What was given, shortened.
    pub given: String,
}

/// Puts together what applies to one request. `model` is the request-level config of the model;
/// `has_complete_roleset` decides when no source names a strategy. Unknown strategies in a lock or
/// a profile are passed over (the agent reports them when it reads the annotation).
///
/// # Errors
/// The header decides and names an unknown strategy.
pub fn resolve<'a>(
    config: &Config,
    model: Option<&'a ModelConfig>,
    hints: RequestHints<'a>,
    has_complete_roleset: bool,
) -> Result<Resolved<'a>, UnknownStrategy> {
    let chosen = choose_profile(model, &hints);
    let profile = chosen.named.map(|(_, profile)| profile);
    let (strategy, source) = choose_strategy(config, model, profile, &hints, has_complete_roleset)?;
    let knobs = match profile {
        Some(profile) if !profile.knobs.is_empty() => Arc::new(config.knobs.with(&profile.knobs)),
        _ => Arc::clone(&config.knobs),
    };
    Ok(Resolved {
        strategy,
        source,
        knobs,
        profile_name: chosen.named.map(|(name, _)| name),
        pod_profile: chosen.requested,
        auto: chosen.auto,
        requests_per_second: profile.map_or(0, |profile| profile.requests_per_second),
    })
}

struct ChosenProfile<'a> {
    named: Option<(&'a str, &'a Profile)>,
    requested: Option<&'a str>,
    auto: bool,
}

/// By name, or by size; when that finds nothing, the default profile.
fn choose_profile<'a>(
    model: Option<&'a ModelConfig>,
    hints: &RequestHints<'a>,
) -> ChosenProfile<'a> {
    let auto = hints.is_auto();
    let requested = if auto {
        let best = model.and_then(|m| m.auto_profile(hints.prompt_tokens, hints.max_tokens));
        best.map(|(name, _)| name)
    } else {
        trimmed(hints.profile)
    };
    let named = model.and_then(|model| model.named_profile(requested));
    ChosenProfile {
        named,
        requested,
        auto: auto && named.is_some(),
    }
}

fn choose_strategy(
    config: &Config,
    model: Option<&ModelConfig>,
    profile: Option<&Profile>,
    hints: &RequestHints<'_>,
    has_complete_roleset: bool,
) -> Result<(Strategy, StrategySource), UnknownStrategy> {
    let known = |name: Option<&str>| trimmed(name).and_then(Strategy::from_name);
    if let Some(locked) = known(model.and_then(|m| m.locked_routing_strategy.as_deref())) {
        return Ok((locked, StrategySource::Lock));
    }
    if let Some(header) = trimmed(hints.strategy) {
        return match Strategy::from_name(header) {
            Some(strategy) => Ok((strategy, StrategySource::Header)),
            None => Err(UnknownStrategy {
                given: excerpt(header),
            }),
        };
    }
    if let Some(strategy) = known(profile.and_then(|p| p.routing_strategy.as_deref())) {
        return Ok((strategy, StrategySource::Profile));
    }
    if let Some(strategy) = config.knobs.routing_algorithm {
        return Ok((strategy, StrategySource::Config));
    }
    let automatic = if has_complete_roleset {
        Strategy::Pd
    } else {
        Strategy::LeastRequest
    };
    Ok((automatic, StrategySource::Automatic))
}

/// A header value without surrounding blanks; none when nothing is left.
fn trimmed(value: Option<&str>) -> Option<&str> {
    value.map(str::trim).filter(|value| !value.is_empty())
}
