//! Who wins an exact tie.
//!
//! At random: every pod draws a number from the request's random word and its key, the lowest
//! wins. That is uniform, and unlike shuffling it does not depend on the order of the pods.

use super::Query;
use crate::ledger::PodKey;
use std::cmp::Ordering;

/// Separates the draws of different levels: were the pods of a roleset and the rolesets compared
/// by the same draw, a roleset with many tied pods would win more often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Between pods.
    Pod,
    /// Between pairs of different rolesets.
    Pair,
}

/// True when `left` wins a tie against `right`.
pub(super) fn wins(query: &Query<'_>, level: Level, left: u16, right: u16) -> bool {
    let (Some(a), Some(b)) = (query.fleet.pod(left), query.fleet.pod(right)) else {
        return left < right;
    };
    let order = if query.settings.ties_by_pod_id {
        (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name))
    } else {
        let word = query.tie ^ level as u64;
        draw(word, a.key).cmp(&draw(word, b.key))
    };
    match order {
        Ordering::Less => true,
        Ordering::Greater => false,
        Ordering::Equal => left < right,
    }
}

/// The number a pod draws under a word: independent for every pair of both.
pub(super) fn draw(word: u64, pod: PodKey) -> u64 {
    mix(pod.0 ^ mix(word))
}

/// Bit mixer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
