//! What is charged to each pod of a model, over all VMs.

use super::{Amounts, PodKey};
use crate::fleet::FleetPod;
use std::hash::{BuildHasherDefault, Hasher};

/// Sums per pod at one moment.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pods: hashbrown::HashMap<PodKey, Amounts, BuildHasherDefault<KeyHasher>>,
}

/// Takes a [`PodKey`] as its own hash: it is one already, made of names the cluster vouches for.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyHasher(u64);

// === impl Totals ===

impl Totals {
    /// What is charged to a pod; zero for a pod without charges.
    pub fn get(&self, pod: PodKey) -> Amounts {
        self.pods.get(&pod).copied().unwrap_or_default()
    }

    /// What is charged to each of these pods, in their order.
    pub fn aligned(&self, pods: &[FleetPod]) -> Vec<Amounts> {
        let mut out = Vec::with_capacity(pods.len());
        self.aligned_into(pods, &mut out);
        out
    }

    /// Like [`Totals::aligned`], into a buffer that is cleared first.
    pub fn aligned_into(&self, pods: &[FleetPod], out: &mut Vec<Amounts>) {
        out.clear();
        out.extend(pods.iter().map(|pod| self.get(pod.key)));
    }

    /// Every pod with a charge, sorted by key.
    pub fn sorted(&self) -> Vec<(PodKey, Amounts)> {
        let mut pods: Vec<_> = self
            .pods
            .iter()
            .filter(|(_, amounts)| !amounts.is_zero())
            .map(|(pod, amounts)| (*pod, *amounts))
            .collect();
        pods.sort_unstable_by_key(|(pod, _)| *pod);
        pods
    }

    /// True when nothing is charged to any pod.
    pub fn is_zero(&self) -> bool {
        self.pods.values().all(Amounts::is_zero)
    }

    /// Adds to a pod.
    pub fn add(&mut self, pod: PodKey, amounts: &Amounts) {
        self.pods.entry(pod).or_default().add(amounts);
    }

    /// Forgets everything and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.pods.clear();
    }
}

// === impl KeyHasher ===

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // Only `write_u64` is ever called for a pod key; other input still hashes to something.
        self.0 = xxhash_rust::xxh64::xxh64(bytes, self.0);
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_summed_and_sorted_and_unknown_pods_are_zero() {
        let one = Amounts {
            decode_pending: 1,
            ..Amounts::default()
        };
        let mut totals = Totals::default();
        totals.add(PodKey(9), &one);
        totals.add(PodKey(2), &one);
        totals.add(PodKey(9), &one);
        totals.add(PodKey(5), &Amounts::default());
        assert_eq!(
            totals.sorted(),
            [
                (PodKey(2), one),
                (
                    PodKey(9),
                    Amounts {
                        decode_pending: 2,
                        ..one
                    }
                )
            ]
        );
        assert_eq!(totals.get(PodKey(7)), Amounts::default());
        assert!(!totals.is_zero());
    }
}
