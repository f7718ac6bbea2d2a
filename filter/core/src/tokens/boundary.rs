//! Numbers of tokens at which a decision changes, and when an estimate is too close to one.

use pd_wire::knobs::Knobs;
use pd_wire::profile::ModelConfig;

/// True within a quarter of the bound, where an estimate may well be on the wrong side.
pub fn is_near(estimate: u64, bound: u64) -> bool {
    estimate.abs_diff(bound) <= bound / 4
}

/// Where profiles by size ([`AUTO`](pd_wire::profile::AUTO)) begin and end.
pub fn of_auto_profiles(config: &ModelConfig) -> impl Iterator<Item = u64> {
    let hints = config.profiles.values().map(|profile| profile.auto);
    hints.flat_map(|auto| {
        [auto.prompt_tokens_gte, auto.prompt_tokens_lt]
            .into_iter()
            .flatten()
    })
}

/// Where the ranges of pods begin and end under the profile of that name, and up to where a
/// decode pod computes a prompt itself.
pub fn of_pods(
    configs: &[ModelConfig],
    profile: Option<&str>,
    knobs: &Knobs,
) -> impl Iterator<Item = u64> {
    let configs = if knobs.prompt_length_bucketing {
        configs
    } else {
        &[]
    };
    let ranges = configs
        .iter()
        .filter_map(move |config| config.profile(profile));
    let ends = ranges.flat_map(|profile| {
        let from = Some(profile.prompt_min);
        [from, profile.prompt_max].into_iter().flatten()
    });
    // A range from 0 begins nowhere, and a limit of 0 is none.
    ends.chain([knobs.local_prefill_max_tokens])
        .filter(|bound| *bound > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pd_wire::profile::{AutoHints, Profile};

    fn config(profiles: &[(&str, Profile)]) -> ModelConfig {
        let named = |(name, profile): &(&str, Profile)| ((*name).to_owned(), profile.clone());
        ModelConfig {
            profiles: profiles.iter().map(named).collect(),
            ..ModelConfig::default()
        }
    }

    #[test]
    fn near_is_a_quarter_of_the_bound_to_both_sides() {
        for (estimate, near) in [(749, false), (750, true), (1250, true), (1251, false)] {
            assert_eq!(is_near(estimate, 1000), near, "{estimate}");
        }
        assert!(!is_near(0, 1) && !is_near(u64::MAX, 1000));
    }

    #[test]
    fn bounds_are_those_of_the_profile_in_force_and_none_with_everything_off() {
        let range = |prompt_min, prompt_max| Profile {
            prompt_min,
            prompt_max,
            ..Profile::default()
        };
        let configs = [
            config(&[
                ("default", range(0, Some(2000))),
                ("long", range(500, None)),
            ]),
            config(&[("default", range(2001, None))]),
        ];
        let mut knobs = Knobs::default();
        let bounds = |knobs: &Knobs, profile| of_pods(&configs, profile, knobs).collect::<Vec<_>>();
        assert!(bounds(&knobs, None).is_empty());
        knobs.prompt_length_bucketing = true;
        assert_eq!(bounds(&knobs, None), [2000, 2001]);
        assert_eq!(bounds(&knobs, Some("long")), [500, 2001]);
        knobs.local_prefill_max_tokens = 300;
        knobs.prompt_length_bucketing = false;
        assert_eq!(bounds(&knobs, None), [300]);
        let auto = AutoHints {
            prompt_tokens_gte: Some(4000),
            prompt_tokens_lt: Some(8000),
            max_tokens_gte: Some(1),
            ..AutoHints::default()
        };
        let by_size = config(&[(
            "x",
            Profile {
                auto,
                ..Profile::default()
            },
        )]);
        assert_eq!(of_auto_profiles(&by_size).collect::<Vec<_>>(), [4000, 8000]);
    }
}
