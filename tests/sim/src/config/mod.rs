//! What an engine is told at start: identity, pace, limits. All times are milliseconds.

mod pace;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use pace::{ConfigError, Pace, PaceChange};

/// The inference engine whose protocol is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// vLLM 0.32 with its NIXL connector.
    #[default]
    Vllm,
    /// SGLang with PD disaggregation.
    Sglang,
    /// TensorRT-LLM 1.3.0rc8, one `trtllm-serve` worker.
    Trtllm,
}

/// The part an engine plays. For SGLang it is what `--disaggregation-mode` says. For the others it
/// is a label only: as with the real engines, what is done with a request is decided by its
/// `kv_transfer_params` or `disaggregated_params`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts for others.
    Prefill,
    /// Generates from KV computed elsewhere.
    Decode,
    /// Both, each request from its prompt to its end; `plain` is another name for it.
    #[default]
    #[serde(alias = "plain")]
    #[value(alias = "plain")]
    Both,
}

/// TensorRT-LLM's `transceiver_runtime`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Transceiver {
    /// `GET /server_info` tells where a decode engine finds the context: generation first works.
    #[default]
    Python,
    /// `GET /server_info` answers an empty `disaggregated_params`, and a context request that
    /// wants generation first is refused.
    Cpp,
}

/// What a decode engine does when it cannot load remote KV (vLLM's `kv_load_failure_policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LoadFailure {
    /// Answers 500.
    #[default]
    Fail,
    /// Computes the prompt itself.
    Recompute,
}

/// Everything one engine needs to start. Unknown JSON members are errors, missing ones default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Protocol spoken.
    #[arg(long, value_enum, default_value_t = EngineConfig::default().engine)]
    pub engine: EngineKind,
    /// Role label.
    #[arg(long, value_enum, default_value_t = EngineConfig::default().role)]
    pub role: Role,
    /// Name shown in texts, logs and the admin state.
    #[arg(long, default_value_t = EngineConfig::default().name)]
    pub name: String,
    /// Address to listen on.
    #[arg(long, default_value_t = EngineConfig::default().host)]
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = EngineConfig::default().port)]
    pub port: u16,
    /// Port of the admin listener that stays open when the engine refuses connections or is dead;
    /// 0 takes a free one.
    #[arg(long, default_value_t = EngineConfig::default().admin_port)]
    pub admin_port: u16,
    /// Port decode engines pull KV from (vLLM's `remote_port`, SGLang's bootstrap port,
    /// TensorRT-LLM's context endpoint); 0 takes a free one.
    #[arg(long, default_value_t = EngineConfig::default().side_channel_port)]
    pub side_channel_port: u16,
    /// Host given to decode engines as `remote_host`; default: `host`, or loopback when that is
    /// the unspecified address.
    #[arg(long)]
    pub advertise_host: Option<String>,
    /// Served model name; other names are answered 404.
    #[arg(long, default_value_t = EngineConfig::default().model)]
    pub model: String,
    /// Fixed time to compute any prompt.
    #[arg(long, default_value_t = EngineConfig::default().prefill_delay_ms)]
    pub prefill_delay_ms: f64,
    /// Time to compute 1024 bytes of prompt.
    #[arg(long, default_value_t = EngineConfig::default().prefill_ms_per_kilobyte)]
    pub prefill_ms_per_kilobyte: f64,
    /// Gap between generated tokens.
    #[arg(long, default_value_t = EngineConfig::default().token_interval_ms)]
    pub token_interval_ms: f64,
    /// Time a decode engine takes to pull remote KV.
    #[arg(long, default_value_t = EngineConfig::default().transfer_delay_ms)]
    pub transfer_delay_ms: f64,
    /// Tokens generated unless the request asks for fewer.
    #[arg(long, default_value_t = EngineConfig::default().tokens)]
    pub tokens: u32,
    /// How long one leg waits for the other: vLLM's lease, SGLang's bootstrap and waiting
    /// timeouts, TensorRT-LLM's `kv_transfer_timeout_ms`. 0 is the engine's own default: 30 s,
    /// 300 s and 60 s.
    #[arg(long, default_value_t = EngineConfig::default().lease_ms)]
    pub lease_ms: u64,
    /// Idle connections are closed after this; 0 keeps them.
    #[arg(long, default_value_t = EngineConfig::default().keep_alive_ms)]
    pub keep_alive_ms: u64,
    /// How long a pull from a closed port takes to fail (5 s in the real engine).
    #[arg(long, default_value_t = EngineConfig::default().closed_port_delay_ms)]
    pub closed_port_delay_ms: u64,
    /// How long a decode whose parameters lack a host or request id hangs before the engine dies.
    #[arg(long, default_value_t = EngineConfig::default().hang_ms)]
    pub hang_ms: u64,
    /// What a decode engine does when a pull fails.
    #[arg(long, value_enum, default_value_t = EngineConfig::default().load_failure)]
    pub load_failure: LoadFailure,
    /// KV blocks of the cache; one is reserved, as in vLLM.
    #[arg(long, default_value_t = EngineConfig::default().num_blocks)]
    pub num_blocks: u32,
    /// Tokens per KV block.
    #[arg(long, default_value_t = EngineConfig::default().block_size)]
    pub block_size: u32,
    /// Longest prompt, tokens.
    #[arg(long, default_value_t = EngineConfig::default().max_model_len)]
    pub max_model_len: u32,
    /// Requests run at once, others wait; 0 is unlimited.
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    pub max_num_seqs: u32,
    /// Waiting requests above which new ones get 503; 0 is unlimited.
    #[arg(long, default_value_t = EngineConfig::default().max_num_queued_reqs)]
    pub max_num_queued_reqs: u32,
    /// TensorRT-LLM: the KV cache transceiver.
    #[arg(long, value_enum, default_value_t = EngineConfig::default().transceiver)]
    pub transceiver: Transceiver,
    /// SGLang: response headers of a stream go out before the first token. Newer versions wait
    /// for the first chunk.
    #[arg(long, action = clap::ArgAction::Set, default_value_t = EngineConfig::default().early_headers)]
    pub early_headers: bool,
    /// SGLang: `bootstrap_room` is read as a double, as some JSON readers do.
    #[arg(long)]
    pub rooms_as_doubles: bool,
    /// SGLang: data-parallel replicas on the metrics page.
    #[arg(long, default_value_t = EngineConfig::default().dp_size)]
    pub dp_size: u32,
    /// SGLang: tensor-parallel ranks of a replica that report on the metrics page.
    #[arg(long, default_value_t = EngineConfig::default().tp_size)]
    pub tp_size: u32,
    /// File that gets one JSON line per request.
    #[arg(long)]
    pub log: Option<PathBuf>,
    /// Bodies up to this many bytes are kept in the log.
    #[arg(long, default_value_t = EngineConfig::default().log_body_limit)]
    pub log_body_limit: usize,
    /// Requests the admin log remembers; 0 turns it off.
    #[arg(long, default_value_t = EngineConfig::default().log_ring)]
    pub log_ring: usize,
    /// Larger request bodies get 413.
    #[arg(long, default_value_t = EngineConfig::default().body_limit)]
    pub body_limit: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            engine: EngineKind::Vllm,
            role: Role::Both,
            name: "engine".to_owned(),
            host: "127.0.0.1".to_owned(),
            port: 0,
            admin_port: 0,
            side_channel_port: 0,
            advertise_host: None,
            model: "sim-model".to_owned(),
            prefill_delay_ms: 0.0,
            prefill_ms_per_kilobyte: 0.0,
            token_interval_ms: 0.0,
            transfer_delay_ms: 0.0,
            tokens: 16,
            lease_ms: 0,
            keep_alive_ms: 5_000,
            closed_port_delay_ms: 200,
            hang_ms: 1_000,
            load_failure: LoadFailure::Fail,
            num_blocks: 1 << 20,
            block_size: 128,
            max_model_len: 16 << 20,
            max_num_seqs: 0,
            max_num_queued_reqs: 0,
            transceiver: Transceiver::Python,
            early_headers: true,
            rooms_as_doubles: false,
            dp_size: 1,
            tp_size: 1,
            log: None,
            log_body_limit: 64 << 10,
            log_ring: 256,
            body_limit: 64 << 20,
        }
    }
}

