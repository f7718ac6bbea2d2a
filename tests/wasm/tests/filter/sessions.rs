//! Sessions over several workers: growth alone is charged, whichever worker a turn comes to.

use crate::stand::{
    P0, assert_quiet, bare, finish, ledgers_at, prefill_ok, status_at, target, total,
};
use pd_wasm_tests::{Exchange, Gateway};
use pd_wire::control::Ledgers;
use pd_wire::names;

const TOKEN_LOAD: &str = r#"{"prefillScorePolicy":"token_load"}"#;
const COST: u64 = 3500;

/// A chat request of so many prompt tokens as they are charged (body bytes / 4).
fn chat(tokens: usize) -> Exchange {
    let head = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":""#;
    let tail = r#""}]}"#;
    let fill = "x".repeat(tokens * 4 - head.len() - tail.len());
    Exchange::post("/v1/chat/completions", format!("{head}{fill}{tail}"))
        .header("content-type", "application/json")
}

/// Serves a request to its end; what its prefill pod was charged without the fixed cost.
fn turn(gateway: &mut Gateway, worker: usize, exchange: Exchange, tokens: usize) -> u64 {
    let flight = gateway.send(exchange.worker(worker));
    let held = ledgers_at(gateway, worker).total;
    assert_eq!(held.active_tokens, held.kv_tokens);
    assert_eq!(held.decode_tokens, tokens as u64);
    prefill_ok(gateway);
    finish(gateway, flight);
    gateway.outcome(flight).expect(200);
    assert_eq!(ledgers_at(gateway, worker), Ledgers::default());
    held.kv_tokens - COST
}

/// A turn of session `key` on a worker.
fn keyed(gateway: &mut Gateway, worker: usize, key: &str, tokens: usize) -> u64 {
    let exchange = chat(tokens).header(names::HEADER_SESSION_KEY, key);
    turn(gateway, worker, exchange, tokens)
}

#[test]
fn a_turn_on_another_worker_is_charged_its_growth() {
    let mut gateway = bare(2, TOKEN_LOAD);
    assert_eq!(keyed(&mut gateway, 0, "a", 100), 100);
    assert_eq!(keyed(&mut gateway, 1, "a", 140), 40);
    assert_eq!(keyed(&mut gateway, 0, "a", 141), 1);
    assert_eq!(keyed(&mut gateway, 1, "a", 141), 141, "no growth");
    assert_eq!(keyed(&mut gateway, 1, "b", 150), 150, "another session");
    // A session outlives the VM that wrote it.
    gateway.reload_vm(1).unwrap();
    assert_eq!(keyed(&mut gateway, 1, "a", 160), 19);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn a_conversation_weighs_its_growth_in_the_next_choice() {
    let mut gateway = bare(2, r#"{"prefillScorePolicy":"token_load","tieSeed":1}"#);
    assert_eq!(keyed(&mut gateway, 0, "a", 9_000), 9_000);
    // 3500 + 100 on one pod, 3500 + 1000 on the other: the next goes to the first.
    let conversation = gateway.send(chat(9_100).worker(1).header(names::HEADER_SESSION_KEY, "a"));
    let first = target(&crate::stand::last_pending(&gateway));
    let other = gateway.send(chat(1_000));
    let second = target(&crate::stand::last_pending(&gateway));
    assert_ne!(first, second);
    let third = gateway.send(chat(50).worker(1));
    assert_eq!(target(&crate::stand::last_pending(&gateway)), first);
    assert!([first, second].iter().any(|address| address == P0));
    let held: Vec<u64> = ledgers_at(&mut gateway, 1).models[0]
        .pods
        .iter()
        .map(|pod| pod.charged.active_tokens)
        .filter(|tokens| *tokens > 0)
        .collect();
    assert_eq!(held.iter().sum::<u64>(), 3 * COST + 100 + 1_000 + 50);
    for flight in [third, other, conversation] {
        prefill_ok(&mut gateway);
        finish(&mut gateway, flight);
    }
    assert_quiet(&mut gateway, 2);
}

#[test]
fn no_key_too_long_a_key_or_rule_off_is_charged_whole() {
    let long = "k".repeat(257);
    let off = r#"{"prefillScorePolicy":"token_load","tokenLoadSessionTTLSeconds":0}"#;
    let by_count = r#"{"prefillScorePolicy":"least_request"}"#;
    for (config, key, ignored) in [
        (TOKEN_LOAD, None, 0),
        (TOKEN_LOAD, Some(long.as_str()), 2),
        (off, Some("a"), 0),
        (by_count, Some("a"), 0),
    ] {
        let mut gateway = bare(1, config);
        for tokens in [100, 200] {
            let exchange = chat(tokens);
            let exchange = match key {
                Some(key) => exchange.header(names::HEADER_SESSION_KEY, key),
                None => exchange,
            };
            let whole = turn(&mut gateway, 0, exchange, tokens);
            assert_eq!(whole, tokens as u64, "{config} {key:?}");
        }
        let counted = total(&mut gateway, "gateway_pd_session_key_too_long_total");
        assert_eq!(counted, ignored);
        let keys = gateway.shared().keys(names::VM_ID);
        assert!(!keys.iter().any(|key| key.contains(".session")), "{keys:?}");
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn the_live_vm_with_the_lowest_slot_counts_once_a_minute() {
    let mut gateway = bare(
        2,
        r#"{"prefillScorePolicy":"token_load","tokenLoadSessionTTLSeconds":90,"tokenLoadMaxSessions":100}"#,
    );
    for session in 0..5 {
        keyed(&mut gateway, session % 2, &format!("s{session}"), 100);
    }
    gateway.advance(61_000);
    for worker in 0..2 {
        assert_eq!(status_at(&mut gateway, worker).sessions, 5);
    }
    // The janitor dies; the other VM goes on with its own rounds.
    gateway.kill_vm(0);
    keyed(&mut gateway, 1, "s0", 200);
    gateway.advance(65_000);
    assert_eq!(status_at(&mut gateway, 1).sessions, 1);
    gateway.advance(125_000);
    assert_eq!(status_at(&mut gateway, 1).sessions, 0);
}

#[test]
fn sessions_that_lose_every_race_are_served_and_charged() {
    let mut gateway = bare(2, TOKEN_LOAD);
    assert_eq!(keyed(&mut gateway, 0, "a", 100), 100);
    gateway.shared().race_next_writes(100);
    let flight = gateway.send(chat(150).header(names::HEADER_SESSION_KEY, "a"));
    gateway.shared().race_next_writes(0);
    prefill_ok(&mut gateway);
    finish(&mut gateway, flight);
    gateway.outcome(flight).expect(200);
    assert_quiet(&mut gateway, 2);
    // The size of the turn before was never written.
    assert_eq!(keyed(&mut gateway, 1, "a", 160), 60);
    assert_quiet(&mut gateway, 2);
}
