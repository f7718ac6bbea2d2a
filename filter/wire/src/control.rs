//! Answers of the filter's control endpoint.

use serde::{Deserialize, Serialize};

/// Body of a refused push (409, 413, 400, 401, 426) and of an accepted one (200).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PushReply {
    /// What is wrong and what to do; empty when accepted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Epoch held after this push (0: nothing held).
    pub epoch: u64,
    /// Sequence held after this push, of the kind that was pushed.
    pub sequence: u64,
    /// Sequence of the topology held, so that samples can be indexed again.
    pub topology_sequence: u64,
    /// Agent whose snapshot is held.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub agent: String,
}

/// Totals of every ledger: `GET /pd/v1/ledgers`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ledgers {
    /// Models with at least one charge.
    pub models: Vec<ModelLedger>,
    /// Sum over all models and pods.
    pub total: Charged,
}

/// Ledger of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelLedger {
    /// Model name.
    pub model: String,
    /// Pods with at least one charge.
    pub pods: Vec<PodLedger>,
}

/// Ledger of one pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodLedger {
    /// Namespace; empty when the pod left the topology while work is charged to it.
    pub namespace: String,
    /// Pod name; the hexadecimal pod key when the pod left the topology.
    pub name: String,
    /// What is charged.
    #[serde(flatten)]
    pub charged: Charged,
}

/// Charges of a pod, or a sum of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Charged {
    /// Prefill requests outstanding.
    pub prefill_requests: u64,
    /// Prompt tokens being computed.
    pub active_tokens: u64,
    /// Prompt tokens whose KV is still held for the decode pod.
    pub kv_tokens: u64,
    /// Decode requests chosen whose leg is not sent yet.
    pub decode_pending: u64,
    /// Decode requests whose leg is sent.
    pub decode_running: u64,
    /// Prompt tokens of the outstanding decode requests.
    pub decode_tokens: u64,
}

/// State of the filter: `GET /pd/v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Version of the filter.
    pub version: String,
    /// Version byte of the records it writes.
    pub format: u8,
    /// Snapshot held, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<SnapshotStatus>,
    /// Samples held, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SnapshotStatus>,
    /// Live VMs.
    pub vms: Vec<VmStatus>,
    /// Live requests of all VMs.
    pub live_flows: u64,
    /// Pods and pairs that are avoided because they failed.
    #[serde(default)]
    pub ejected: Vec<Ejected>,
    /// Knobs in force, by camelCase name.
    pub knobs: serde_json::Map<String, serde_json::Value>,
}

/// One pushed message held.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotStatus {
    /// Sender.
    pub agent: String,
    /// Epoch.
    pub epoch: u64,
    /// Sequence.
    pub sequence: u64,
    /// Time since it was stored, in ms.
    pub age_ms: u64,
    /// Pods it holds.
    pub pods: u64,
}

/// A pod, or a pair, that is avoided because it failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ejected {
    /// Model.
    pub model: String,
    /// `namespace/name` of the pod; of a pair, the prefill pod's first.
    pub pods: Vec<String>,
    /// `ejected`, `trial_due` (its time is over) or `on_trial`.
    pub phase: String,
    /// Time until its trial, in ms.
    pub remaining_ms: u64,
    /// How it failed last.
    pub cause: String,
    /// Ejections with no long calm between them.
    pub times: u32,
}

/// One VM of this Envoy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VmStatus {
    /// Slot number.
    pub slot: u32,
    /// Generation of the slot.
    pub generation: u32,
    /// Counts ticks.
    pub beat: u32,
    /// Requests the VM is working on, orphaned ones included.
    pub live_flows: u32,
    /// Linear memory, in pages of 64 KiB.
    pub memory_pages: u32,
}

impl Charged {
    /// Adds the charges of another pod; saturates.
    pub fn add(&mut self, other: &Self) {
        self.prefill_requests = self.prefill_requests.saturating_add(other.prefill_requests);
        self.active_tokens = self.active_tokens.saturating_add(other.active_tokens);
        self.kv_tokens = self.kv_tokens.saturating_add(other.kv_tokens);
        self.decode_pending = self.decode_pending.saturating_add(other.decode_pending);
        self.decode_running = self.decode_running.saturating_add(other.decode_running);
        self.decode_tokens = self.decode_tokens.saturating_add(other.decode_tokens);
    }
}
