//! The lengths each roleset takes: what bucketing allows, and no band ever exceeds.

use crate::fleet::{ModelFleet, Roleset};

/// A roleset as the plan sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Ranges of prompt lengths it takes, in tokens, both ends inclusive; sorted, apart from each
    /// other by at least one length.
    pub ranges: Vec<(u64, u64)>,
    /// Its prefill pods.
    pub replicas: u32,
}

// === impl Group ===

impl Group {
    /// All rolesets of a model, in their order.
    #[must_use]
    pub fn all(fleet: &ModelFleet, profile: Option<&str>) -> Vec<Self> {
        let rolesets = fleet.rolesets.iter();
        rolesets
            .map(|roleset| Self::of(fleet, roleset, profile))
            .collect()
    }

    /// A roleset takes a length when a prefill and a decode pod of it do, by the profile called
    /// `profile` or each pod's default one.
    #[must_use]
    pub fn of(fleet: &ModelFleet, roleset: &Roleset, profile: Option<&str>) -> Self {
        let ranges = |pods: &[u16]| {
            let of_pod = |pod: &u16| match fleet.profile(*pod, profile) {
                Some(profile) => (profile.prompt_min, profile.prompt_max.unwrap_or(u64::MAX)),
                None => (0, u64::MAX),
            };
            union(pods.iter().map(of_pod).collect())
        };
        Self {
            ranges: intersection(&ranges(&roleset.prefill), &ranges(&roleset.decode)),
            replicas: u32::try_from(roleset.prefill.len()).unwrap_or(u32::MAX),
        }
    }

    /// True when it takes prompts of this length.
    #[must_use]
    pub fn takes(&self, tokens: u64) -> bool {
        let after = self.ranges.partition_point(|(low, _)| *low <= tokens);
        let range = after.checked_sub(1).and_then(|at| self.ranges.get(at));
        range.is_some_and(|(_, high)| tokens <= *high)
    }

    /// Shortest and longest length it takes.
    pub(super) fn reach(&self) -> Option<(u64, u64)> {
        Some((self.ranges.first()?.0, self.ranges.last()?.1))
    }
}

/// What is in any of the ranges; ranges that are upside down hold nothing.
fn union(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.retain(|(low, high)| low <= high);
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (low, high) in ranges {
        match out.last_mut() {
            Some(last) if low <= last.1.saturating_add(1) => last.1 = last.1.max(high),
            _ => out.push((low, high)),
        }
    }
    out
}

/// What is in both sets of ranges.
fn intersection(left: &[(u64, u64)], right: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    let mut out = Vec::new();
    while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
        let (low, high) = (a.0.max(b.0), a.1.min(b.1));
        if low <= high {
            out.push((low, high));
        }
        if a.1 <= b.1 {
            left.next();
        } else {
            right.next();
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{model, pod};
    use pd_wire::profile::{ModelConfig, Profile};
    use std::collections::BTreeMap;

    const ALL: u64 = u64::MAX;

    #[test]
    fn ranges_are_joined_and_cut() {
        assert_eq!(
            union(vec![
                (20, 30),
                (0, 9),
                (10, 12),
                (50, 40),
                (25, 28),
                (99, ALL)
            ]),
            [(0, 12), (20, 30), (99, ALL)]
        );
        assert_eq!(
            intersection(&[(0, 12), (20, 30), (99, ALL)], &[(5, 25), (30, 200)]),
            [(5, 12), (20, 25), (30, 30), (99, 200)]
        );
        assert_eq!(intersection(&[], &[(0, ALL)]), []);
    }

    fn profiles(default: (u64, Option<u64>), long: Option<(u64, Option<u64>)>) -> ModelConfig {
        let profile = |(prompt_min, prompt_max)| Profile {
            prompt_min,
            prompt_max,
            ..Profile::default()
        };
        let mut profiles = BTreeMap::from([("default".to_owned(), profile(default))]);
        profiles.extend(long.map(|range| ("long".to_owned(), profile(range))));
        ModelConfig {
            profiles,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn a_roleset_takes_what_a_prefill_and_a_decode_pod_take_by_the_requests_profile() {
        let short = profiles((0, Some(100)), Some((500, None)));
        let fleet = model("m")
            .pod(pod("p0").prefill().roleset("r").config(short.clone()))
            .pod(
                pod("p1")
                    .prefill()
                    .roleset("r")
                    .config(profiles((200, Some(300)), None)),
            )
            .pod(
                pod("d0")
                    .decode()
                    .roleset("r")
                    .config(profiles((50, None), None)),
            )
            .pod(pod("d1").decode().roleset("s"))
            .pod(pod("p2").prefill().roleset("s"))
            .fleet();
        let of = |at: usize, profile| Group::of(&fleet, &fleet.rolesets[at], profile);
        let group = of(0, None);
        assert_eq!(group.ranges, [(50, 100), (200, 300)]);
        assert_eq!(group.replicas, 2);
        assert_eq!(group.reach(), Some((50, 300)));
        let taken = [0, 49, 50, 100, 101, 200, 300, 301].map(|tokens| group.takes(tokens));
        assert_eq!(taken, [false, false, true, true, false, true, true, false]);
        assert_eq!(of(0, Some("long")).ranges, [(200, 300), (500, ALL)]);
        assert_eq!(of(1, None).ranges, [(0, ALL)]);
        assert!(of(1, None).takes(ALL));
        assert_eq!(Group::default().reach(), None);
        assert!(!Group::default().takes(0));
    }
}
