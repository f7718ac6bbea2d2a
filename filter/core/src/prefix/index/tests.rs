use super::*;
use crate::port::{Cas, Stored};
use crate::prefix::{chain, model_hash};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

// The generator needs the system's randomness.
#[cfg(not(target_family = "wasm"))]
mod properties;

/// A store that counts, and can lose races.
#[derive(Default)]
struct Store {
    values: RefCell<BTreeMap<String, (Vec<u8>, u32)>>,
    reads: Cell<usize>,
    writes: Cell<usize>,
    races: Cell<usize>,
}

impl Store {
    fn race(&self) -> Result<(), StoreError> {
        self.writes.set(self.writes.get() + 1);
        match self.races.get() {
            0 => Ok(()),
            left => {
                self.races.set(left - 1);
                Err(StoreError::Raced)
            }
        }
    }

    fn longest(&self) -> usize {
        self.values
            .borrow()
            .values()
            .map(|(bytes, _)| bytes.len())
            .max()
            .unwrap_or(0)
    }
}

impl SharedStore for Store {
    fn get(&self, key: &str) -> Option<Stored> {
        self.reads.set(self.reads.get() + 1);
        let values = self.values.borrow();
        values.get(key).map(|(bytes, cas)| Stored {
            bytes: bytes.clone(),
            cas: Cas(*cas),
        })
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.race()?;
        assert!(
            self.values
                .borrow_mut()
                .insert(key.to_owned(), (bytes.to_vec(), 1))
                .is_none()
        );
        Ok(())
    }

    fn swap(&self, key: &str, bytes: &[u8], cas: Cas) -> Result<(), StoreError> {
        self.race()?;
        let mut values = self.values.borrow_mut();
        let value = values.get_mut(key).unwrap();
        assert_eq!(value.1, cas.0);
        *value = (bytes.to_vec(), cas.0 + 1);
        Ok(())
    }
}

const TTL_MS: u64 = 20 * 60_000;
const MODEL: u64 = 77;

fn index() -> PrefixIndex {
    PrefixIndex::new(200_000, TTL_MS)
}

/// A prompt of one-byte blocks.
fn prompt(text: &[u8]) -> Chain {
    chain([text], 1, 0)
}

/// `shared` blocks that all users have in common, then `own` of this user's.
fn prompt_of(user: usize, shared: usize, own: usize) -> Chain {
    let mut text = vec![0; shared * 8];
    for nth in 0..own {
        text.extend_from_slice(
            &(user as u64 + 1)
                .wrapping_mul(nth as u64 + 0x1234_5678)
                .to_le_bytes(),
        );
    }
    chain([text.as_slice()], 8, 0)
}

fn percents(index: &PrefixIndex, store: &Store, chain: &Chain, pods: &[u64], now: u64) -> Vec<u8> {
    let pods: Vec<_> = pods.iter().map(|pod| PodKey(*pod)).collect();
    let mut percents = vec![255; pods.len()];
    index.lookup(store, MODEL, chain, &pods, now, &mut percents);
    percents
}

#[test]
fn the_percentage_counts_whole_blocks_from_the_beginning() {
    let (index, store) = (index(), Store::default());
    index.learn(&store, MODEL, &prompt(b"ab"), PodKey(1), 0);
    index.learn(&store, MODEL, &prompt(b"abc"), PodKey(2), 0);
    assert_eq!(
        percents(&index, &store, &prompt(b"abx"), &[1, 2, 3], 0),
        [66, 66, 0]
    );
    assert_eq!(
        percents(&index, &store, &prompt(b"abc"), &[3, 2, 1, 2], 0),
        [0, 100, 66, 100]
    );
    assert_eq!(
        percents(&index, &store, &prompt(b"xbc"), &[1, 2], 0),
        [0, 0]
    );
    assert_eq!(percents(&index, &store, &prompt(b""), &[1], 0), [0]);
    assert_eq!(percents(&index, &store, &prompt(b"abc"), &[], 0), [0u8; 0]);
}

#[test]
fn models_do_not_share_blocks() {
    let (index, store) = (index(), Store::default());
    index.learn(&store, model_hash("a"), &prompt(b"abc"), PodKey(1), 0);
    let mut percents = [9];
    index.lookup(
        &store,
        model_hash("b"),
        &prompt(b"abc"),
        &[PodKey(1)],
        0,
        &mut percents,
    );
    assert_eq!(percents, [0]);
    index.lookup(
        &store,
        model_hash("a"),
        &prompt(b"abc"),
        &[PodKey(1)],
        0,
        &mut percents,
    );
    assert_eq!(percents, [100]);
}

