//! Tests of the session table.

use super::*;
use crate::testkit::MemoryStore;

const TTL_MS: u64 = 1_800_000;

fn table(max_sessions: u64) -> SessionTable {
    SessionTable::new(max_sessions, TTL_MS)
}

/// One turn; what was known before it.
fn turn(store: &MemoryStore, model: &str, key: u64, tokens: u64, now_ms: u64) -> Option<u64> {
    let table = table(100_000);
    let turn = table.recall(store, model, key, now_ms);
    let before = turn.tokens_before();
    assert!(table.remember(store, turn, tokens, now_ms));
    before
}

#[test]
fn keys_of_1_to_256_bytes_are_looked_at() {
    assert_eq!(SessionKey::read(b""), None);
    let longest = [b'k'; MAX_KEY_BYTES];
    assert_eq!(
        SessionKey::read(&longest),
        Some(SessionKey::Hash(xxh64(&longest, 0)))
    );
    assert_eq!(SessionKey::read(&[b'k'; 257]), Some(SessionKey::TooLong));
    // Opaque: no text, no trimming.
    assert_ne!(SessionKey::read(b"\xff"), SessionKey::read(b" \xff"));
}

#[test]
fn only_a_longer_prompt_than_the_last_is_charged_by_its_growth() {
    assert_eq!(growth(150, Some(100)), Some(50));
    assert_eq!(growth(101, Some(100)), Some(1));
    assert_eq!(growth(100, Some(100)), None);
    assert_eq!(growth(99, Some(100)), None);
    assert_eq!(growth(100, None), None);
}

#[test]
fn the_last_size_is_remembered_also_when_it_shrank() {
    let store = MemoryStore::new();
    let sizes = [100, 150, 150, 20, 60];
    let before = sizes.map(|tokens| turn(&store, "m", 7, tokens, 0));
    assert_eq!(before, [None, Some(100), Some(150), Some(150), Some(20)]);
}

#[test]
fn models_and_keys_are_told_apart() {
    let store = MemoryStore::new();
    turn(&store, "m", 7, 100, 0);
    assert_eq!(turn(&store, "n", 7, 1, 0), None);
    assert_eq!(turn(&store, "m", 8, 2, 0), None);
    assert_eq!(turn(&store, "m", 7, 3, 0), Some(100));
}

#[test]
fn a_session_is_forgotten_when_it_was_idle_for_its_time() {
    let store = MemoryStore::new();
    turn(&store, "m", 7, 100, 5_000);
    let recalled = |now_ms| {
        let turn = table(100_000).recall(&store, "m", 7, now_ms);
        turn.tokens_before()
    };
    assert_eq!(recalled(5_000 + TTL_MS), Some(100));
    assert_eq!(recalled(6_000 + TTL_MS), None);
    // Another turn begins the time anew.
    assert_eq!(turn(&store, "m", 7, 110, 5_000 + TTL_MS), Some(100));
    assert_eq!(recalled(6_000 + TTL_MS), Some(110));
}

#[test]
fn a_turn_is_one_read_and_one_write() {
    let store = MemoryStore::new();
    for round in 1..=3 {
        turn(&store, "m", 7, 100 + round, 0);
        assert_eq!(store.calls(), (round, round));
    }
}

#[test]
fn a_prompt_without_measure_is_remembered_as_the_largest() {
    let store = MemoryStore::new();
    turn(&store, "m", 7, u64::MAX, 0);
    assert_eq!(turn(&store, "m", 7, 1, 0), Some(u64::from(u32::MAX)));
}

