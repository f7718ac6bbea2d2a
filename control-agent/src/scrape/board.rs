//! The newest sample of every pod, written by the scraper and read by every push.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pd_wire::samples::PodSample;
use tokio::time::Instant;

use crate::snapshot::MemberKey;

/// A sample older than this says nothing any more and counts as missing.
pub const MAX_AGE: Duration = Duration::from_secs(60);

/// What one engine reported, and when. The sample's ordinal and age are set when it is pushed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// When the page was read.
    pub at: Instant,
    /// Its numbers.
    pub load: PodSample,
}

/// Newest sample by pod object. Its size is bounded by the fleet's: [`Board::retain`].
#[derive(Debug, Default)]
pub struct Board {
    samples: Mutex<BTreeMap<MemberKey, Sampled>>,
}

impl Board {
    // A poisoned lock means a panic between two statements that each leave the map whole.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<MemberKey, Sampled>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the sample of a pod.
    pub fn put(&self, key: MemberKey, sampled: Sampled) {
        self.lock().insert(key, sampled);
    }

    /// The sample of a pod, unless it is too old at `now`.
    pub fn get(&self, key: &MemberKey, now: Instant) -> Option<Sampled> {
        let sampled = self.lock().get(key).copied()?;
        (now.saturating_duration_since(sampled.at) <= MAX_AGE).then_some(sampled)
    }

    /// Drops the samples of pods that are gone.
    pub fn retain(&self, mut keep: impl FnMut(&MemberKey) -> bool) {
        self.lock().retain(|key, _| keep(key));
    }

    /// Number of samples and age of the oldest one.
    pub fn extent(&self, now: Instant) -> (usize, Option<Duration>) {
        let samples = self.lock();
        let oldest = samples
            .values()
            .map(|sampled| now.saturating_duration_since(sampled.at))
            .max();
        (samples.len(), oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_counts_until_it_is_too_old_or_its_pod_is_gone() {
        let key = |name: &str| MemberKey {
            namespace: "n".to_owned(),
            name: name.to_owned(),
            uid: "u".to_owned(),
        };
        let at = Instant::now();
        let board = Board::default();
        let sampled = Sampled {
            at,
            load: PodSample::default(),
        };
        board.put(key("a"), sampled);
        board.put(key("b"), sampled);
        assert_eq!(board.get(&key("a"), at + MAX_AGE), Some(sampled));
        assert_eq!(
            board.get(&key("a"), at + MAX_AGE + Duration::from_millis(1)),
            None
        );
        assert_eq!(
            board.extent(at + Duration::from_secs(5)),
            (2, Some(Duration::from_secs(5)))
        );
        board.retain(|known| *known == key("b"));
        assert_eq!(board.get(&key("a"), at), None);
        assert_eq!(board.extent(at).0, 1);
    }
}
