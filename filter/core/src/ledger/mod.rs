//! Charges: what every pod has been asked to do and has not finished yet.
//!
//! The truth of a charge is in the memory of the VM that made it ([`Book`]). One shared record
//! per model carries, for every VM and pod, the *sum* of that VM's charges ([`record`]); a VM
//! replaces its own cells as a whole and never adds to them. So a swap that was lost, a record
//! that could not be read or a VM declared dead by mistake cost no more than one more publication,
//! and no error can add up. The alternative, a shared counter that everybody adds to, is one
//! instruction shorter and never recovers from a VM that dies between its addition and its
//! subtraction.

pub mod book;
pub mod peers;
pub mod record;
pub mod report;
pub mod slots;
pub mod totals;
pub mod txn;

pub use book::{Book, ChargeId, DecodeCharge, Expired, Pick, PrefillCharge};
pub use slots::{Vitals, VmId};
pub use totals::{KeyHasher, Totals};
pub use txn::{ChargeState, Charged, Ledger, TickReport};

/// Ledger records of one format: models of a topology (at most
/// [`MAX_MODELS`](pd_wire::topology::MAX_MODELS)) and some room for models that left while work is
/// charged to them.
pub const MODEL_SLOTS: u16 = 256;

/// Identity of a pod in records: XXH64 (seed 0) over `namespace/name/uid`.
///
/// Never an index of a topology, so records outlive topologies.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct PodKey(pub u64);

/// What is charged to one pod. All integers: any mix of charges and releases ends at exactly zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Prefill requests outstanding.
    pub prefill_requests: u32,
    /// Prompt tokens being computed.
    pub active_tokens: u64,
    /// Prompt tokens whose KV is still held for the decode pod.
    pub kv_tokens: u64,
    /// Decode requests chosen whose leg is not sent yet.
    pub decode_pending: u32,
    /// Decode requests whose leg is sent.
    pub decode_running: u32,
    /// Prompt tokens of the outstanding decode requests.
    pub decode_tokens: u64,
    /// Sum of the routing times of the outstanding decode requests, in ms of the shared
    /// monotonic clock; with the count it gives their total age.
    pub routed_at_sum_ms: u64,
}

// === impl PodKey ===

impl PodKey {
    /// Key of the pod that Kubernetes knows by these three.
    pub fn of(namespace: &str, name: &str, uid: &str) -> Self {
        let mut hash = xxhash_rust::xxh64::Xxh64::new(0);
        for part in [namespace, "/", name, "/", uid] {
            hash.update(part.as_bytes());
        }
        Self(hash.digest())
    }
}

// === impl Amounts ===

impl Amounts {
    /// True when nothing is charged.
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }

    /// Adds what another VM has charged. Saturates: a nonsensical cell must not look like an idle
    /// pod.
    pub fn add(&mut self, other: &Self) {
        self.prefill_requests = self.prefill_requests.saturating_add(other.prefill_requests);
        self.active_tokens = self.active_tokens.saturating_add(other.active_tokens);
        self.kv_tokens = self.kv_tokens.saturating_add(other.kv_tokens);
        self.decode_pending = self.decode_pending.saturating_add(other.decode_pending);
        self.decode_running = self.decode_running.saturating_add(other.decode_running);
        self.decode_tokens = self.decode_tokens.saturating_add(other.decode_tokens);
        self.routed_at_sum_ms = self.routed_at_sum_ms.saturating_add(other.routed_at_sum_ms);
    }

    /// Outstanding decode requests, sent or not.
    pub fn decode_requests(&self) -> u32 {
        self.decode_pending.saturating_add(self.decode_running)
    }

    /// Total age of the outstanding decode requests in ms: the sum of `now − routed_at`.
    pub fn decode_age_ms(&self, now_ms: u64) -> u64 {
        u64::from(self.decode_requests())
            .saturating_mul(now_ms)
            .saturating_sub(self.routed_at_sum_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recreated_pod_has_another_key() {
        assert_ne!(PodKey::of("ns", "p-0", "a"), PodKey::of("ns", "p-0", "b"));
        assert_ne!(
            PodKey::of("ns", "p-0", "a"),
            PodKey::of("other", "p-0", "a")
        );
        assert_eq!(
            PodKey::of("", "", ""),
            PodKey(xxhash_rust::xxh64::xxh64(b"//", 0))
        );
    }

    #[test]
    fn age_is_the_sum_over_the_requests_and_never_negative() {
        let amounts = Amounts {
            decode_pending: 1,
            decode_running: 1,
            routed_at_sum_ms: 1_000 + 1_500,
            ..Amounts::default()
        };
        assert_eq!(amounts.decode_age_ms(2_000), 1_000 + 500);
        assert_eq!(amounts.decode_age_ms(1_000), 0);
    }
}
