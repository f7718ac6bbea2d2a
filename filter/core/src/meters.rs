//! Names and labels of the filter's metrics.
//!
//! Every label value is a constant, a status code, or a model of the snapshot, so the label set
//! is bounded. A metric is named `NAME{label=value,…}`; the proxy's stats tags turn that into
//! Prometheus labels.

use std::rc::Rc;

/// A counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Meter {
    /// Requests that ended with an engine's answer below 400.
    RequestSuccess,
    /// Requests that ended otherwise; `status` names the reason.
    RequestFail,
    /// Prefill legs that succeeded.
    PrefillSuccess,
    /// Prefill legs that failed.
    PrefillFail,
    /// Prefill failures by class and by what the client had seen.
    PrefillFailure,
    /// Prefill legs sent again to another roleset.
    PrefillRetry,
    /// Prefill answers whose KV reference could not be passed on.
    HandOverUnusable,
    /// Requests whose decode leg could not take the KV.
    PairFailure,
    /// Pods and pairs that were ejected.
    Ejection,
    /// Prefill legs whose client left; `result` says how they ended.
    Orphan,
    /// Timers that ended a request.
    Watchdog,
    /// Calls that tell a pod to drop a request; `prefill_failure_class` says why, `result` how it
    /// went.
    Abort,
    /// Charges given back because they outlived their time to live.
    ChargeExpired,
    /// Requests whose session key was too long to be looked at.
    SessionKeyTooLong,
    /// Requests that were under way in a VM that died.
    Lost,
}

impl Meter {
    /// Metric name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestSuccess => "gateway_request_model_success_total",
            Self::RequestFail => "gateway_request_model_fail_total",
            Self::PrefillSuccess => "gateway_prefill_request_success_total",
            Self::PrefillFail => "gateway_prefill_request_fail_total",
            Self::PrefillFailure => "gateway_pd_prefill_failure_total",
            Self::PrefillRetry => "gateway_pd_prefill_retry_total",
            Self::HandOverUnusable => "gateway_pd_hand_over_unusable_total",
            Self::PairFailure => "gateway_pd_pair_failure_total",
            Self::Ejection => "gateway_pd_ejection_total",
            Self::Orphan => "gateway_pd_orphan_total",
            Self::Watchdog => "gateway_pd_decode_watchdog_total",
            Self::Abort => "gateway_pd_decode_abort_total",
            Self::ChargeExpired => "gateway_pd_charge_expired_total",
            Self::SessionKeyTooLong => "gateway_pd_session_key_too_long_total",
            Self::Lost => "gateway_pd_lost_request_total",
        }
    }
}

/// A gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gauge {
    /// Seconds since the topology held was pushed.
    TopologyAge,
    /// Seconds since the samples held were pushed.
    SamplesAge,
}

impl Gauge {
    /// Metric name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TopologyAge => "pd_topology_age_seconds",
            Self::SamplesAge => "pd_samples_age_seconds",
        }
    }
}

/// Value of a label beside the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Label {
    /// One of our own words.
    Word(&'static str, &'static str),
    /// An HTTP status.
    Code(&'static str, u16),
}

/// One increment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Count {
    /// Which counter.
    pub meter: Meter,
    /// Model of the snapshot; `None` for requests whose model is not known.
    pub model: Option<Rc<str>>,
    /// Further labels.
    pub labels: [Option<Label>; 2],
}

impl Count {
    /// An increment without further labels.
    #[must_use]
    pub fn new(meter: Meter, model: Option<Rc<str>>) -> Self {
        Self {
            meter,
            model,
            labels: [None, None],
        }
    }

    /// With a word label.
    #[must_use]
    pub fn word(mut self, name: &'static str, value: &'static str) -> Self {
        self.add(Label::Word(name, value));
        self
    }

    /// With a `status_code` label.
    #[must_use]
    pub fn code(mut self, status: u16) -> Self {
        self.add(Label::Code("status_code", status));
        self
    }

    fn add(&mut self, label: Label) {
        if let Some(free) = self.labels.iter_mut().find(|label| label.is_none()) {
            *free = Some(label);
        }
    }

    /// The host's name of the metric.
    #[must_use]
    pub fn metric(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::with_capacity(96);
        let model = self.model.as_deref().map_or_else(String::new, label_text);
        // Writing into a String cannot fail.
        let _ = write!(text, "{}{{model={model}", self.meter.name());
        for label in self.labels.iter().flatten() {
            let _ = match label {
                Label::Word(name, value) => write!(text, ",{name}={value}"),
                Label::Code(name, value) => write!(text, ",{name}={value}"),
            };
        }
        text.push('}');
        text
    }
}

/// A label value without the characters that the metric's own form uses.
fn label_text(text: &str) -> String {
    text.chars()
        .take(128)
        .map(|c| match c {
            '{' | '}' | ',' | '=' | ' ' => '_',
            c if c.is_ascii_graphic() => c,
            _ => '_',
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_carries_its_labels_in_its_name() {
        let count = Count::new(Meter::RequestFail, Some(Rc::from("a,b{c}")))
            .word("status", "pd_prefill_failure")
            .code(503);
        assert_eq!(
            count.metric(),
            "gateway_request_model_fail_total{model=a_b_c_,status=pd_prefill_failure,status_code=503}"
        );
    }
}
