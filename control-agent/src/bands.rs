//! The bands of adaptive buckets, as gauges: what every Envoy's filter says of itself.

use pd_wire::control::Status;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// One end of one band. Envoys have seen different traffic, so each has its own bands.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BandLabels {
    target: String,
    model: String,
    namespace: String,
    roleset: String,
    /// Number among the roleset's bands, shortest lengths first.
    band: u32,
    /// `low` or `high`.
    bound: &'static str,
}

/// Gauges of all bands.
#[derive(Debug, Default)]
pub struct BandGauges {
    bounds: Family<BandLabels, Gauge>,
}

impl BandGauges {
    /// Gauges that `registry` shows.
    pub fn registered(registry: &mut Registry) -> Self {
        let gauges = Self::default();
        registry.register(
            "pd_bucket_band",
            "Prompt lengths in tokens, both ends inclusive, for which adaptive buckets prefer a \
             roleset; no high bound = no limit",
            gauges.bounds.clone(),
        );
        gauges
    }

    /// Shows the bands of these Envoys and no others.
    pub fn show(&self, statuses: &[(String, Status)]) {
        self.bounds.clear();
        for (target, status) in statuses {
            for (at, band) in status.bands.iter().enumerate() {
                let before = status.bands.iter().take(at).filter(|other| {
                    (&other.model, &other.namespace, &other.roleset)
                        == (&band.model, &band.namespace, &band.roleset)
                });
                let number = u32::try_from(before.count()).unwrap_or(u32::MAX);
                for (bound, tokens) in [("low", Some(band.low)), ("high", band.high)] {
                    let Some(tokens) = tokens else { continue };
                    let labels = BandLabels {
                        target: target.clone(),
                        model: band.model.clone(),
                        namespace: band.namespace.clone(),
                        roleset: band.roleset.clone(),
                        band: number,
                        bound,
                    };
                    let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
                    self.bounds.get_or_create(&labels).set(tokens);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pd_wire::control::Band;
    use prometheus_client::encoding::text;

    fn page(registry: &Registry) -> Vec<String> {
        let mut page = String::new();
        text::encode(&mut page, registry).unwrap();
        let mut lines: Vec<String> = page
            .lines()
            .filter(|line| line.starts_with("pd_bucket_band{"))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    }

    #[test]
    fn every_bound_is_a_gauge_until_it_is_gone() {
        let band = |roleset: &str, low, high| Band {
            model: "m".to_owned(),
            namespace: "n".to_owned(),
            roleset: roleset.to_owned(),
            low,
            high,
        };
        let status = |bands| Status {
            bands,
            ..Status::default()
        };
        let mut registry = Registry::default();
        let gauges = BandGauges::registered(&mut registry);
        let of_one = status(vec![
            band("a", 0, Some(99)),
            band("b", 100, Some(999)),
            band("a", 1000, None),
        ]);
        let statuses = [
            ("h:1".to_owned(), of_one),
            ("h:2".to_owned(), status(vec![])),
        ];
        gauges.show(&statuses);
        let line = |roleset: &str, number: u32, bound: &str, tokens: u64| {
            format!(
                "pd_bucket_band{{target=\"h:1\",model=\"m\",namespace=\"n\",roleset=\"{roleset}\",\
                 band=\"{number}\",bound=\"{bound}\"}} {tokens}"
            )
        };
        assert_eq!(
            page(&registry),
            [
                line("a", 0, "high", 99),
                line("a", 0, "low", 0),
                line("a", 1, "low", 1000),
                line("b", 0, "high", 999),
                line("b", 0, "low", 100),
            ]
        );
        gauges.show(&statuses[1..]);
        assert_eq!(page(&registry), Vec::<String>::new());
    }
}
