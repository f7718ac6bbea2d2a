//! `token_load`: tokens that sit in a pod's KV cache.

use super::{Batch, Load, Weights};

/// `decode tokens + generated tokens`. Every outstanding request is taken to have generated
/// `rate · age` tokens since it was routed.
pub(super) fn score(load: &Load, batch: &Batch, weights: &Weights) -> f64 {
    if !weights.output_growth {
        return load.tokens;
    }
    load.tokens + rate(load).unwrap_or(batch.mean_rate) * load.age_s
}

/// Tokens per second and request: throughput over running requests, once the pod has both.
fn rate(load: &Load) -> Option<f64> {
    let throughput = load.throughput.filter(|throughput| *throughput > 0.0)?;
    (load.running > 0.0).then(|| throughput / load.running)
}

/// Mean rate of the pods that have one, for those that have none; 0 when none has.
pub(super) fn mean_rate<'a>(loads: impl Iterator<Item = &'a Load>) -> f64 {
    let mut rates: Vec<f64> = loads.filter_map(rate).collect();
    // A sum of floats depends on its order; the order of the pods must not matter.
    rates.sort_by(f64::total_cmp);
    let count = rates.iter().fold(0.0, |count, _| count + 1.0);
    if count > 0.0 {
        rates.iter().sum::<f64>() / count
    } else {
        0.0
    }
}
