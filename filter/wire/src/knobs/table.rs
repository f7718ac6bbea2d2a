//! The table of settings. A row reads: documentation, field and type, default, name in the plugin
//! config, type and range, reader, and, where they exist, variable and profile field.
//!
//! Names, defaults and variables that begin with `AIBRIX_` are AIBrix's.

use super::choices::{
    BucketServeMode, Choice, DecodePolicy, KvConnector, PrefillFallback, PrefillPolicy, Strategy,
    TrtScheduleStyle,
};
use super::kind::{Kind, Secret, Setting, Unit, Value};
use super::{Knob, Reader};
use std::sync::Arc;

const fn integer(min: u64, max: u64) -> Kind {
    Kind::Integer { min, max }
}

const fn number(min: f64, max: f64) -> Kind {
    Kind::Number { min, max }
}

const fn seconds(min: f64, max: f64) -> Kind {
    let unit = Unit::Seconds;
    Kind::Duration { unit, min, max }
}

const fn choice<C: Choice>() -> Kind {
    Kind::Choice(C::NAMES)
}

/// Decode timers that a source has set, be it to their default. What is set holds for every engine;
/// the default holds only for engines whose pods are timed by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimersGiven {
    /// `decodeFirstResponseTimeout`.
    pub first_response: bool,
    /// `decodeStreamIdleTimeout`.
    pub stream_idle: bool,
}

impl TimersGiven {
    fn note(&mut self, knob: &str) {
        match knob {
            "decodeFirstResponseTimeout" => self.first_response = true,
            "decodeStreamIdleTimeout" => self.stream_idle = true,
            _ => {}
        }
    }
}

/// A week, in seconds: no timer needs more.
const WEEK: f64 = 604_800.0;
/// A time that cannot be switched off.
const TIMER: Kind = seconds(0.001, WEEK);
/// A time that 0 switches off.
const TIMER_OR_OFF: Kind = seconds(0.0, WEEK);
const POSITIVE: Kind = Kind::Positive { max: 1e9 };
const SEED: Kind = integer(0, u64::MAX);

/// Makes an optional row entry.
macro_rules! optional {
    () => {
        None
    };
    ($text:literal) => {
        Some($text)
    };
}

