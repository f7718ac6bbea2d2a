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

/// How a request would be served now: `POST /pd/v1/explain`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    /// Model name.
    pub model: String,
    /// Strategy in force.
    pub strategy: String,
    /// What decided it: `lock`, `header`, `profile`, `config` or `automatic`.
    pub strategy_source: String,
    /// Profile of the request, if one applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Requests per second of that profile; 0 = no limit.
    pub requests_per_second: u32,
    /// Length of the prompt, in tokens.
    pub prompt_tokens: u64,
    /// What decided, as in `x-pd-decision`.
    pub reason: String,
    /// The pods.
    pub target: ExplainedTarget,
    /// Prefix match of the pod that computes the prompt, in percent; absent when nothing in the
    /// choice reads the prefix index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_percent: Option<u8>,
    /// Prefill requests differ so much that the least loaded prefill pod was taken.
    pub prefill_imbalance: bool,
    /// Why the least loaded decode pod was taken outright: `requests`, `throughput` or `drain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_imbalance: Option<String>,
    /// Prefill pods left out because they have far more requests than their peers.
    pub skipped: u32,
    /// Pods left out because their score was not a finite number.
    pub ineligible: u32,
    /// Scores of all prefill candidates; lower is better.
    pub prefill: Vec<ScoredPod>,
    /// Scores of all candidates for decoding or for the whole request; lower is better.
    pub decode: Vec<ScoredPod>,
    /// Tokens the prefill pod would be charged.
    pub prefill_tokens: u64,
    /// Tokens the pod that answers would be charged.
    pub decode_tokens: u64,
}

/// The pods a request would go to, as `namespace/name`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedTarget {
    /// `pair`, `combined` or `one-leg`.
    pub kind: String,
    /// Prefill pod of a pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// The pod that answers.
    pub decode: String,
    /// Roleset of a pair, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roleset: Option<String>,
}

/// One candidate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScoredPod {
    /// `namespace/name`.
    pub pod: String,
    /// Its score; lower is better.
    pub score: f64,
    /// Part of the prompt in its prefix cache, in percent; absent when the index was not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_percent: Option<u8>,
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
    /// Learned bytes per prompt token of the models that the answering VM was asked for.
    #[serde(default)]
    pub estimates: Vec<EstimateStatus>,
    /// Tokenizers held, and what the answering VM made of them.
    #[serde(default)]
    pub tokenizers: Vec<TokenizerStatus>,
    /// Sessions remembered, counted once a minute.
    #[serde(default)]
    pub sessions: u64,
    /// Bands of adaptive buckets; none when they are off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bands: Vec<Band>,
    /// Pods and pairs that are avoided because they failed.
    #[serde(default)]
    pub ejected: Vec<Ejected>,
    /// Knobs in force, by camelCase name.
    pub knobs: serde_json::Map<String, serde_json::Value>,
    /// What the plugin config and the variables were warned of.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Models of the snapshot, by name.
    #[serde(default)]
    pub models: Vec<ModelStatus>,
}

/// One model of the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// Model name.
    pub name: String,
    /// Its pods.
    pub pods: u64,
    /// Those of them that are ready and not draining.
    pub usable: u64,
    /// Complete rolesets: a usable prefill and a usable decode pod.
    pub rolesets: u64,
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

/// What makes a prompt token of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EstimateStatus {
    /// Model name.
    pub model: String,
    /// Bytes of a prompt's JSON text per token.
    pub bytes_per_token: f64,
}

/// A model's tokenizer, as the answering VM has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenizerStatus {
    /// Model name.
    pub model: String,
    /// XXH64 of the pushed file, hexadecimal.
    pub digest: String,
    /// Size of the pushed file, in bytes.
    pub bytes: u64,
    /// Sender.
    pub agent: String,
    /// Epoch.
    pub epoch: u64,
    /// Sequence.
    pub sequence: u64,
    /// Time since it was stored, in ms.
    pub age_ms: u64,
    /// How far this VM is with it.
    pub state: TokenizerState,
    /// Why it cannot be loaded.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Time that loading took and stalled the worker, in ms.
    pub load_ms: u64,
    /// Linear memory before it was loaded, in pages of 64 KiB.
    pub pages_before: u32,
    /// Linear memory after.
    pub pages_after: u32,
    /// Speed as last measured.
    pub tokens_per_ms: u64,
    /// Prompts counted.
    pub counted: u64,
}

/// How far a VM is with a tokenizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TokenizerState {
    /// No request needed it: none came near a number of tokens that decides.
    #[default]
    Idle,
    /// Loaded at one of the next ticks.
    Wanted,
    /// Ready.
    Loaded,
    /// It cannot be loaded; prompts are estimated.
    Failed,
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

/// Prompt lengths for which a roleset is preferred. One roleset may have several bands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Band {
    /// Model.
    pub model: String,
    /// Namespace of the roleset.
    pub namespace: String,
    /// Name of the roleset.
    pub roleset: String,
    /// Shortest length, in tokens.
    pub low: u64,
    /// Longest length, in tokens; absent = no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high: Option<u64>,
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