#[test]
fn lost_races_are_bounded_and_leave_the_size_before() {
    let store = MemoryStore::new();
    turn(&store, "m", 7, 100, 0);
    let table = table(100_000);
    let key = table.recall(&store, "m", 7, 0).key;
    store.lose_swaps(&key, 2);
    assert_eq!(turn(&store, "m", 7, 200, 0), Some(100));
    store.lose_swaps(&key, 3);
    let lost = table.recall(&store, "m", 7, 0);
    assert!(!table.remember(&store, lost, 300, 0));
    assert_eq!(turn(&store, "m", 7, 400, 0), Some(200));
    store.refuse(true);
    let refused = table.recall(&store, "m", 7, 0);
    let before = store.calls().0;
    assert!(!table.remember(&store, refused, 500, 0));
    assert_eq!(store.calls().0, before, "a refusal is not tried again");
}

#[test]
fn a_race_keeps_what_the_winner_wrote() {
    let store = MemoryStore::new();
    let table = SessionTable::new(1, TTL_MS);
    let wide = SessionTable::new(64, TTL_MS);
    // One bucket: any two sessions meet in it.
    let key = wide.recall(&store, "m", 1, 0).key;
    store.interpose(&key, move |store| {
        let turn = wide.recall(store, "m", 2, 0);
        assert!(wide.remember(store, turn, 22, 0));
    });
    let first = wide.recall(&store, "m", 1, 0);
    assert!(wide.remember(&store, first, 11, 0));
    assert_eq!(wide.recall(&store, "m", 1, 0).tokens_before(), Some(11));
    assert_eq!(wide.recall(&store, "m", 2, 0).tokens_before(), Some(22));
    // The table of one has the same bucket and room for one.
    let third = table.recall(&store, "m", 3, 0);
    assert!(table.remember(&store, third, 33, 0));
    assert_eq!(wide.recall(&store, "m", 2, 0).tokens_before(), None);
    assert_eq!(wide.recall(&store, "m", 3, 0).tokens_before(), Some(33));
}

#[test]
fn the_places_of_all_buckets_are_the_configured_number() {
    for max in [1, 2, 63, 64, 65, 127, 128, 129, 1_000, 100_000, 10_000_000] {
        let table = table(max);
        let ways: usize = (0..table.buckets).map(|bucket| table.ways(bucket)).sum();
        assert_eq!(ways as u64, max);
        assert!((0..table.buckets).all(|bucket| table.ways(bucket) as u64 <= WAYS));
    }
}

/// Sessions still known after `distinct` came, each in its own ms.
fn known_after(max: u64, distinct: u64) -> u64 {
    let store = MemoryStore::new();
    let table = table(max);
    for key in 0..distinct {
        let turn = table.recall(&store, "m", key, key);
        assert!(table.remember(&store, turn, 9, key));
    }
    let known = |key: &u64| {
        let turn = table.recall(&store, "m", *key, distinct);
        turn.tokens_before().is_some()
    };
    (0..distinct).filter(known).count() as u64
}

#[test]
fn twice_as_many_sessions_as_fit_leave_nine_tenths_of_the_places_full_and_no_more() {
    for max in [1, 10, 64, 65, 200, 1_000, 100_000] {
        let known = known_after(max, 2 * max);
        assert!(known <= max, "{known} of {max}");
        assert!(known * 10 >= max * 9, "{known} of {max}");
    }
}

#[test]
fn as_many_sessions_as_fit_lose_less_than_a_tenth() {
    for max in [1, 64, 65, 1_000, 100_000] {
        let known = known_after(max, max);
        assert!(known * 10 >= max * 9, "{known} of {max}");
    }
}

#[test]
fn the_store_grows_with_the_table_alone() {
    let store = MemoryStore::new();
    let table = table(1_000);
    for key in 0..20_000 {
        let turn = table.recall(&store, "m", key, 0);
        assert!(table.remember(&store, turn, 9, 0));
    }
    let keys = store.keys();
    assert_eq!(keys.len() as u64, buckets(1_000));
    let bytes: usize = keys
        .iter()
        .map(|key| store.get(key).unwrap().bytes.len())
        .sum();
    assert_eq!(bytes, 1_000 * 16 + keys.len());
}
