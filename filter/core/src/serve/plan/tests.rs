//! Plans worked out by hand, and what holds for all of them.

use super::*;
use BucketServeMode::{Rps, Throughput};

const ALL: u64 = u64::MAX;

/// Requests by length, all at the same time.
fn traffic(lengths: &[(u64, u32)]) -> Histogram {
    let mut out = Histogram::new(0);
    for (tokens, requests) in lengths {
        (0..*requests).for_each(|_| out.record(*tokens, 0));
    }
    out
}

/// Rolesets of as many prefill pods, each with one range.
fn groups(all: &[(u32, u64, u64)]) -> Vec<Group> {
    all.iter()
        .map(|(replicas, low, high)| Group {
            ranges: vec![(*low, *high)],
            replicas: *replicas,
        })
        .collect()
}

/// Low end, high end, roleset.
fn bands(
    lengths: &[(u64, u32)],
    rolesets: &[(u32, u64, u64)],
    mode: BucketServeMode,
) -> Vec<(u64, u64, u16)> {
    let plan = Plan::of(&traffic(lengths), &groups(rolesets), mode);
    let bands = plan.bands().iter();
    bands
        .map(|band| (band.low, band.high, band.roleset))
        .collect()
}

#[test]
fn throughput_divides_tokens_and_rps_divides_requests() {
    // 16, 64, 256 and 1024 tokens start bins of their own: 4 · 8, 6 · 8, 8 · 8 and 10 · 8.
    let lengths = [(16, 10), (64, 10), (256, 10), (1024, 10)];
    let two = [(1, 0, ALL), (1, 0, ALL)];
    // 20 of 40 requests are below 65; the bin of 64 ends at 69.
    assert_eq!(bands(&lengths, &two, Rps), [(0, 69, 0), (70, ALL, 1)]);
    // 13,600 tokens: 3,360 in all but the longest prompts, which hold 10,240. The half, 6,800,
    // lies 3,440 inside them and the error allowed is an eighth of 6,800: they get no band. Their
    // bin ends at 1116.
    assert_eq!(
        bands(&lengths, &two, Throughput),
        [(0, 1023, 0), (1117, ALL, 1)]
    );
    // One of four pods is enough for the short ones: 3,400 of 13,600.
    assert_eq!(
        bands(&lengths, &[(1, 0, ALL), (3, 0, ALL)], Throughput),
        [(0, 1023, 0), (1024, ALL, 1)]
    );
}

#[test]
fn bands_are_in_proportion_to_prefill_pods() {
    // 30 requests over 1, 2 and 3 pods: 5, 10, 15.
    let lengths = [(10, 5), (100, 5), (200, 5), (1000, 15)];
    let three = [(1, 0, ALL), (2, 0, ALL), (3, 0, ALL)];
    // The bins of 10, 200 and 1000 are 9 to 10, 198 to 215 and 987 to 1075.
    assert_eq!(
        bands(&lengths, &three, Rps),
        [(0, 10, 0), (11, 215, 1), (216, ALL, 2)]
    );
    // Without pods counts as one.
    assert_eq!(
        bands(&[(10, 5), (100, 5)], &[(0, 0, ALL), (1, 0, ALL)], Rps),
        [(0, 10, 0), (11, ALL, 1)]
    );
}

#[test]
fn what_only_one_roleset_takes_is_charged_to_its_share() {
    // 40 requests, 20 for each. Only roleset 0 takes the 10 short ones, so of the 30 shared ones
    // it needs 10 and the other 20.
    let lengths = [(10, 10), (100, 10), (200, 10), (400, 10)];
    let rolesets = [(1, 0, ALL), (1, 50, ALL)];
    // The bin of 100 ends at 107.
    assert_eq!(
        bands(&lengths, &rolesets, Rps),
        [(50, 107, 0), (108, ALL, 1)]
    );
    // With 30 short ones of 60 it needs none of the others.
    let lengths = [(10, 30), (100, 10), (200, 10), (400, 10)];
    assert_eq!(bands(&lengths, &rolesets, Rps), [(50, ALL, 1)]);
}

#[test]
fn a_roleset_with_several_overlaps_draws_on_one_share() {
    // 0 to 99: rolesets 0 and 1; 100 to 999: 1 and 2; from 1000: 2 alone. 60 requests, 20 each.
    let rolesets = [(1, 0, 99), (1, 0, 999), (1, 100, ALL)];
    // The heaviest is 0 to 99: needs are 20, 20 and 10, so it is halved, 15 and 15, and of the
    // 20 in 100 to 999 roleset 1 needs 5, roleset 2 the 10 that its 10 long ones leave. A third
    // of 20 is 6.7: the nearest border is after the 7 requests of length 200.
    let lengths = [(10, 15), (40, 15), (200, 7), (400, 13), (2000, 10)];
    assert_eq!(
        bands(&lengths, &rolesets, Rps),
        // The bins of 10, 200 end at 10, 215.
        [(0, 10, 0), (11, 99, 1), (100, 215, 1), (216, 999, 2)]
    );
}

