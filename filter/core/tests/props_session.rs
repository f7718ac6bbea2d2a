//! Properties of the session table: a turn is measured against a size its own session had, the
//! latest one unless a write was lost, and the table never outgrows its bound.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// Helpers of tests, which clippy only knows by their attribute.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

use pd_core::port::SharedStore;
use pd_core::session::{SessionTable, Sweep, growth, remembered};
use pd_core::testkit::MemoryStore;
use proptest::prelude::*;
use std::collections::BTreeMap;

const TTL_MS: u64 = 20_000;
/// Ticks in which a round over the largest table of these tests is done.
const ROUND_TICKS: u64 = 8;

#[derive(Clone, Debug)]
struct Turn {
    model: &'static str,
    key: u64,
    tokens: u64,
    /// Time since the turn before, in ms.
    after_ms: u64,
    /// Races the turn loses.
    lost: u32,
    /// Another worker's turn between this one's read and write.
    rival: Option<(u64, u64)>,
}

fn turn(keys: u64) -> impl Strategy<Value = Turn> {
    let model = prop_oneof![Just("m"), Just("n")];
    let time = prop_oneof![9 => 0_u64..3_000, 1 => 15_000_u64..25_000];
    let lost = prop_oneof![5 => Just(0_u32), 1 => 1_u32..6];
    let rival = prop::option::weighted(0.2, (0..keys, 0_u64..1_000));
    (model, 0..keys, 0_u64..1_000, time, lost, rival).prop_map(
        |(model, key, tokens, after_ms, lost, rival)| Turn {
            model,
            key,
            tokens,
            after_ms,
            lost,
            rival,
        },
    )
}

/// The one bucket of a table of at most 64.
fn only_bucket(store: &MemoryStore, table: &SessionTable) -> String {
    let probe = table.recall(store, "probe", 0, 0);
    assert!(table.remember(store, probe, 0, 0));
    store.keys().pop().unwrap()
}

/// The size written last of every session, and the last second at which it counts.
type Written = BTreeMap<(&'static str, u64), (u64, u64)>;

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_turn_is_measured_against_its_own_session(
        turns in prop::collection::vec(turn(20), 1..80),
    ) {
        let store = MemoryStore::new();
        // Two models of 20 keys and the probe fit.
        let table = SessionTable::new(64, TTL_MS);
        let bucket = only_bucket(&store, &table);
        let mut sizes = Written::new();
        let mut now_ms = 1_000;
        for turn in turns {
            now_ms += turn.after_ms;
            let session = (turn.model, turn.key);
            let recalled = table.recall(&store, turn.model, turn.key, now_ms);
            let before = recalled.tokens_before();
            let size = sizes.get(&session).filter(|(_, until_s)| now_ms / 1000 <= *until_s);
            prop_assert_eq!(before, size.map(|(tokens, _)| *tokens));
            match growth(turn.tokens, before) {
                Some(growth) => prop_assert!(0 < growth && growth <= turn.tokens),
                None => prop_assert!(before.is_none_or(|before| turn.tokens <= before)),
            }
            let until_s = (now_ms + TTL_MS) / 1000;
            if let Some((key, tokens)) = turn.rival.filter(|(key, _)| *key != turn.key) {
                store.interpose(&bucket, move |store| {
                    let other = table.recall(store, "m", key, now_ms);
                    assert!(table.remember(store, other, tokens, now_ms));
                });
                sizes.insert(("m", key), (tokens, until_s));
            }
            // The rival's own write must not lose: races begin after it.
            let races = if turn.rival.is_some() { 0 } else { turn.lost };
            store.lose_swaps(&bucket, races);
            let written = table.remember(&store, recalled, turn.tokens, now_ms);
            store.lose_swaps(&bucket, 0);
            prop_assert_eq!(written, races < 3);
            if written {
                sizes.insert(session, (turn.tokens, until_s));
            }
        }
    }

    #[test]
    fn never_more_than_the_bound_are_remembered(
        max in 1_u64..300,
        turns in prop::collection::vec(turn(2_000), 1..600),
    ) {
        let store = MemoryStore::new();
        let table = SessionTable::new(max, TTL_MS);
        let mut now_ms = 0;
        let mut seen = BTreeMap::new();
        for turn in turns {
            now_ms += turn.after_ms / 100;
            let recalled = table.recall(&store, turn.model, turn.key, now_ms);
            prop_assert!(table.remember(&store, recalled, turn.tokens, now_ms));
            seen.insert((turn.model, turn.key), now_ms);
        }
        let known = seen.keys().filter(|(model, key)| {
            table.recall(&store, model, *key, now_ms).tokens_before().is_some()
        });
        let known = known.count() as u64;
        prop_assert!(known <= max);
        // The janitor counts the same.
        let mut sweep = Sweep::default();
        (0..ROUND_TICKS).for_each(|tick| sweep.tick(&store, max, now_ms + tick));
        prop_assert_eq!(remembered(&store), known);
    }

    #[test]
    fn garbage_in_the_store_is_never_a_panic_and_is_replaced(
        mut garbage in prop::collection::vec(any::<u8>(), 0..2_000),
        versioned in any::<bool>(),
    ) {
        let store = MemoryStore::new();
        let table = SessionTable::new(64, TTL_MS);
        let bucket = only_bucket(&store, &table);
        if let Some(first) = garbage.first_mut().filter(|_| versioned) {
            *first = pd_core::FORMAT;
        }
        store.put(&bucket, &garbage);
        Sweep::default().tick(&store, 64, 0);
        let recalled = table.recall(&store, "m", 1, 0);
        prop_assert_eq!(recalled.tokens_before(), None);
        prop_assert!(table.remember(&store, recalled, 7, 0));
        prop_assert_eq!(table.recall(&store, "m", 1, 0).tokens_before(), Some(7));
        prop_assert!(store.get(&bucket).unwrap().bytes.len() <= 1 + 64 * 16);
    }
}
