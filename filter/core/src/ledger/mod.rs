//! Charges: what every pod has been asked to do and has not finished yet.

/// Identity of a pod in records: XXH64 (seed 0) over `namespace/name/uid`.
///
/// Never an index of a topology, so records outlive topologies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
