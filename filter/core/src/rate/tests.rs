use super::*;
use crate::testkit::MemoryStore;

const KEY: &str = "pd1.rate.3";

fn limit(per_second: u32, replicas: u32) -> RateLimit {
    RateLimit {
        per_second,
        replicas,
    }
}

/// Requests admitted of `asked` at each of these times.
fn admitted(
    counts: &mut RateCounts,
    store: &MemoryStore,
    limit: RateLimit,
    times_ms: impl Iterator<Item = u64>,
    asked: u32,
) -> Vec<u32> {
    let mut at = |now_ms| {
        (0..asked)
            .filter(|_| counts.admit(store, 3, limit, now_ms).is_ok())
            .count()
    };
    times_ms
        .map(|now_ms| u32::try_from(at(now_ms)).unwrap())
        .collect()
}

#[test]
fn every_window_takes_the_limit_and_tells_when_the_next_begins() {
    let store = MemoryStore::new();
    let mut counts = RateCounts::default();
    let seconds = (0..5).map(|second| 7_000_300 + second * 1000);
    assert_eq!(
        admitted(&mut counts, &store, limit(10, 1), seconds, 25),
        [10; 5]
    );
    for (now_ms, retry_after_s) in [(7_004_300, 1), (7_004_999, 1)] {
        let refused = counts.admit(&store, 3, limit(10, 1), now_ms);
        assert_eq!(refused, Err(Refused { retry_after_s }));
    }
    // Another model counts for itself.
    assert!(counts.admit(&store, 4, limit(10, 1), 7_004_300).is_ok());
}

#[test]
fn a_share_is_exact_over_time_and_never_rounds_to_nothing() {
    for (per_second, replicas, window_s, seconds) in [
        (10, 3, 1, 300),
        (100, 7, 1, 700),
        (1, 3, 3, 300),
        (2, 3, 2, 300),
        (3, 7, 3, 700),
        (1, 1000, 1000, 10_000),
        (u32::MAX, 1, 1, 3),
    ] {
        let store = MemoryStore::new();
        let mut counts = RateCounts::default();
        let limit = limit(per_second, replicas);
        let asked = per_second.min(1000) + 1;
        let times = (0..seconds).map(|second| (42_000_000 + second) * 1000);
        let taken = admitted(&mut counts, &store, limit, times, asked);
        if per_second == u32::MAX {
            assert_eq!(taken, [1001; 3]);
            continue;
        }
        let total: u32 = taken.iter().sum();
        let exact = u64::from(per_second) * seconds / u64::from(replicas);
        assert_eq!(u64::from(total), exact, "{per_second} over {replicas}");
        for window in taken.chunks(window_s) {
            assert!(
                window.iter().sum::<u32>() > 0,
                "{per_second} over {replicas}: {taken:?}"
            );
        }
    }
    let refused = {
        let (store, mut counts) = (MemoryStore::new(), RateCounts::default());
        counts.admit(&store, 3, limit(1, 10), 100_000).unwrap();
        counts.admit(&store, 3, limit(1, 10), 102_500)
    };
    assert_eq!(refused, Err(Refused { retry_after_s: 8 }));
}

#[test]
fn all_vms_share_one_count() {
    let store = MemoryStore::new();
    let mut vms: Vec<RateCounts> = (0..16).map(|_| RateCounts::default()).collect();
    for second in 0..20 {
        let mut taken = 0;
        for request in 0..200_usize {
            let vm = &mut vms[(request * 7 + second) % 16];
            let now_ms = second as u64 * 1000 + request as u64 * 5;
            taken += usize::from(vm.admit(&store, 3, limit(50, 1), now_ms).is_ok());
        }
        assert_eq!(taken, 50);
    }
}

#[test]
fn what_is_given_back_can_be_taken_again_in_its_window_only() {
    let store = MemoryStore::new();
    let mut counts = RateCounts::default();
    let limit = limit(2, 1);
    let first = counts.admit(&store, 3, limit, 5000).unwrap();
    counts.admit(&store, 3, limit, 5000).unwrap();
    assert!(counts.admit(&store, 3, limit, 5500).is_err());
    counts.give_back(first);
    assert!(counts.admit(&store, 3, limit, 5500).is_ok());
    assert!(counts.admit(&store, 3, limit, 5500).is_err());
    counts.give_back(first);
    assert_eq!(
        admitted(&mut counts, &store, limit, [6000].into_iter(), 5),
        [2]
    );
    counts.give_back(first);
    assert!(counts.admit(&store, 3, limit, 6500).is_err());
}

#[test]
fn lost_races_and_a_refusing_host_lose_no_count() {
    for races in [1, 7, 8, 9, 20] {
        let store = MemoryStore::new();
        let (mut one, mut two) = (RateCounts::default(), RateCounts::default());
        store.lose_swaps(KEY, races);
        let limit = limit(4, 1);
        one.admit(&store, 3, limit, 5000).unwrap();
        store.lose_swaps(KEY, 0);
        // The next one writes both.
        one.admit(&store, 3, limit, 5000).unwrap();
        let left = admitted(&mut two, &store, limit, [5100].into_iter(), 9);
        assert_eq!(left, [2], "{races}");
    }
    let store = MemoryStore::new();
    let mut counts = RateCounts::default();
    store.refuse(true);
    let times = [5000, 6000].into_iter();
    assert_eq!(admitted(&mut counts, &store, limit(4, 1), times, 9), [4, 4]);
}

#[test]
fn the_winner_of_a_race_is_counted_before_the_loser() {
    let store = MemoryStore::new();
    let (mut one, mut two) = (RateCounts::default(), RateCounts::default());
    one.admit(&store, 3, limit(2, 1), 5000).unwrap();
    store.interpose(KEY, |store| {
        RateCounts::default()
            .admit(store, 3, limit(2, 1), 5000)
            .unwrap();
    });
    assert!(two.admit(&store, 3, limit(2, 1), 5000).is_err());
}

#[test]
fn a_clock_read_a_moment_earlier_does_not_open_the_window_before_again() {
    let store = MemoryStore::new();
    let (mut early, mut late) = (RateCounts::default(), RateCounts::default());
    assert_eq!(
        admitted(&mut late, &store, limit(3, 1), [6000].into_iter(), 2),
        [2]
    );
    assert_eq!(
        admitted(&mut early, &store, limit(3, 1), [5999].into_iter(), 9),
        [1]
    );
    assert!(late.admit(&store, 3, limit(3, 1), 6001).is_err());
}

#[test]
fn records_that_mean_nothing_count_as_empty() {
    for bytes in [
        &b""[..],
        b"\x01",
        &[FORMAT; 40],
        &[0xff; RECORD],
        &[2; RECORD],
    ] {
        let store = MemoryStore::new();
        store.put(KEY, bytes);
        let mut counts = RateCounts::default();
        let taken = admitted(&mut counts, &store, limit(3, 1), [5000].into_iter(), 9);
        assert_eq!(taken, [3], "{bytes:?}");
    }
}
