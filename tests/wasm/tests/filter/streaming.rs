//! Streams: what precedes the first content is held, nothing else is.

use crate::stand::{
    DONE, ERROR, ROLE, TOKEN, assert_quiet, chat, decoding, endings, freed, one_pair, prefilled,
    stream_headers,
};
use pd_wasm_tests::{Ending, Gateway, Outcome, Script};

/// Text of each piece the client got.
fn pieces(outcome: &Outcome) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    outcome
        .chunks
        .iter()
        .map(|chunk| text(&chunk.bytes))
        .collect()
}

#[test]
fn content_passes_chunk_by_chunk_while_the_engine_still_generates() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, ROLE.as_bytes(), false);
    assert_eq!(gateway.outcome(flight).status, None);
    gateway.advance(300);
    gateway.respond_data(flight, TOKEN.as_bytes(), false);
    let first = gateway.outcome(flight);
    assert_eq!(
        (first.status, first.text()),
        (Some(200), format!("{ROLE}{TOKEN}"))
    );
    for (sent, split) in (2..6).zip([1, 3, 40, TOKEN.len() - 1]) {
        gateway.advance(10);
        let (one, two) = TOKEN.split_at(split);
        gateway.respond_data(flight, one.as_bytes(), false);
        gateway.respond_data(flight, two.as_bytes(), false);
        let got = gateway.outcome(flight);
        assert_eq!(got.text(), format!("{ROLE}{}", TOKEN.repeat(sent)));
        assert_eq!(pieces(&got)[got.chunks.len() - 2..], [one, two]);
        assert_eq!(got.chunks.last().unwrap().at_ms, gateway.now_ms());
    }
    gateway.respond_data(flight, DONE.as_bytes(), true);
    gateway.outcome(flight).expect(200);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn an_error_before_the_first_content_is_a_502_however_it_is_cut() {
    let text = format!("{ROLE}{ERROR}");
    for size in [1, 2, 17, text.len()] {
        let mut gateway = one_pair("");
        let flight = decoding(&mut gateway, chat(true));
        stream_headers(&mut gateway, flight);
        for piece in text.as_bytes().chunks(size) {
            gateway.respond_data(flight, piece, false);
        }
        let outcome = gateway.outcome(flight);
        outcome.expect(502);
        assert_eq!(outcome.header("x-error-pd-decode"), Some("true"));
        assert_eq!(outcome.header("content-type"), Some("application/json"));
        assert!(outcome.json()["error"]["message"].is_string());
        assert!(!outcome.text().contains("KV pull failed"));
        assert!(outcome.upstream().cut);
        assert_eq!(endings(&mut gateway), 1);
        assert_eq!(
            crate::stand::total(&mut gateway, "gateway_pd_pair_failure_total"),
            1
        );
        freed(&mut gateway);
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn an_error_alone_is_a_502_and_one_after_content_passes() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, ERROR.as_bytes(), true);
    gateway.outcome(flight).expect(502);
    freed(&mut gateway);

    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    gateway.respond_data(flight, format!("{ERROR}{DONE}").as_bytes(), true);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        outcome.expect(200).text(),
        format!("{ROLE}{TOKEN}{ERROR}{DONE}")
    );
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_stream_that_ends_while_held_arrives_whole() {
    let mut gateway = one_pair("");
    for text in ["", ROLE, ": ping\n\n", "data: {\"choices\":[]"] {
        let flight = decoding(&mut gateway, chat(true));
        stream_headers(&mut gateway, flight);
        if !text.is_empty() {
            gateway.respond_data(flight, text.as_bytes(), false);
        }
        gateway.respond_data(flight, b"", true);
        assert_eq!(gateway.outcome(flight).expect(200).text(), text);
    }
    assert_quiet(&mut gateway, 1);
}

#[test]
fn at_most_64_kilobytes_are_held() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    let comment = format!(":{}\n", "x".repeat(1022));
    for _ in 0..64 {
        gateway.respond_data(flight, comment.as_bytes(), false);
        assert_eq!(gateway.outcome(flight).status, None);
    }
    gateway.respond_data(flight, comment.as_bytes(), false);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        (outcome.status, outcome.body().len()),
        (Some(200), 65 << 10)
    );
    gateway.disconnect(flight);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_break_while_held_is_a_503_and_later_a_cut() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    gateway.respond_reset(flight);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        outcome.expect(503).header("x-error-pd-decode"),
        Some("true")
    );
    assert!(outcome.json()["error"]["message"].is_string());
    freed(&mut gateway);

    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    gateway.respond_reset(flight);
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    assert_eq!(endings(&mut gateway), 2);
    assert_quiet(&mut gateway, 1);
}

/// A decode engine that refuses connections, and one that answers an error itself.
#[test]
fn an_unreachable_decode_pod_is_our_503_and_an_engines_own_error_passes() {
    let refused = |script: fn() -> Script| -> (Gateway, Outcome) {
        let mut gateway = one_pair("");
        gateway.other_engines(move |sent| {
            if sent.cluster.is_some() {
                prefilled()
            } else {
                script()
            }
        });
        let outcome = gateway.run(chat(true));
        (gateway, outcome)
    };
    let (mut gateway, outcome) = refused(Script::refuse);
    assert_eq!(
        outcome.expect(503).header("x-error-pd-decode"),
        Some("true")
    );
    assert_eq!(outcome.header("content-type"), Some("application/json"));
    assert!(outcome.json()["error"]["message"].is_string());
    assert_quiet(&mut gateway, 1);
    for status in [400, 404, 429, 500, 503] {
        let mut gateway = one_pair("");
        gateway.other_engines(move |sent| {
            if sent.cluster.is_some() {
                prefilled()
            } else {
                crate::stand::engine_error(status)
            }
        });
        let outcome = gateway.run(chat(true));
        assert_eq!(outcome.expect(status).header("x-error-pd-decode"), None);
        assert_eq!(outcome.json()["error"]["message"], "engine says no");
        assert_eq!(outcome.header("target-pod"), Some("r0-d"));
        assert_quiet(&mut gateway, 1);
        assert_eq!(endings(&mut gateway), 1);
    }
}
