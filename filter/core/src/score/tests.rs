//! Edge values of the formulas; the vectors in `tests/vectors` hold the ordinary ones.

use super::prefill::Crowd;
use super::{Largest, decode, pair};

#[test]
fn divisors_never_fall_below_their_floors() {
    let (mut prefill, mut decode) = (Largest::prefill(), Largest::decode());
    prefill.take(0.5);
    decode.take(0.001);
    assert_eq!(pair(0.5, prefill, 0.001, decode), 0.5 + 0.001 / 0.01);
    prefill.take(4.0);
    decode.take(2.0);
    assert_eq!(pair(2.0, prefill, 1.0, decode), 1.0);
}

/// One pod at c, N − 1 at 0: an outlier iff 1/N + f/√N < 1.
#[test]
fn a_single_busy_pod_is_an_outlier_from_three_or_six_pods_on() {
    for (factor, first) in [(1.0, 3), (2.0, 6)] {
        for pods in 1..12_usize {
            let counts = (0..pods).map(|pod| if pod == 0 { 10.0 } else { 0.0 });
            let crowd = Crowd::measure(counts, factor);
            assert_eq!(
                crowd.is_outlier(10.0),
                pods >= first,
                "{pods} pods, factor {factor}"
            );
            assert!(!crowd.is_outlier(0.0));
        }
    }
}

#[test]
fn free_cache_rounds_half_away_from_zero_and_is_never_zero() {
    let free = |usage| {
        decode::Load {
            kv_usage: usage,
            ..Default::default()
        }
        .free_percent()
    };
    assert_eq!(free(None), 100.0);
    assert_eq!(free(Some(0.5)), 50.0);
    assert_eq!(free(Some(0.125)), 88.0);
    assert_eq!(free(Some(0.996)), 0.1);
    assert_eq!(free(Some(1.0)), 0.1);
    assert_eq!(free(Some(2.0)), 0.1);
}