#[test]
fn the_order_is_that_of_the_ranges_and_not_of_needs() {
    // Roleset 0 takes the longest prompts, so it gets the upper part of what both take.
    let rolesets = [(3, 50, ALL), (1, 0, 1000)];
    // 40 requests: roleset 1 needs 10 and has none, roleset 0 needs 30 and has 10.
    let lengths = [(100, 10), (200, 20), (2000, 10)];
    assert_eq!(
        bands(&lengths, &rolesets, Rps),
        [(50, 107, 1), (108, 1000, 0)]
    );
}

#[test]
fn light_segments_stay_whole() {
    let two = [(1, 0, 99), (1, 50, ALL)];
    // 50 to 99 holds 4 of 100 requests, then 5.
    let lengths = [(10, 46), (60, 2), (80, 2), (200, 50)];
    assert_eq!(bands(&lengths, &two, Rps), []);
    // The bin of 60 ends at 63.
    let lengths = [(10, 47), (60, 3), (80, 3), (200, 47)];
    assert_eq!(bands(&lengths, &two, Rps), [(50, 63, 0), (64, 99, 1)]);
}

#[test]
fn where_there_is_nothing_to_divide_there_is_no_band() {
    let lengths = [(10, 5), (100, 5)];
    for mode in [Rps, Throughput] {
        // No traffic, no rolesets, one, apart, or upside down.
        assert_eq!(bands(&[], &[(1, 0, ALL), (1, 0, ALL)], mode), []);
        assert_eq!(bands(&[(0, 9)], &[(1, 0, ALL), (1, 0, ALL)], mode), []);
        assert_eq!(bands(&lengths, &[], mode), []);
        assert_eq!(bands(&lengths, &[(1, 0, ALL)], mode), []);
        assert_eq!(bands(&lengths, &[(1, 0, 50), (1, 51, ALL)], mode), []);
        assert_eq!(bands(&lengths, &[(1, 500, ALL), (1, 500, ALL)], mode), []);
        // All lengths equal: scoring balances them, bands cannot.
        for tokens in [1, 2, 100, 1 << 20] {
            let found = bands(&[(tokens, 50)], &[(1, 0, ALL), (1, 0, ALL)], mode);
            let banded = |(low, high, _): &(u64, u64, u16)| (*low..=*high).contains(&tokens);
            assert!(!found.iter().any(banded), "{tokens}: {found:?}");
        }
        assert_eq!(bands(&[(ALL, 50)], &[(1, 0, ALL); 2], mode).len(), 1);
    }
    let empty = Plan::default();
    assert_eq!((empty.roleset_for(0), empty.roleset_for(ALL)), (None, None));
}

#[test]
fn more_rolesets_than_bins_or_bands_leave_all_to_scoring() {
    let lengths: Vec<(u64, u32)> = (1..2000).map(|tokens| (tokens, 1)).collect();
    for rolesets in [65, 200, 1000] {
        assert_eq!(bands(&lengths, &vec![(1, 0, ALL); rolesets], Rps), []);
    }
    // 8 rolesets are as many as these lengths can tell apart well.
    assert_eq!(bands(&lengths, &[(1, 0, ALL); 8], Rps).len(), 8);
}

#[test]
fn a_length_finds_the_band_that_holds_it() {
    let lengths = [(16, 10), (64, 10)];
    let plan = Plan::of(
        &traffic(&lengths),
        &groups(&[(1, 5, ALL), (1, 5, 999)]),
        Rps,
    );
    // Only roleset 0 takes more than 999 tokens, but nothing that long has come yet.
    let found = [0, 4, 5, 17, 18, 999, 1000, ALL].map(|tokens| plan.roleset_for(tokens));
    let expected = [None, None, Some(1), Some(1), Some(0), Some(0), None, None];
    assert_eq!(found, expected);
}

#[cfg(not(target_family = "wasm"))]
mod properties {
    use super::*;
    use proptest::prelude::*;

    fn lengths() -> impl Strategy<Value = Vec<(u64, u32)>> {
        let length = prop_oneof![
            4 => 1..5000_u64,
            2 => (1..200_u64).prop_map(|n| n * n * n),
            1 => prop_oneof![Just(0), Just(ALL), any::<u64>()],
        ];
        prop::collection::vec((length, 1..40_u32), 0..60)
    }

