//! Adaptive buckets: what is noted of a request, and what its band does.

use super::*;
use crate::port::SharedStore as _;
use crate::serve::{Histogram, key, report};
use pd_wire::control::Band;

const ON: &str = r#"{"promptLengthBucketing": true, "bucketServe": true, "bucketServeMode": "rps",
    "allowExplain": true, "decodeLoadImbalanceMinSpread": 1000000,
    "prefillLoadImbalanceMinSpread": 1000000}"#;

/// A request of as many tokens of text, by the estimate of 4 bytes a token; `more` are further
/// members.
fn prompt(tokens: usize, more: &str) -> Vec<u8> {
    format!(
        r#"{{"model":"m","prompt":"{}"{more}}}"#,
        "x".repeat(4 * tokens)
    )
    .into_bytes()
}

impl Stage {
    fn completion(&mut self, body: &[u8]) -> (Flow, Vec<Effect>) {
        let head = Head::read(
            "/v1/completions",
            Endpoint::Completions,
            [("x-pd-explain", b"true".as_slice())].into_iter(),
        );
        let mut flow = Flow::new(head, false, &mut self.scene());
        let effects = self.on(&mut flow, Event::Body(body));
        (flow, effects)
    }

    /// Sends a pair's request to its end; the roleset it went to, and the facts of the choice.
    fn serve(&mut self, tokens: usize) -> (u16, String) {
        let (mut flow, effects) = self.completion(&prompt(tokens, ""));
        let port = call(&effects).address.rsplit(':').next().unwrap();
        let roleset = port.parse::<u16>().unwrap() - 8000;
        let (status, body) = (200, HANDED_OVER);
        self.on(&mut flow, Event::CallReply { status, body });
        let effects = self.on(&mut flow, headers(200, false));
        let dressed = effects.iter().find_map(|effect| match effect {
            Effect::Dress(headers) => Some(headers),
            _ => None,
        });
        let decision = dressed
            .unwrap()
            .iter()
            .find(|(name, _)| *name == "x-pd-decision");
        let decision = decision.unwrap().1.clone();
        let (bytes, end) = (b"{}".as_slice(), true);
        self.on(&mut flow, Event::ResponseChunk { bytes, end });
        self.assert_at_rest();
        (roleset, decision)
    }

    fn tick(&mut self) {
        self.now_ms += 1000;
        self.worker
            .tick(&self.config, &self.store, self.now_ms, true);
    }

    /// Requests in the shared picture.
    fn noted(&mut self) -> Option<f64> {
        let fleet = self.worker.fleet.model("m").unwrap();
        let stored = self.store.get(&key(fleet.slot))?;
        let seen = Histogram::decode(&stored.bytes, crate::prefix::model_hash("m"));
        seen.map(|seen| seen.requests())
    }

    fn bands(&mut self) -> Vec<Band> {
        report::bands(&mut self.worker.fleet, &self.config, &self.store)
    }
}

#[test]
fn lengths_go_to_their_bands_once_they_are_known() {
    let mut stage = Stage::new(2, ON);
    for _ in 0..4 {
        for tokens in [16, 64] {
            let (_, decision) = stage.serve(tokens);
            assert!(!decision.contains("band="), "{decision}");
        }
    }
    assert_eq!((stage.noted(), stage.bands()), (None, Vec::new()));
    stage.tick();
    // 8 requests, a second ago.
    let noted = 8.0 * libm::exp2(-1.0 / 30.0);
    assert!((stage.noted().unwrap() - noted).abs() < 1e-9);
    let band = |roleset: &str, low, high| Band {
        model: "m".into(),
        namespace: "ns".into(),
        roleset: roleset.into(),
        low,
        high,
    };
    assert_eq!(
        stage.bands(),
        [band("r0", 0, Some(17)), band("r1", 18, None)]
    );
    for _ in 0..10 {
        for (tokens, roleset) in [(16, 0), (64, 1), (1, 0), (5000, 1)] {
            let (chosen, decision) = stage.serve(tokens);
            assert_eq!(chosen, roleset, "{tokens}");
            assert!(decision.contains("; band=length;"), "{decision}");
        }
    }
}

#[test]
fn off_nothing_is_noted_stored_or_shown() {
    for config in [
        "",
        r#"{"promptLengthBucketing": true}"#,
        r#"{"bucketServe": true}"#,
    ] {
        let mut stage = Stage::new(2, config);
        for tokens in [16, 64] {
            stage.completion(&prompt(tokens, ""));
        }
        stage.tick();
        let before = stage.store.calls();
        stage.worker.serve.tick(&stage.store, stage.now_ms);
        assert_eq!(stage.store.calls(), before);
        assert!(stage.store.keys().iter().all(|key| !key.contains("serve")));
        assert_eq!(stage.bands(), []);
    }
}

#[test]
fn switched_off_the_bands_are_gone_though_the_record_stays() {
    let mut stage = Stage::new(2, ON);
    for tokens in [16, 64] {
        stage.serve(tokens);
    }
    stage.tick();
    assert_eq!(stage.bands().len(), 2);
    let off = r#"{"promptLengthBucketing": true, "allowExplain": true}"#;
    stage.config = Config::parse(off.as_bytes(), |_| None).unwrap();
    assert_eq!(stage.bands(), []);
    let (_, decision) = stage.serve(16);
    assert!(!decision.contains("band="), "{decision}");
    let before = stage.noted();
    stage.tick();
    assert_eq!(stage.noted(), before);
}

#[test]
fn a_request_is_noted_once_however_often_it_is_tried() {
    let mut stage = Stage::new(3, ON);
    let body = prompt(16, "");
    let (mut flow, _) = stage.completion(&body);
    stage.on(&mut flow, Event::CallFailed);
    let effects = stage.on(&mut flow, Event::Body(&body));
    assert!(has(&effects, |effect| matches!(effect, Effect::Call(_))));
    stage.tick();
    assert!((stage.noted().unwrap() - libm::exp2(-1.0 / 30.0)).abs() < 1e-9);
}

#[test]
fn a_retry_leaves_the_band_of_the_roleset_that_failed() {
    let mut stage = Stage::new(2, ON);
    for tokens in [16, 64] {
        stage.serve(tokens);
    }
    stage.tick();
    let body = prompt(16, "");
    let (mut flow, effects) = stage.completion(&body);
    assert_eq!(call(&effects).address, "10.0.0.1:8000");
    stage.on(&mut flow, Event::CallFailed);
    let effects = stage.on(&mut flow, Event::Body(&body));
    assert_eq!(call(&effects).address, "10.0.0.1:8001");
}

#[test]
fn requests_in_one_leg_and_without_a_prompt_are_not_noted() {
    let mut stage = Stage::new(2, ON);
    let (_, effects) = stage.completion(&prompt(16, r#","n":2"#));
    assert!(!has(&effects, |effect| matches!(effect, Effect::Call(_))));
    stage.completion(&prompt(0, ""));
    stage.tick();
    assert_eq!(stage.noted(), None);
}
