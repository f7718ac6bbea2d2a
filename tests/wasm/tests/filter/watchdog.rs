//! Timers on a driven clock.

use crate::stand::{
    ROLE, TOKEN, assert_quiet, charged, chat, counter, decoding, endings, freed, logged, one_pair,
    stream_headers,
};
use pd_wasm_tests::{Ending, Flight, Gateway};

const BACKSTOP_MS: u64 = 900_000;
const CUT: &str = "pd_decode_watchdog";

/// Moves time to just before, and then over, the backstop.
fn over_the_backstop(gateway: &mut Gateway, flight: Flight) {
    gateway.advance(BACKSTOP_MS - 500);
    assert_eq!(gateway.outcome(flight).ending, Ending::Open);
    gateway.advance(700);
}

fn counted(gateway: &mut Gateway) -> bool {
    let names = gateway.meters().names();
    names
        .iter()
        .any(|name| name.contains(CUT) && counter(gateway, name) == 1)
}

#[test]
fn a_decode_pod_that_never_answers_is_a_504_after_15_minutes() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    over_the_backstop(&mut gateway, flight);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        outcome.expect(504).header("x-error-pd-decode"),
        Some("true")
    );
    assert!(
        outcome.json()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("900")
    );
    assert!(outcome.upstream().cut);
    assert!(counted(&mut gateway));
    assert_eq!(endings(&mut gateway), 1);
    freed(&mut gateway);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_held_stream_that_falls_silent_is_still_a_504() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, ROLE.as_bytes(), false);
    over_the_backstop(&mut gateway, flight);
    let outcome = gateway.outcome(flight);
    assert_eq!(
        outcome.expect(504).header("x-error-pd-decode"),
        Some("true")
    );
    assert_eq!(endings(&mut gateway), 1);
    freed(&mut gateway);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_started_stream_that_falls_silent_is_cut() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    over_the_backstop(&mut gateway, flight);
    assert_eq!(gateway.outcome(flight).ending, Ending::Reset);
    assert!(counted(&mut gateway));
    assert_eq!(endings(&mut gateway), 1);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_stream_that_goes_on_for_an_hour_is_never_cut_and_its_charge_stays() {
    let mut gateway = one_pair(r#"{"tokenLoadTTLSeconds":36000}"#);
    let flight = decoding(&mut gateway, chat(true));
    stream_headers(&mut gateway, flight);
    gateway.respond_data(flight, format!("{ROLE}{TOKEN}").as_bytes(), false);
    for _ in 0..6 {
        gateway.advance(600_000);
        gateway.respond_data(flight, TOKEN.as_bytes(), false);
        assert_eq!(gateway.outcome(flight).ending, Ending::Open);
        assert_eq!(charged(&mut gateway).decode_running, 1);
    }
    gateway.respond_data(flight, b"", true);
    gateway.outcome(flight).expect(200);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn the_backstop_is_a_setting() {
    let mut gateway = one_pair(r#"{"streamIdleBackstop":2}"#);
    let flight = decoding(&mut gateway, chat(false));
    gateway.advance(2200);
    gateway.outcome(flight).expect(504);
    freed(&mut gateway);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_leaked_charge_would_be_given_back_by_force_after_its_time_to_live() {
    let mut gateway = one_pair(r#"{"tokenLoadTTLSeconds":100}"#);
    let flight = decoding(&mut gateway, chat(true));
    gateway.advance(100_000 + 61_000);
    assert_eq!(charged(&mut gateway), Default::default());
    assert_eq!(
        crate::stand::total(&mut gateway, "gateway_pd_charge_expired_total"),
        1
    );
    let told = "given back by force: a charge of model m, held for ";
    assert!(logged(&gateway, told) && logged(&gateway, "at decode pod ns/r0-d"));
    // What ends later gives nothing back twice.
    gateway.disconnect(flight);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn a_step_of_the_wall_clock_ends_nothing() {
    let mut gateway = one_pair("");
    let flight = decoding(&mut gateway, chat(true));
    for step in [-7_200_000, 86_400_000] {
        gateway.step_wall_clock(step);
        gateway.advance(1000);
        assert_eq!(gateway.outcome(flight).ending, Ending::Open);
        assert_eq!(charged(&mut gateway).decode_running, 1);
    }
}