    fn group() -> impl Strategy<Value = Group> {
        let low = prop_oneof![Just(0), 0..6000_u64];
        let high = prop_oneof![Just(ALL), 0..6000_u64, any::<u64>()];
        (low, high, 0..5_u32).prop_map(|(low, high, replicas)| Group {
            ranges: if low <= high {
                vec![(low, high)]
            } else {
                Vec::new()
            },
            replicas,
        })
    }

    fn mode() -> impl Strategy<Value = BucketServeMode> {
        prop_oneof![Just(Rps), Just(Throughput)]
    }

    fn weight(slices: &[Slice], inside: impl Fn(&Slice) -> bool) -> f64 {
        let chosen = slices.iter().filter(|slice| inside(slice));
        chosen.map(|slice| slice.weight).sum()
    }

    proptest! {
        #[test]
        fn bands_never_overlap_nor_exceed_what_their_roleset_takes(
            lengths in lengths(),
            groups in prop::collection::vec(group(), 0..90),
            mode in mode(),
        ) {
            let seen = traffic(&lengths);
            let plan = Plan::of(&seen, &groups, mode);
            prop_assert!(plan.bands().len() <= MAX_BANDS);
            let mut last: Option<Band> = None;
            for band in plan.bands() {
                prop_assert!(band.low <= band.high);
                if let Some(last) = last {
                    prop_assert!(last.high < band.low, "{last:?} {band:?}");
                }
                let group = &groups[usize::from(band.roleset)];
                prop_assert!(group.takes(band.low) && group.takes(band.high));
                prop_assert_eq!(plan.roleset_for(band.low), Some(band.roleset));
                prop_assert_eq!(plan.roleset_for(band.high), Some(band.roleset));
                last = Some(*band);
            }
            prop_assert_eq!(&plan, &Plan::of(&seen, &groups, mode));
        }

        #[test]
        fn one_shared_range_is_divided_evenly_or_left_to_scoring(
            lengths in lengths(),
            replicas in prop::collection::vec(1..5_u32, 2..12),
            mode in mode(),
        ) {
            let rolesets: Vec<_> = replicas.iter().map(|n| (*n, 0, ALL)).collect();
            let seen = traffic(&lengths);
            let slices: Vec<Slice> = seen.slices(mode).collect();
            let total = weight(&slices, |_| true);
            let plan = Plan::of(&seen, &groups(&rolesets), mode);
            let all: u32 = replicas.iter().sum();
            let share = |roleset: u16| {
                total * f64::from(replicas[usize::from(roleset)]) / f64::from(all)
            };
            // In the order of rolesets, one band each at most, and none with much more than its
            // share: an eighth for each of its two ends.
            let order: Vec<u16> = plan.bands().iter().map(|band| band.roleset).collect();
            prop_assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
            for band in plan.bands() {
                let held = weight(&slices, |s| (band.low..=band.high).contains(&s.mean));
                prop_assert!(held <= 1.2501 * share(band.roleset), "{held} in {band:?}");
            }
            // Lengths without a band lie in bins too heavy to be given to either neighbour.
            let smallest = (0..).zip(&replicas).map(|(at, _)| share(at)).fold(total, f64::min);
            for slice in &slices {
                let banded = [slice.first, slice.mean, slice.last].map(|at| plan.roleset_for(at));
                if banded.contains(&None) {
                    prop_assert!(slice.weight > 2.0 * CUT_ERROR * smallest * 0.9999);
                }
                prop_assert!(banded.iter().all(|roleset| *roleset == banded[0]));
            }
        }

        #[test]
        fn fine_traffic_is_covered_without_a_gap(
            replicas in prop::collection::vec(1..3_u32, 2..6),
            extra in prop::collection::vec(64..60_000_u64, 0..200),
        ) {
            // Every bin from 64 to 60,000 tokens holds 10 requests, and a few more.
            let mut lengths: Vec<(u64, u32)> = (48..128)
                .map(|bin| (libm::ceil(libm::exp2(f64::from(bin) / 8.0)) as u64, 10))
                .collect();
            lengths.extend(extra.into_iter().map(|tokens| (tokens, 1)));
            let rolesets: Vec<_> = replicas.iter().map(|n| (*n, 0, ALL)).collect();
            let plan = Plan::of(&traffic(&lengths), &groups(&rolesets), Rps);
            prop_assert_eq!(plan.bands().len(), replicas.len());
            let mut next = Some(0);
            for band in plan.bands() {
                prop_assert_eq!(Some(band.low), next);
                next = band.high.checked_add(1);
            }
            prop_assert_eq!(next, None);
        }
    }
}