#[test]
fn a_pod_is_forgotten_after_its_own_time_and_refreshed_by_its_own_work() {
    let (index, store) = (index(), Store::default());
    let chain = prompt_of(1, 100, 100);
    index.learn(&store, MODEL, &chain, PodKey(1), 1000);
    index.learn(&store, MODEL, &chain, PodKey(2), TTL_MS / 2);
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], TTL_MS + 1000),
        [100, 100]
    );
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], TTL_MS + 2000),
        [0, 100]
    );
    index.learn(&store, MODEL, &chain, PodKey(1), TTL_MS + 2000);
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], 2 * TTL_MS),
        [100, 0]
    );
}

#[test]
fn a_popular_prompt_is_read_but_not_written_again() {
    let (index, store) = (index(), Store::default());
    let chain = prompt_of(1, 0, 64);
    index.learn(&store, MODEL, &chain, PodKey(1), 0);
    let writes = store.writes.get();
    assert_eq!(writes, 20);
    index.learn(&store, MODEL, &chain, PodKey(1), TTL_MS / 16);
    assert_eq!(store.writes.get(), writes);
    index.learn(&store, MODEL, &chain, PodKey(1), TTL_MS / 16 + 1000);
    assert_eq!(store.writes.get(), 2 * writes);
}

#[test]
fn a_megabyte_is_looked_up_in_eight_reads() {
    let (index, store) = (index(), Store::default());
    let chain = prompt_of(1, 4000, 4192);
    index.learn(&store, MODEL, &chain, PodKey(1), 0);
    index.learn(&store, MODEL, &chain, PodKey(2), 0);
    store.reads.set(0);
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2, 3], 0),
        [100, 100, 0]
    );
    // 8 for those that hold it, 7 for the one that holds nothing, one of them in common.
    assert!(store.reads.get() <= 15, "{} reads", store.reads.get());
    store.reads.set(0);
    assert_eq!(percents(&index, &store, &chain, &[1, 2], 0), [100, 100]);
    assert!(store.reads.get() <= 8, "{} reads", store.reads.get());
}

#[test]
fn reads_are_bounded_when_all_pods_differ() {
    let (index, store) = (index(), Store::default());
    let pods: Vec<u64> = (1..=60).collect();
    let whole = prompt_of(1, 0, 6000);
    for pod in &pods {
        let part = prompt_of(1, 0, *pod as usize * 100);
        index.learn(&store, MODEL, &part, PodKey(*pod), 0);
    }
    store.reads.set(0);
    let percents = percents(&index, &store, &whole, &pods, 0);
    assert!(store.reads.get() <= MAX_READS);
    assert_eq!(percents[59], 100, "the best is exact");
    for (pod, percent) in pods.iter().zip(&percents) {
        assert!(u64::from(*percent) <= pod * 100 / 60);
    }
}

#[test]
fn users_of_one_system_prompt_keep_their_own_turns() {
    for shared in [0, 3, 40, 100] {
        let (index, store) = (index(), Store::default());
        for user in 0..500 {
            let pod = PodKey(user as u64 % 4);
            index.learn(
                &store,
                MODEL,
                &prompt_of(user, shared, 30),
                pod,
                user as u64,
            );
        }
        let mut complete = 0;
        for user in 0..500 {
            let percents = percents(
                &index,
                &store,
                &prompt_of(user, shared, 30),
                &[0, 1, 2, 3],
                5000,
            );
            complete += usize::from(percents[user % 4] == 100);
            let floor = (100 * shared / (shared + 30)) as u8;
            assert!(percents.iter().all(|percent| *percent >= floor));
        }
        assert!(
            complete >= 495,
            "{complete} of 500 after {shared} shared blocks"
        );
    }
}

#[test]
fn the_store_is_bounded_and_holds_about_what_was_asked_for() {
    let (index, store) = (index(), Store::default());
    for user in 0..5000 {
        index.learn(
            &store,
            MODEL,
            &prompt_of(user, 0, 64),
            PodKey(1),
            user as u64,
        );
    }
    assert!(store.values.borrow().len() as u64 <= index.sets && index.sets == 782);
    assert!(store.longest() <= SET_BYTES);
    // 3125 prompts of 64 blocks are 200 000 blocks.
    let known = (5000 - 3125..5000)
        .filter(|user| percents(&index, &store, &prompt_of(*user, 0, 64), &[1], 5000) == [100])
        .count();
    assert!(known >= 3000, "{known} of the last 3125");
}

#[test]
fn one_lost_race_is_tried_again_and_more_are_given_up() {
    let (index, store) = (index(), Store::default());
    let chain = prompt(b"abcdef");
    store.races.set(1);
    index.learn(&store, MODEL, &chain, PodKey(1), 0);
    assert_eq!(percents(&index, &store, &chain, &[1], 0), [100]);
    let store = Store::default();
    store.races.set(usize::MAX);
    index.learn(&store, MODEL, &chain, PodKey(1), 0);
    assert_eq!(store.writes.get(), 6 * TRIES);
    assert_eq!(percents(&index, &store, &chain, &[1], 0), [0]);
}
