//! *Samples*: what the engines report, pushed in a compact binary form at every refresh.
//!
//! Layout, little endian: magic `PDS`, wire version `u8`; epoch, sequence, topology sequence
//! `u64` each; length-prefixed (`u16`) agent id; count `u32`; then per pod its ordinal `u32`,
//! age `u32` (ms), presence bits `u16` and one `f64` per present field, in the order of
//! [`PodSample`]'s fields. A missing number is absent, never zero.

/// Samples of one refresh.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// Sender and order; the epoch is also the topology's.
    pub stamp: crate::topology::Stamp,
    /// Sequence of the topology (same epoch) that the ordinals index; another one is a 409.
    pub topology_sequence: u64,
    /// Pods that have a sample.
    pub pods: Vec<PodSample>,
}

/// What one engine reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PodSample {
    /// Position of the pod in the concatenation of all models' pod lists.
    pub ordinal: u32,
    /// Age of the sample when it was sent, in ms.
    pub age_ms: u32,
    /// Requests running on the engine.
    pub running: Option<f64>,
    /// Requests waiting in the engine's queues.
    pub waiting: Option<f64>,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Generated tokens per second.
    pub generation_throughput: Option<f64>,
    /// Requests finished per second over the last minute.
    pub drain_rate: Option<f64>,
    /// Mean prefill time of a request, in ms.
    pub prefill_ms: Option<f64>,
    /// Requests that other gateway replicas run on the pod.
    pub remote_running: Option<f64>,
    /// Decode tokens that other gateway replicas have charged to the pod.
    pub remote_decode_tokens: Option<f64>,
}