macro_rules! knobs {
    ($(
        $(#[doc = $doc:literal])+
        $field:ident: $type:ty = $default:expr;
        $name:literal, $kind:expr, $reader:ident $(, env $variable:literal)? $(, profile $profile:literal)?;
    )+) => {
        /// All settings, typed. Times are in milliseconds.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Knobs {
            $($(#[doc = $doc])+ pub $field: $type,)+
            /// Decode policy of a profile that no version of this program knows: its requests
            /// are answered with a 503 that names it.
            pub invalid_decode_policy: Option<String>,
            /// Decode timers that some source has set.
            pub timers_given: TimersGiven,
        }

        impl Default for Knobs {
            fn default() -> Self {
                Self {
                    $($field: $default,)+
                    invalid_decode_policy: None,
                    timers_given: TimersGiven::default(),
                }
            }
        }

        /// All knobs, in the order of documentation.
        pub const KNOBS: &[Knob] = &[$(Knob {
            name: $name,
            doc: concat!($($doc),+).trim_ascii_start(),
            kind: $kind,
            reader: Reader::$reader,
            variable: optional!($($variable)?),
            profile: optional!($($profile)?),
        }),+];

        impl Knobs {
            /// The value of a knob in its own unit; none when unset, unknown or secret.
            /// Of hashes only their number is told.
            pub fn get(&self, name: &str) -> Option<Value> {
                match name {
                    $($name => self.$field.to_value(&$kind),)+
                    _ => None,
                }
            }

            /// Sets a knob by name. False, and nothing changed, when there is no such knob or it
            /// does not accept the value.
            pub fn set(&mut self, name: &str, value: &Value) -> bool {
                match name {
                    $($name => {
                        let accepted = $kind.accepts(value);
                        match <$type as Setting>::from_value(value, &$kind) {
                            Some(setting) if accepted => {
                                self.$field = setting;
                                self.timers_given.note(name);
                                true
                            }
                            _ => false,
                        }
                    })+
                    _ => false,
                }
            }
        }
    };
}

knobs! {
    // Strategy.
    /// Strategy of requests that neither a header, a profile nor a lock decides. Unset: `pd` if the model has a complete roleset, else `least-request`.
    routing_algorithm: Option<Strategy> = None;
    "routingAlgorithm", choice::<Strategy>(), Filter, env "ROUTING_ALGORITHM";

    // Prompt-length buckets.
    /// Match prompt lengths against the ranges of pods. A profile may switch it off, not on.
    prompt_length_bucketing: bool = false;
    "promptLengthBucketing", Kind::Bool, Filter, env "AIBRIX_PROMPT_LENGTH_BUCKETING", profile "promptLengthBucketing";

    /// Adaptive bands on top of bucketing, which must be on too. A profile may switch it off, not on.
    bucket_serve: bool = false;
    "bucketServe", Kind::Bool, Filter, env "AIBRIX_BUCKET_SERVE", profile "bucketServe";

    /// What the bands divide, each roleset by its prefill pods: prompt tokens or requests.
    bucket_serve_mode: BucketServeMode = BucketServeMode::Throughput;
    "bucketServeMode", choice::<BucketServeMode>(), Filter, env "AIBRIX_BUCKET_SERVE_MODE", profile "bucketServeMode";

    // Prefill leg.
    /// Time a prefill leg may take. Envoy's limit of the wait for all tries (75 s as shipped, `--waiting-timeout`) must be longer.
    prefill_request_timeout_ms: u64 = 30_000;
    "prefillRequestTimeout", TIMER, Filter, env "AIBRIX_PREFILL_REQUEST_TIMEOUT", profile "pd.prefillRequestTimeout";

    /// Time added to the prefill timeout for every 1000 prompt tokens; 0 = none.
    prefill_timeout_per_kilo_token_ms: u64 = 0;
    "prefillTimeoutPerKiloToken", TIMER_OR_OFF, Filter, profile "pd.prefillTimeoutPerKiloToken";

    /// How often a prefill leg that left nothing behind is sent again, to another roleset where there is one.
    prefill_retries: u64 = 1;
    "prefillRetries", integer(0, 3), Filter, profile "pd.prefillRetries";

    /// Share of a worker's requests in flight that may be retries, in percent; three are always allowed.
    retry_budget_percent: u64 = 20;
    "retryBudgetPercent", integer(0, 100), Filter;

    /// What serves a request when no prefill pod can: nothing, a combined pod, or also a decode pod.
    prefill_fallback: PrefillFallback = PrefillFallback::Combined;
    "prefillFallback", choice::<PrefillFallback>(), Filter, profile "prefillFallback";

    /// Prompts with at most this many uncached tokens skip the prefill leg; 0 = off.
    local_prefill_max_tokens: u64 = 0;
    "localPrefillMaxTokens", integer(0, 10_000_000), Filter, profile "pd.localPrefillMaxTokens";

    /// Most outstanding prefill requests per pod; 0 = no limit.
    max_prefill_per_pod: u64 = 0;
    "maxPrefillPerPod", integer(0, 1_000_000), Filter, profile "pd.maxPrefillPerPod";

    /// Most outstanding decode requests per pod; 0 = no limit.
    max_decode_per_pod: u64 = 0;
    "maxDecodePerPod", integer(0, 1_000_000), Filter, profile "pd.maxDecodePerPod";

    // Ejection.
    /// Failures in a row after which a pod or a pair is left alone for a while; 0 = never. Refused or cut connections, timeouts and 5xx count; 429, 503 and other 4xx do not.
    eject_after_failures: u64 = 5;
    "ejectAfterFailures", integer(0, 1000), Filter;

    /// Time of a first ejection; doubled with each further one.
    eject_time_ms: u64 = 10_000;
    "ejectTime", TIMER, Filter;

    /// Longest time of an ejection, and the time without one after which it starts small again.
    eject_time_max_ms: u64 = 300_000;
    "ejectTimeMax", TIMER, Filter;

    /// Share of a model's pairs that may be ejected at a time, in percent; never the last one.
    eject_max_percent: u64 = 50;
    "ejectMaxPercent", integer(0, 100), Filter;

    // Choosing a prefill pod.
    /// How prefill pods are scored.
    prefill_score_policy: PrefillPolicy = PrefillPolicy::PrefixCache;
    "prefillScorePolicy", choice::<PrefillPolicy>(), Filter, env "AIBRIX_PREFILL_SCORE_POLICY", profile "prefillScorePolicy";

    /// Difference between the most and the least prefill requests above which the least loaded pod is taken.
    prefill_load_imbalance_min_spread: u64 = 16;
    "prefillLoadImbalanceMinSpread", integer(1, 1_000_000), Filter, env "AIBRIX_PREFILL_LOAD_IMBALANCE_MIN_SPREAD", profile "pd.prefillLoadImbalanceMinSpread";

    /// Standard deviations above the mean request count at which a prefill pod is skipped.
    prefix_cache_standard_deviation_factor: u64 = 2;
    "prefixCacheStandardDeviationFactor", integer(1, 1000), Filter, env "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", profile "prefixCache.standardDeviationFactor";

    /// Prefix matches below this percentage count as none; 0 = off. `prefix_cache` and `hybrid_cache_load`.
    min_match_pct: f64 = 0.0;
    "minMatchPct", number(0.0, 100.0), Filter, env "AIBRIX_MIN_MATCH_PCT", profile "pd.minMatchPct";

    /// Discount a full prefix match gives on a pod's token load; 0 = none. `hybrid_cache_load`.
    hybrid_cache_load_factor: f64 = 0.5;
    "hybridCacheLoadFactor", number(0.0, 1.0), Filter, env "AIBRIX_HYBRID_CACHE_LOAD_FACTOR", profile "pd.hybridCacheLoadFactor";

    /// Weight of resident KV tokens in the prefill score. `token_load` and `hybrid_cache_load`.
    token_load_kv_weight: f64 = 0.3;
    "tokenLoadKVWeight", POSITIVE, Filter, env "AIBRIX_TOKEN_LOAD_KV_WEIGHT", profile "pd.tokenLoadKVWeight";

    /// Tokens added to every prefill charge. `token_load` and `hybrid_cache_load`.
    token_load_request_cost: u64 = 3500;
    "tokenLoadRequestCost", integer(1, 1_000_000_000), Filter, env "AIBRIX_TOKEN_LOAD_REQUEST_COST", profile "pd.tokenLoadRequestCost";

    /// Age at which a charge is taken back and reported; must exceed the longest request.
    token_load_ttl_ms: u64 = 3_600_000;
    "tokenLoadTTLSeconds", TIMER, Filter, env "AIBRIX_TOKEN_LOAD_TTL_SECONDS", profile "pd.tokenLoadTTLSeconds";

    /// How long the prompt size of a session is remembered; 0 = sessions are not told apart.
    token_load_session_ttl_ms: u64 = 1_800_000;
    "tokenLoadSessionTTLSeconds", TIMER_OR_OFF, Filter, env "AIBRIX_TOKEN_LOAD_SESSION_TTL_SECONDS", profile "pd.tokenLoadSessionTTLSeconds";

    /// Most sessions remembered.
    token_load_max_sessions: u64 = 100_000;
    "tokenLoadMaxSessions", integer(1, 10_000_000), Filter, env "AIBRIX_TOKEN_LOAD_MAX_SESSIONS";

    // Prefix index.
    /// Bytes of a prompt block in the prefix index.
    prefix_cache_block_size: u64 = 128;
    "prefixCacheBlockSize", integer(1, 65_536), Filter, env "AIBRIX_PREFIX_CACHE_BLOCK_SIZE";

    /// Blocks the prefix index holds.
    prefix_cache_block_number: u64 = 200_000;
    "prefixCacheBlockNumber", integer(1, 10_000_000), Filter, env "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER";

    /// Age at which the prefix index forgets a block, in minutes.
    prefix_cache_eviction_duration_ms: u64 = 1_200_000;
    "prefixCacheEvictionDurationMins", Kind::Duration { unit: Unit::Minutes, min: 0.001, max: 10_080.0 }, Filter, env "AIBRIX_PREFIX_CACHE_EVICTION_DURATION_MINS";

    /// Time between two sweeps of the prefix index.
    prefix_cache_eviction_interval_ms: u64 = 1_000;
    "prefixCacheEvictionIntervalSeconds", TIMER, Filter, env "AIBRIX_PREFIX_CACHE_EVICTION_INTERVAL_SECONDS";

    /// Seed of the block hashes. Unset: 0, so that a restarted gateway names blocks as before.
    prefix_cache_hash_seed: Option<u64> = None;
    "prefixCacheHashSeed", SEED, Filter, env "AIBRIX_PREFIX_CACHE_HASH_SEED";

    /// What prompts are cut into for the prefix index. `character`, bytes, whatever is given; other values bring a warning.
    prefix_cache_tokenizer_type: Arc<str> = "character".into();
    "prefixCacheTokenizerType", Kind::Text, Filter, env "AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE";

    // Choosing a decode pod.
    /// How decode pods are scored.
    decode_score_policy: DecodePolicy = DecodePolicy::LoadBalancing;
    "decodeScorePolicy", choice::<DecodePolicy>(), Filter, env "AIBRIX_DECODE_SCORE_POLICY", profile "decodeScorePolicy";

    /// Difference between the most and the least running requests from which the least loaded decode pod is taken.
    decode_load_imbalance_min_spread: f64 = 16.0;
    "decodeLoadImbalanceMinSpread", POSITIVE, Filter, env "AIBRIX_DECODE_LOAD_IMBALANCE_MIN_SPREAD", profile "pd.decodeLoadImbalanceMinSpread";

    /// Difference in tokens per second above which the decode pod with the lowest throughput is taken.
    decode_throughput_imbalance_min_spread: f64 = 2048.0;
    "decodeThroughputImbalanceMinSpread", POSITIVE, Filter, env "AIBRIX_DECODE_THROUGHPUT_IMBALANCE_MIN_SPREAD", profile "pd.decodeThroughputImbalanceMinSpread";

    /// Ratio of the longest to the shortest estimated queue drain above which the fastest decode pod is taken.
    decode_score_ratio_threshold: f64 = 1.5;
    "decodeScoreRatioThreshold", POSITIVE, Filter, env "AIBRIX_DECODE_SCORE_RATIO_THRESHOLD", profile "pd.decodeScoreRatioThreshold";

    /// Weight of running requests in `load_balancing`.
    decode_lb_weight_running: f64 = 1.0;
    "decodeLBWeightRunning", POSITIVE, Filter, env "AIBRIX_DECODE_LB_WEIGHT_RUNNING", profile "pd.decodeLBWeightRunning";

    /// Weight of throughput in `load_balancing`.
    decode_lb_weight_throughput: f64 = 1.0;
    "decodeLBWeightThroughput", POSITIVE, Filter, env "AIBRIX_DECODE_LB_WEIGHT_THROUGHPUT", profile "pd.decodeLBWeightThroughput";

    /// Add the estimated output so far to the decode score. `token_load`.
    decode_token_load_output_growth: bool = true;
    "decodeTokenLoadOutputGrowth", Kind::Bool, Filter, env "AIBRIX_DECODE_TOKEN_LOAD_OUTPUT_GROWTH";

    // Decode leg.
    /// Time from the prefill's success to the first body chunk of a streamed answer; 0 = no limit. The default holds for SGLang; other engines have a limit only where one is set.
    decode_first_response_timeout_ms: u64 = 60_000;
    "decodeFirstResponseTimeout", TIMER_OR_OFF, Filter, env "AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", profile "pd.decodeFirstResponseTimeout";

    /// Time from the prefill's success to the end of an answer that is not streamed; 0 = no limit.
    decode_response_timeout_ms: u64 = 0;
    "decodeResponseTimeout", TIMER_OR_OFF, Filter, env "AIBRIX_DECODE_RESPONSE_TIMEOUT", profile "pd.decodeResponseTimeout";

    /// Longest gap between two chunks of a pair's streamed answer; 0 = no limit. The default holds for SGLang; other engines have a limit only where one is set.
    decode_stream_idle_timeout_ms: u64 = 120_000;
    "decodeStreamIdleTimeout", TIMER_OR_OFF, Filter, env "AIBRIX_DECODE_STREAM_IDLE_TIMEOUT", profile "pd.decodeStreamIdleTimeout";

    /// Time an abort call may take; 0 = nothing is aborted.
    decode_abort_timeout_ms: u64 = 3_000;
    "decodeAbortTimeout", TIMER_OR_OFF, Filter, env "AIBRIX_DECODE_ABORT_TIMEOUT", profile "pd.decodeAbortTimeout";

    /// Delay before the second abort call; 0 = there is none.
    decode_abort_retry_delay_ms: u64 = 2_000;
    "decodeAbortRetryDelay", TIMER_OR_OFF, Filter, env "AIBRIX_DECODE_ABORT_RETRY_DELAY", profile "pd.decodeAbortRetryDelay";

    /// Longest silence of any decode leg, whatever the other timers say. Must stay below the `idle_timeout` of Envoy's route (960 s as shipped).
    stream_idle_backstop_ms: u64 = 900_000;
    "streamIdleBackstop", TIMER, Filter;

    /// Most requests kept going after their client left, per worker.
    max_orphans: u64 = 1024;
    "maxOrphans", integer(1, 65_536), Filter;

    // Engines.
    /// How vLLM pods without a connector label hand KV over.
    kv_connector_type: KvConnector = KvConnector::Shfs;
    "kvConnectorType", choice::<KvConnector>(), Filter, env "AIBRIX_KV_CONNECTOR_TYPE";

    /// Machine number in TensorRT-LLM request ids; must differ between Envoys that share workers.
    trt_machine_id: u64 = 0;
    "trtMachineId", integer(0, 1023), Filter, env "AIBRIX_TRT_MACHINE_ID";

    /// Whether TensorRT-LLM decode legs wait for the prefill reply.
    trt_schedule_style: TrtScheduleStyle = TrtScheduleStyle::ContextFirst;
    "trtScheduleStyle", choice::<TrtScheduleStyle>(), Filter, env "AIBRIX_TRT_SCHEDULE_STYLE";

    // Snapshots, control endpoint, diagnostics.
    /// Age at which an engine's sample no longer counts as known.
    stale_after_ms: u64 = 10_000;
    "staleAfter", seconds(0.1, 3600.0), Filter;

    /// How long a request that arrives before the first snapshot waits for it.
    snapshot_wait_ms: u64 = 2_000;
    "snapshotWait", seconds(0.0, 60.0), Filter;

    /// SHA-256 hashes of the bearer tokens the control endpoint accepts; none = no token is asked for.
    control_tokens: Arc<[String]> = Arc::new([]);
    "controlTokens", Kind::Hashes, Filter;

    /// Answer `x-pd-explain: true` with the facts behind the choice.
    allow_explain: bool = false;
    "allowExplain", Kind::Bool, Filter;

    /// Break ties by pod name instead of at random, reproducibly. For tests.
    tie_seed: Option<u64> = None;
    "tieSeed", SEED, Filter;

    // Control agent.
    /// Time between two scrapes of an engine, in milliseconds. The agent's flag is
    /// `--refresh-interval-ms`, the key of its YAML file `refresh-interval-ms`.
    pod_metric_refresh_interval_ms: u64 = 200;
    "podMetricRefreshIntervalMs", Kind::Duration { unit: Unit::Milliseconds, min: 10.0, max: 600_000.0 }, Agent, env "AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS";

    /// Share the decode ledger between replicas through Redis. `token_load`. Without effect so far
    /// and without a flag.
    token_load_shared_ledger: bool = true;
    "tokenLoadSharedLedger", Kind::Bool, Agent, env "AIBRIX_TOKEN_LOAD_SHARED_LEDGER";

    /// Redis server shared by the replicas; empty = none. Without effect so far and without a flag.
    redis_host: Arc<str> = "".into();
    "redisHost", Kind::Text, Agent, env "REDIS_HOST";

    /// Port of the Redis server. Without effect so far and without a flag.
    redis_port: u64 = 6379;
    "redisPort", integer(1, 65_535), Agent, env "REDIS_PORT";

    /// Password of the Redis server. Without effect so far and without a flag.
    redis_password: Secret = Secret::default();
    "redisPassword", Kind::Secret, Agent, env "REDIS_PASSWORD";
}
