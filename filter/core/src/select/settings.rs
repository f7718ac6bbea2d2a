//! The settings a choice reads, as plain numbers.

use pd_wire::knobs::{DecodePolicy, Knobs, PrefillFallback, PrefillPolicy};

/// Settings in force for one request. [`Default`] holds the documented defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Formula of step 3.
    pub prefill_policy: PrefillPolicy,
    /// Formula of step 4.
    pub decode_policy: DecodePolicy,
    /// What happens when no prefill pod can serve.
    pub prefill_fallback: PrefillFallback,
    /// Step 1 fires when prefill request counts differ by more than this.
    pub prefill_spread: f64,
    /// Step 2 fires when decode request counts differ by this or more.
    pub decode_spread: f64,
    /// Step 2 fires when decode throughputs differ by more than this, in tokens per second.
    pub throughput_spread: f64,
    /// Step 2 fires when the longest and the shortest drain time have a larger ratio than this.
    pub drain_ratio: f64,
    /// Prefill pods with more requests than the mean plus this many sample standard deviations
    /// are skipped.
    pub std_factor: f64,
    /// A prefix match below this percentage counts as none; 0 = every match counts.
    pub min_match_pct: f64,
    /// Discount of `hybrid_cache_load` for a full match, 0 to 1.
    pub hybrid_factor: f64,
    /// Weight of resident KV tokens in the prefill token load.
    pub kv_weight: f64,
    /// The decode policy `token_load` estimates the output of outstanding requests.
    pub output_growth: bool,
    /// Weight of the request term of `load_balancing`.
    pub weight_running: f64,
    /// Weight of the throughput term of `load_balancing`.
    pub weight_throughput: f64,
    /// Pods serve only prompts inside their configured length ranges.
    pub bucketing: bool,
    /// Prompts with at most this many tokens missing in the decode pod's cache skip the remote
    /// prefill; 0 = never.
    pub local_prefill_max_tokens: u64,
    /// Prefill requests a pod may have before it counts as full; 0 = no limit.
    pub max_prefill_per_pod: u32,
    /// Requests a decode or combined pod may have before it counts as full; 0 = no limit.
    pub max_decode_per_pod: u32,
    /// A sample older than this does not count, in ms.
    pub stale_after_ms: u64,
    /// Exact ties go to the first pod by namespace and name instead of a random one.
    pub ties_by_pod_id: bool,
}

impl From<&Knobs> for Settings {
    fn from(knobs: &Knobs) -> Self {
        // Counts and spreads are far below 2^53; a limit beyond u32 is no limit.
        let limit = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Self {
            prefill_policy: knobs.prefill_score_policy,
            decode_policy: knobs.decode_score_policy,
            prefill_fallback: knobs.prefill_fallback,
            prefill_spread: knobs.prefill_load_imbalance_min_spread as f64,
            decode_spread: knobs.decode_load_imbalance_min_spread,
            throughput_spread: knobs.decode_throughput_imbalance_min_spread,
            drain_ratio: knobs.decode_score_ratio_threshold,
            std_factor: knobs.prefix_cache_standard_deviation_factor as f64,
            min_match_pct: knobs.min_match_pct,
            hybrid_factor: knobs.hybrid_cache_load_factor,
            kv_weight: knobs.token_load_kv_weight,
            output_growth: knobs.decode_token_load_output_growth,
            weight_running: knobs.decode_lb_weight_running,
            weight_throughput: knobs.decode_lb_weight_throughput,
            bucketing: knobs.prompt_length_bucketing,
            local_prefill_max_tokens: knobs.local_prefill_max_tokens,
            max_prefill_per_pod: limit(knobs.max_prefill_per_pod),
            max_decode_per_pod: limit(knobs.max_decode_per_pod),
            stale_after_ms: knobs.stale_after_ms,
            ties_by_pod_id: knobs.tie_seed.is_some(),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prefill_policy: PrefillPolicy::PrefixCache,
            decode_policy: DecodePolicy::LoadBalancing,
            prefill_fallback: PrefillFallback::Combined,
            prefill_spread: 16.0,
            decode_spread: 16.0,
            throughput_spread: 2048.0,
            drain_ratio: 1.5,
            std_factor: 2.0,
            min_match_pct: 0.0,
            hybrid_factor: 0.5,
            kv_weight: 0.3,
            output_growth: true,
            weight_running: 1.0,
            weight_throughput: 1.0,
            bucketing: false,
            local_prefill_max_tokens: 0,
            max_prefill_per_pod: 0,
            max_decode_per_pod: 0,
            stale_after_ms: 10_000,
            ties_by_pod_id: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_settings_table() {
        assert_eq!(Settings::default(), Settings::from(&Knobs::default()));
    }
}
