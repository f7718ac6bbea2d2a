//! What was seen of a cell against what must be seen.

use super::engines::Journal;
use super::remains::Records;
use pd_failure_matrix::{Body, Cell, Client, Counter, Expect, Line, Marker, Moment, SOON_MS};
use pd_wasm_tests::{CallRecord, Ending, Meters, Outcome};

/// A cell whose time is over.
pub(super) struct Run<'r> {
    pub(super) cell: &'r Cell,
    pub(super) outcome: Outcome,
    pub(super) journal: &'r Journal,
    pub(super) calls: &'r [CallRecord],
    /// When its model was last seen with a charge.
    pub(super) charged_until: Option<u64>,
    pub(super) meters: &'r Meters,
    pub(super) sent_at: u64,
}

// === impl Run ===

impl Run<'_> {
    /// The cell's line of the report.
    pub(super) fn line(&self) -> Line {
        let expect = &self.cell.expect;
        let mut wrong = Vec::new();
        self.client(expect, &mut wrong);
        self.time(expect, &mut wrong);
        self.ending(expect, &mut wrong);
        for counter in &expect.counters {
            let number = self.sum(counter.name, &counter.labels);
            if !counter.count.holds(number) {
                wrong.push(counted(counter, number));
            }
        }
        let soon = self.outcome.ended_at_ms + SOON_MS;
        if let Some(at) = self.charged_until.filter(|at| *at > soon) {
            wrong.push(format!("still charged at {at} ms"));
        }
        let records = Records {
            cell: self.cell,
            journal: self.journal,
            calls: self.calls,
            outcome: &self.outcome,
        };
        let remains = records.remains();
        wrong.extend(remains.wrong);
        Line {
            seen: self.seen(),
            ms: self.outcome.ended_at_ms.saturating_sub(self.sent_at),
            left: remains.told,
            wrong,
        }
    }

    fn seen(&self) -> String {
        match (self.outcome.ending, self.outcome.status) {
            (Ending::Complete, Some(200)) => "200".to_owned(),
            (Ending::Complete, Some(status)) => {
                let marker = match self.marker() {
                    Marker::Prefill => " prefill",
                    Marker::Decode => " decode",
                    Marker::None => "",
                };
                let error = self.error();
                let code = match error["code"].as_str() {
                    Some(code) => code.to_owned(),
                    None => "engine's".to_owned(),
                };
                format!("{status}{marker} ({code})")
            }
            (Ending::Reset, _) => "cut".to_owned(),
            (Ending::Disconnected, _) => "left".to_owned(),
            (ending, status) => format!("{ending:?} {status:?}"),
        }
    }

    fn marker(&self) -> Marker {
        let has = |marker: Marker| {
            let header = marker.header();
            header.is_some_and(|name| self.outcome.header(name) == Some("true"))
        };
        match (has(Marker::Prefill), has(Marker::Decode)) {
            (true, false) => Marker::Prefill,
            (false, true) => Marker::Decode,
            _ => Marker::None,
        }
    }

    /// The error object of the answer; null when there is none.
    fn error(&self) -> serde_json::Value {
        let body: Result<serde_json::Value, _> = serde_json::from_slice(&self.outcome.body());
        body.map(|body| body["error"].clone()).unwrap_or_default()
    }

    fn client(&self, expect: &Expect, wrong: &mut Vec<String>) {
        let (seen, expected) = (self.seen(), expect.client.describe());
        if seen != expected {
            wrong.push(format!("{seen} instead of {expected}"));
            return;
        }
        match expect.client {
            Client::Error { body, .. } => self.error_body(body, wrong),
            Client::Healthy => {
                let text = self.outcome.text();
                let whole = if self.cell.stream {
                    text.ends_with("data: [DONE]\n\n")
                } else {
                    serde_json::from_str::<serde_json::Value>(&text).is_ok()
                };
                if !whole || self.marker() != Marker::None {
                    wrong.push(format!("no whole answer: {text}"));
                }
            }
            Client::Cut | Client::Left => {}
        }
    }

    fn error_body(&self, body: Body, wrong: &mut Vec<String>) {
        let error = self.error();
        let message = error["message"].as_str().unwrap_or_default();
        let right = match body {
            Body::Engine => message == "engine says no",
            Body::Gateway { code, says } => {
                !message.is_empty() && message.contains(says) && error["code"] == code
            }
        };
        let json = self.outcome.header("content-type") == Some("application/json");
        if !right || !json || self.outcome.header("request-id").is_none() {
            let headers = &self.outcome.headers;
            wrong.push(format!("not the error expected: {error} {headers:?}"));
        }
    }

    fn time(&self, expect: &Expect, wrong: &mut Vec<String>) {
        if expect.client == Client::Left {
            return;
        }
        let due = expect.due;
        let ms = self.outcome.ended_at_ms.saturating_sub(self.sent_at);
        if self.outcome.ending == Ending::Open || ms < due.from_ms || ms > due.to_ms {
            wrong.push(format!(
                "{ms} ms is not from {} to {}",
                due.from_ms, due.to_ms
            ));
        }
    }

    fn ending(&self, expect: &Expect, wrong: &mut Vec<String>) {
        let all = [
            "gateway_request_model_success_total",
            "gateway_request_model_fail_total",
        ];
        let endings: u64 = all.iter().map(|name| self.sum(name, &[])).sum();
        if endings != 1 && self.cell.moment != Moment::Uploading {
            wrong.push(format!("{endings} endings"));
        }
        let mut labels = vec![("status", expect.ending.status.to_owned())];
        labels.extend(
            expect
                .ending
                .code
                .map(|code| ("status_code", code.to_string())),
        );
        if self.sum(expect.ending.counter(), &labels) != endings {
            let own = format!("{{model={},", self.cell.model());
            let names = self.meters.names().into_iter();
            let names: Vec<_> = names
                .filter(|name| name.contains(&own) && name.starts_with("gateway_request_model_"))
                .collect();
            wrong.push(format!("another ending than {labels:?}: {names:?}"));
        }
    }

    /// Sum of a counter of the cell's model over the samples with these labels.
    fn sum(&self, name: &str, labels: &[(&'static str, String)]) -> u64 {
        let names = self.meters.names().into_iter();
        let has = |full: &str| {
            let Some((metric, rest)) = full.split_once('{') else {
                return false;
            };
            let given: Vec<&str> = rest.trim_end_matches('}').split(',').collect();
            let model = format!("model={}", self.cell.model());
            metric == name
                && given.contains(&model.as_str())
                && labels
                    .iter()
                    .all(|(label, value)| given.contains(&format!("{label}={value}").as_str()))
        };
        names
            .filter(|full| has(full))
            .map(|full| self.meters.counter(&full))
            .sum()
    }
}

fn counted(counter: &Counter, number: u64) -> String {
    let (name, labels, count) = (counter.name, &counter.labels, counter.count);
    format!("{name}{labels:?} is {number}, not {count:?}")
}
