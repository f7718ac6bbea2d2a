//! The ledger gauges: what the filters have charged to each pod, summed over the agent's Envoys.
//!
//! A pod whose work ended shows zero until it was idle for a minute; then its series goes, so that
//! pods which come and go do not pile up. (AIBrix, `token_load` metrics.)

use std::collections::BTreeMap;
use std::time::Duration;

use pd_wire::control::Ledgers;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

/// How long a series without load is shown.
const IDLE: Duration = Duration::from_secs(60);

/// One pod, with the labels the gauges are known by.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct PodLabels {
    namespace: String,
    pod_name: String,
}

/// Active, KV and decode tokens of a pod.
type Tokens = [u64; 3];

/// What was shown of a pod last.
#[derive(Clone, Copy, Debug)]
struct Shown {
    tokens: Tokens,
    /// When it last had load or its load changed.
    touched: Instant,
}

/// The gauges and what they showed before.
#[derive(Debug, Default)]
pub struct TokenLoad {
    families: [Family<PodLabels, Gauge>; 3],
    shown: BTreeMap<PodLabels, Shown>,
}

impl TokenLoad {
    /// Gauges under these names: `pd_token_load_active_tokens`, `pd_token_load_kv_tokens`,
    /// `pd_token_load_decode_tokens`.
    pub fn registered(registry: &mut Registry) -> Self {
        let load = Self::default();
        let registry = registry.sub_registry_with_prefix("pd_token_load");
        let [active, kv, decode] = load.families.clone();
        registry.register(
            "active_tokens",
            "Prompt tokens being computed, summed over the Envoys",
            active,
        );
        registry.register(
            "kv_tokens",
            "Prompt tokens whose KV is held for a decode pod, summed over the Envoys",
            kv,
        );
        registry.register(
            "decode_tokens",
            "Prompt tokens of outstanding decode requests, summed over the Envoys",
            decode,
        );
        load
    }

    /// Shows the ledgers of all Envoys that answered.
    pub fn show(&mut self, ledgers: &[Ledgers], now: Instant) {
        let charged = sums(ledgers);
        for (labels, tokens) in &charged {
            let shown = self.shown.entry(labels.clone()).or_insert(Shown {
                tokens: Tokens::default(),
                touched: now,
            });
            shown.tokens = *tokens;
            shown.touched = now;
        }
        self.shown.retain(|labels, shown| {
            if !charged.contains_key(labels) && shown.tokens != Tokens::default() {
                shown.tokens = Tokens::default();
                shown.touched = now;
            }
            let idle = now.saturating_duration_since(shown.touched) >= IDLE;
            for (family, tokens) in self.families.iter().zip(shown.tokens) {
                if idle {
                    family.remove(labels);
                } else {
                    let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
                    family.get_or_create(labels).set(tokens);
                }
            }
            !idle
        });
    }
}

/// Tokens of every pod with a charge.
fn sums(ledgers: &[Ledgers]) -> BTreeMap<PodLabels, Tokens> {
    let mut sums: BTreeMap<PodLabels, Tokens> = BTreeMap::new();
    let models = ledgers.iter().flat_map(|ledgers| &ledgers.models);
    for pod in models.flat_map(|model| &model.pods) {
        let labels = PodLabels {
            namespace: pod.namespace.clone(),
            pod_name: pod.name.clone(),
        };
        let [active, kv, decode] = sums.entry(labels).or_default();
        *active = active.saturating_add(pod.charged.active_tokens);
        *kv = kv.saturating_add(pod.charged.kv_tokens);
        *decode = decode.saturating_add(pod.charged.decode_tokens);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use pd_wire::control::{Charged, ModelLedger, PodLedger};
    use prometheus_client::encoding::text::encode;

    /// One pod of namespace `n`, with the active and the decode tokens given and 7 KV tokens.
    fn ledgers(pod: &str, active_tokens: u64, decode_tokens: u64) -> Ledgers {
        let charged = Charged {
            active_tokens,
            decode_tokens,
            kv_tokens: 7,
            ..Charged::default()
        };
        let pod = PodLedger {
            namespace: "n".to_owned(),
            name: pod.to_owned(),
            charged,
        };
        let models = vec![ModelLedger {
            model: "m".to_owned(),
            pods: vec![pod],
        }];
        Ledgers {
            models,
            total: charged,
        }
    }

    /// Gauges shown at chosen times.
    struct Stand {
        registry: Registry,
        load: TokenLoad,
        start: Instant,
    }

    impl Stand {
        fn new() -> Self {
            let mut registry = Registry::default();
            Self {
                load: TokenLoad::registered(&mut registry),
                registry,
                start: Instant::now(),
            }
        }

        /// The series after so many seconds, without their common beginning.
        fn series(&mut self, ledgers: &[Ledgers], second: u64) -> Vec<String> {
            let now = self.start + Duration::from_secs(second);
            self.load.show(ledgers, now);
            let mut page = String::new();
            encode(&mut page, &self.registry).unwrap();
            let lines = page
                .lines()
                .filter_map(|line| line.strip_prefix("pd_token_load_"));
            let mut series: Vec<String> = lines.map(str::to_owned).collect();
            series.sort();
            series
        }
    }

    fn expected(pod: &str, tokens: Tokens) -> [String; 3] {
        let [active, kv, decode] = tokens;
        let line =
            |name, value| format!("{name}_tokens{{namespace=\"n\",pod_name=\"{pod}\"}} {value}");
        [
            line("active", active),
            line("decode", decode),
            line("kv", kv),
        ]
    }

    #[test]
    fn the_ledgers_of_several_envoys_are_summed_per_pod() {
        let mut stand = Stand::new();
        let all = [ledgers("p", 10, 1), ledgers("p", 5, 2), ledgers("q", 1, 0)];
        let series = stand.series(&all, 0);
        let mut sums = [expected("p", [15, 14, 3]), expected("q", [1, 7, 0])].concat();
        sums.sort();
        assert_eq!(series, sums);
    }

    #[test]
    fn a_series_goes_after_a_minute_at_zero_and_not_before() {
        let mut stand = Stand::new();
        assert_eq!(
            stand.series(&[ledgers("p", 10, 1)], 0),
            expected("p", [10, 7, 1])
        );
        // Unchanged load is load.
        assert_eq!(
            stand.series(&[ledgers("p", 10, 1)], 300),
            expected("p", [10, 7, 1])
        );
        for second in [301, 302, 360] {
            assert_eq!(stand.series(&[], second), expected("p", [0; 3]), "{second}");
        }
        assert!(stand.series(&[], 361).is_empty());
        assert!(stand.load.shown.is_empty());
        assert_eq!(
            stand.series(&[ledgers("p", 1, 1)], 400),
            expected("p", [1, 7, 1])
        );
    }

    #[test]
    fn load_in_between_begins_the_minute_anew() {
        let mut stand = Stand::new();
        stand.series(&[ledgers("p", 1, 0)], 0);
        stand.series(&[], 10);
        stand.series(&[ledgers("p", 2, 0)], 50);
        assert_eq!(stand.series(&[], 80), expected("p", [0; 3]));
        assert_eq!(stand.series(&[], 139), expected("p", [0; 3]));
        assert!(stand.series(&[], 140).is_empty());
    }

    #[test]
    fn a_read_long_after_the_last_load_still_shows_zero_once() {
        let mut stand = Stand::new();
        stand.series(&[ledgers("p", 1, 0)], 0);
        assert_eq!(stand.series(&[], 3600), expected("p", [0; 3]));
        assert!(stand.series(&[], 3660).is_empty());
    }
}
