//! Adaptive buckets: several workers, one picture of prompt lengths.

use crate::stand::{bare, decoding, finish, healthy, status_at};
use pd_wasm_tests::{Exchange, Gateway, Outcome};
use pd_wire::control::Band;
use pd_wire::names;

const ON: &str = r#"{"promptLengthBucketing":true,"bucketServe":true,"bucketServeMode":"rps","allowExplain":true}"#;

/// A prompt of as many tokens of text, by the estimate of 4 bytes a token.
fn prompt(tokens: usize, worker: usize) -> Exchange {
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(4 * tokens));
    Exchange::post("/v1/completions", body)
        .header(names::HEADER_EXPLAIN, "true")
        .worker(worker)
}

fn band(roleset: &str, low: u64, high: Option<u64>) -> Band {
    Band {
        model: "m".into(),
        namespace: "ns".into(),
        roleset: roleset.into(),
        low,
        high,
    }
}

fn prefill_pod(outcome: &Outcome) -> String {
    outcome
        .headers
        .text("prefill-target-pod")
        .unwrap()
        .to_owned()
}

fn serve_records(gateway: &Gateway) -> Vec<String> {
    let mut keys = gateway.shared().keys(names::VM_ID);
    keys.retain(|key| key.contains(".serve."));
    keys
}

#[test]
fn what_one_worker_sees_bands_the_requests_of_another() {
    let mut gateway = healthy(2, ON);
    // Short prompts at one worker, long ones at the other: neither can divide them alone.
    for _ in 0..5 {
        gateway.run(prompt(16, 0)).expect(200);
        gateway.run(prompt(64, 1)).expect(200);
    }
    gateway.advance(2500);
    let expected = [band("r0", 0, Some(17)), band("r1", 18, None)];
    for worker in 0..2 {
        assert_eq!(status_at(&mut gateway, worker).bands, expected);
    }
    assert_eq!(serve_records(&gateway), ["pd1.serve.0"]);
    for worker in 0..2 {
        for (tokens, pod) in [(16, "r0-p"), (64, "r1-p"), (2, "r0-p"), (5000, "r1-p")] {
            let outcome = gateway.run(prompt(tokens, worker));
            outcome.expect(200);
            assert_eq!(prefill_pod(&outcome), pod, "{tokens} at {worker}");
            let decision = outcome.headers.text(names::HEADER_DECISION).unwrap();
            assert!(decision.contains("; band=length;"), "{decision}");
        }
    }
}

#[test]
fn a_worker_that_is_loaded_again_finds_the_picture() {
    let mut gateway = healthy(2, ON);
    for tokens in [16, 64] {
        gateway.run(prompt(tokens, 0)).expect(200);
    }
    gateway.advance(1100);
    gateway.reload_vm(0).unwrap();
    // The first request makes the new VM look at its next tick.
    gateway.run(prompt(16, 0)).expect(200);
    gateway.advance(200);
    let outcome = gateway.run(prompt(64, 0));
    assert_eq!(prefill_pod(outcome.expect(200)), "r1-p");
}

#[test]
fn a_dead_worker_takes_its_last_second_with_it_and_no_more() {
    let lost = [band("r0", 0, Some(17)), band("r1", 18, None)];
    // One short prompt and 21 long ones: their bin, 64 to 69, is too heavy for either.
    let kept = [band("r0", 0, Some(63)), band("r1", 70, None)];
    for (more_ms, expected) in [(0, lost), (1000, kept)] {
        let mut gateway = healthy(2, ON);
        for tokens in [16, 64] {
            gateway.run(prompt(tokens, 1)).expect(200);
        }
        gateway.advance(1200);
        for _ in 0..20 {
            gateway.run(prompt(64, 1)).expect(200);
        }
        gateway.advance(more_ms);
        gateway.kill_vm(1);
        gateway.advance(2000);
        assert_eq!(status_at(&mut gateway, 0).bands, expected);
    }
}

#[test]
fn a_pair_whose_band_is_gone_is_no_reason_to_refuse() {
    let mut gateway = bare(1, ON);
    for tokens in [16, 64] {
        let flight = decoding(&mut gateway, prompt(tokens, 0));
        finish(&mut gateway, flight);
    }
    gateway.advance(1200);
    let pods = &crate::stand::two_pairs()[..2];
    crate::stand::push(&mut gateway, &crate::stand::topology(2, pods)).expect(200);
    assert_eq!(status_at(&mut gateway, 0).bands, []);
    let flight = decoding(&mut gateway, prompt(64, 0));
    finish(&mut gateway, flight);
    gateway.outcome(flight).expect(200);
}

#[test]
fn off_nothing_is_stored_or_shown() {
    for config in [
        "",
        r#"{"promptLengthBucketing":true}"#,
        r#"{"bucketServe":true}"#,
    ] {
        let mut gateway = healthy(2, config);
        for tokens in [16, 64] {
            gateway.run(prompt(tokens, 0)).expect(200);
        }
        gateway.advance(3000);
        assert_eq!(serve_records(&gateway), Vec::<String>::new());
        assert_eq!(status_at(&mut gateway, 0).bands, []);
    }
}
