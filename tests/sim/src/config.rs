//! What an engine is told at start: identity, pace, limits. All times are milliseconds.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The inference engine whose protocol is spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// vLLM 0.32 with its NIXL connector.
    #[default]
    Vllm,
    /// SGLang; not available yet.
    Sglang,
    /// TensorRT-LLM; not available yet.
    Trtllm,
}

/// The part an engine plays. A label only: as with the real engine, what is done with a request
/// is decided by its `kv_transfer_params`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts for others.
    Prefill,
    /// Generates from KV computed elsewhere.
    Decode,
    /// Both.
    #[default]
    Both,
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
    /// Port decode engines pull KV from (`remote_port`); 0 takes a free one.
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
    /// How long prefilled KV waits for a decode engine.
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
            lease_ms: 30_000,
            keep_alive_ms: 5_000,
            closed_port_delay_ms: 200,
            hang_ms: 1_000,
            load_failure: LoadFailure::Fail,
            num_blocks: 1 << 20,
            block_size: 128,
            max_model_len: 16 << 20,
            max_num_seqs: 0,
            max_num_queued_reqs: 0,
            log: None,
            log_body_limit: 64 << 10,
            log_ring: 256,
            body_limit: 64 << 20,
        }
    }
}

/// The delays of a running engine, which the admin endpoint may change.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pace {
    /// Fixed time to compute any prompt.
    pub prefill_delay_ms: f64,
    /// Time to compute 1024 bytes of prompt.
    pub prefill_ms_per_kilobyte: f64,
    /// Gap between generated tokens.
    pub token_interval_ms: f64,
    /// Time to pull remote KV.
    pub transfer_delay_ms: f64,
    /// Tokens generated unless the request asks for fewer.
    pub tokens: u32,
    /// How long prefilled KV waits for a decode engine.
    pub lease_ms: u64,
}

/// New values for some of a [`Pace`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PaceChange {
    /// See [`Pace::prefill_delay_ms`].
    pub prefill_delay_ms: Option<f64>,
    /// See [`Pace::prefill_ms_per_kilobyte`].
    pub prefill_ms_per_kilobyte: Option<f64>,
    /// See [`Pace::token_interval_ms`].
    pub token_interval_ms: Option<f64>,
    /// See [`Pace::transfer_delay_ms`].
    pub transfer_delay_ms: Option<f64>,
    /// See [`Pace::tokens`].
    pub tokens: Option<u32>,
    /// See [`Pace::lease_ms`]; applies to KV held from now on.
    pub lease_ms: Option<u64>,
}

/// Why a configuration cannot be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// The protocol is not simulated yet.
    EngineNotAvailable(EngineKind),
    /// A number is outside what the engine can hold.
    OutOfRange(&'static str),
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
        if self.engine != EngineKind::Vllm {
            return Err(ConfigError::EngineNotAvailable(self.engine));
        }
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
            lease_ms: self.lease_ms,
        }
    }

    /// Time an idle connection is kept; `None` for ever.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        (self.keep_alive_ms > 0).then(|| Duration::from_millis(self.keep_alive_ms))
    }
}

// === impl Pace ===

impl Pace {
    /// This pace with the given values replaced.
    ///
    /// # Errors
    /// A value outside its range.
    pub fn changed(mut self, change: PaceChange) -> Result<Self, ConfigError> {
        fn set<T>(slot: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *slot = value;
            }
        }
        set(&mut self.prefill_delay_ms, change.prefill_delay_ms);
        set(
            &mut self.prefill_ms_per_kilobyte,
            change.prefill_ms_per_kilobyte,
        );
        set(&mut self.token_interval_ms, change.token_interval_ms);
        set(&mut self.transfer_delay_ms, change.transfer_delay_ms);
        set(&mut self.tokens, change.tokens);
        set(&mut self.lease_ms, change.lease_ms);
        self.validate()?;
        Ok(self)
    }

    fn validate(&self) -> Result<(), ConfigError> {
        // A day: keeps every deadline representable.
        const LONGEST_MS: f64 = 86_400_000.0;
        let millis = [
            ("prefill_delay_ms", self.prefill_delay_ms),
            ("prefill_ms_per_kilobyte", self.prefill_ms_per_kilobyte),
            ("token_interval_ms", self.token_interval_ms),
            ("transfer_delay_ms", self.transfer_delay_ms),
        ];
        for (name, value) in millis {
            if !(0.0..=LONGEST_MS).contains(&value) {
                return Err(ConfigError::OutOfRange(name));
            }
        }
        if self.lease_ms == 0 || self.lease_ms > 86_400_000 {
            return Err(ConfigError::OutOfRange("lease_ms"));
        }
        if self.tokens == 0 || self.tokens > 1 << 20 {
            return Err(ConfigError::OutOfRange("tokens"));
        }
        Ok(())
    }

    /// Time to compute a prompt of this many bytes.
    pub(crate) fn prefill(&self, prompt_bytes: usize) -> Duration {
        let kilobytes = prompt_bytes as f64 / 1024.0;
        millis(self.prefill_delay_ms + self.prefill_ms_per_kilobyte * kilobytes)
    }

    /// Gap between tokens.
    pub(crate) fn token_interval(&self) -> Duration {
        millis(self.token_interval_ms)
    }

    /// Time to pull remote KV.
    pub(crate) fn transfer(&self) -> Duration {
        millis(self.transfer_delay_ms)
    }

    /// Time KV is held.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }
}

fn millis(value: f64) -> Duration {
    Duration::try_from_secs_f64(value / 1000.0).unwrap_or(Duration::ZERO)
}

// === impl ConfigError ===

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EngineNotAvailable(kind) => {
                let name = format!("{kind:?}").to_lowercase();
                write!(f, "engine {name} is not available: only vllm is, for now")
            }
            Self::OutOfRange(name) => write!(f, "{name} is out of range"),
        }
    }
}

impl std::error::Error for ConfigError {}