// === impl EngineConfig ===

impl EngineConfig {
    /// A configuration with this name and role, all else default.
    pub fn named(name: impl Into<String>, role: Role) -> Self {
        Self {
            name: name.into(),
            role,
            ..Self::default()
        }
    }

    /// Checks what the types do not say.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        // Block ids are indices of one table; 2^24 blocks of it are 128 MiB.
        if !(2..=1 << 24).contains(&self.num_blocks) {
            return Err(ConfigError::OutOfRange("num_blocks"));
        }
        if !(1..=1 << 20).contains(&self.block_size) {
            return Err(ConfigError::OutOfRange("block_size"));
        }
        if self.log_ring > 1 << 16 {
            return Err(ConfigError::OutOfRange("log_ring"));
        }
        if !(1..=64).contains(&self.dp_size) {
            return Err(ConfigError::OutOfRange("dp_size"));
        }
        if !(1..=64).contains(&self.tp_size) {
            return Err(ConfigError::OutOfRange("tp_size"));
        }
        self.pace().validate()
    }

    /// The delays this configuration starts with.
    pub fn pace(&self) -> Pace {
        Pace {
            prefill_delay_ms: self.prefill_delay_ms,
            prefill_ms_per_kilobyte: self.prefill_ms_per_kilobyte,
            token_interval_ms: self.token_interval_ms,
            transfer_delay_ms: self.transfer_delay_ms,
            tokens: self.tokens,
            lease_ms: match (self.lease_ms, self.engine) {
                (0, EngineKind::Vllm) => 30_000,
                (0, EngineKind::Sglang) => 300_000,
                (0, EngineKind::Trtllm) => 60_000,
                (given, _) => given,
            },
        }
    }

    /// Time an idle connection is kept; `None` for ever.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        (self.keep_alive_ms > 0).then(|| Duration::from_millis(self.keep_alive_ms))
    }
}
