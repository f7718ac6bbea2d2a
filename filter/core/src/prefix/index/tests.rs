use super::*;
use crate::port::{Cas, Stored};
use crate::prefix::{MAX_BLOCKS, chain, model_hash};
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
        let mut values = self.values.borrow_mut();
        if values.contains_key(key) {
            return Err(StoreError::Raced);
        }
        values.insert(key.to_owned(), (bytes.to_vec(), 1));
        Ok(())
    }

    fn swap(&self, key: &str, bytes: &[u8], cas: Cas) -> Result<(), StoreError> {
        self.race()?;
        let mut values = self.values.borrow_mut();
        let value = values.get_mut(key).unwrap();
        if value.1 != cas.0 {
            return Err(StoreError::Raced);
        }
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
    index.lookup(store, MODEL, &mut chain.clone(), &pods, now, &mut percents);
    percents
}

/// One request: the prompt is looked up, then computed by `pod`. Returns what `pod` held.
fn request(index: &PrefixIndex, store: &Store, chain: &Chain, pod: u64, now: u64) -> u8 {
    let (mut chain, pods) = (chain.clone(), [PodKey(pod)]);
    let mut percents = [255];
    index.lookup(store, MODEL, &mut chain, &pods, now, &mut percents);
    index.learn(store, MODEL, &mut chain, PodKey(pod), now);
    percents[0]
}

#[test]
fn the_percentage_counts_whole_blocks_from_the_beginning() {
    let (index, store) = (index(), Store::default());
    index.learn(&store, MODEL, &mut prompt(b"ab"), PodKey(1), 0);
    index.learn(&store, MODEL, &mut prompt(b"abc"), PodKey(2), 0);
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
    index.learn(&store, model_hash("a"), &mut prompt(b"abc"), PodKey(1), 0);
    let mut percents = [9];
    index.lookup(
        &store,
        model_hash("b"),
        &mut prompt(b"abc"),
        &[PodKey(1)],
        0,
        &mut percents,
    );
    assert_eq!(percents, [0]);
    index.lookup(
        &store,
        model_hash("a"),
        &mut prompt(b"abc"),
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
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), 1000);
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(2), TTL_MS / 2);
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], TTL_MS + 1000),
        [100, 100]
    );
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], TTL_MS + 2000),
        [0, 100]
    );
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), TTL_MS + 2000);
    assert_eq!(
        percents(&index, &store, &chain, &[1, 2], 2 * TTL_MS),
        [100, 0]
    );
}

#[test]
fn work_on_the_beginning_does_not_keep_the_rest_alive() {
    let (index, store) = (index(), Store::default());
    let (whole, part) = (prompt_of(1, 0, 100), prompt_of(1, 0, 40));
    request(&index, &store, &whole, 1, 0);
    request(&index, &store, &part, 1, TTL_MS / 2);
    assert_eq!(percents(&index, &store, &whole, &[1], TTL_MS), [100]);
    assert_eq!(percents(&index, &store, &whole, &[1], TTL_MS + 1000), [40]);
    assert_eq!(
        percents(&index, &store, &whole, &[1], 2 * TTL_MS + 1000),
        [0]
    );
    // Nor does it keep its room.
    let length = store.longest();
    request(&index, &store, &part, 1, TTL_MS + 1000);
    assert_eq!(store.longest(), length - 60 * 4 - 14);
}

#[test]
fn a_popular_prompt_is_read_but_not_written_again() {
    let (index, store) = (index(), Store::default());
    let chain = prompt_of(1, 0, 64);
    request(&index, &store, &chain, 1, 0);
    assert_eq!((store.reads.get(), store.writes.get()), (1, 1));
    // Once looked up it need not even be read again.
    request(&index, &store, &chain, 1, TTL_MS / 16);
    assert_eq!((store.reads.get(), store.writes.get()), (2, 1));
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), TTL_MS / 16);
    assert_eq!((store.reads.get(), store.writes.get()), (3, 1));
    request(&index, &store, &chain, 1, TTL_MS / 16 + 1000);
    assert_eq!((store.reads.get(), store.writes.get()), (4, 2));
}

#[test]
fn a_prompt_in_use_does_not_fall_out_of_its_set() {
    let (index, store) = (PrefixIndex::new(1, TTL_MS), Store::default());
    let popular = prompt_of(0, 0, 64);
    request(&index, &store, &popular, 1, 0);
    let writes = store.writes.get();
    for user in 1..200 {
        request(&index, &store, &prompt_of(user, 0, 64), 2, 0);
        assert_eq!(
            request(&index, &store, &popular, 1, 0),
            100,
            "after {user} others"
        );
    }
    let again = store.writes.get() - writes - 199;
    assert!((1..=40).contains(&again), "{again} writes");
}

#[test]
fn a_new_prompt_costs_one_read_to_look_up_and_one_write_to_learn() {
    for blocks in [1, 64, 8192, MAX_BLOCKS] {
        let (index, store) = (index(), Store::default());
        request(&index, &store, &prompt_of(1, 0, blocks), 1, 0);
        assert_eq!((store.reads.get(), store.writes.get()), (1, 1));
        assert!(store.longest() <= SET_BYTES);
    }
}

#[test]
fn what_a_lookup_read_is_written_back_unless_another_wrote_meanwhile_or_it_was_forgotten() {
    let (index, store) = (PrefixIndex::new(1, TTL_MS), Store::default());
    let look_up = |text: &[u8]| {
        let mut chain = prompt(text);
        index.lookup(&store, MODEL, &mut chain, &[PodKey(1)], 0, &mut [0]);
        chain
    };
    // Two lookups before either is learnt: for the second the set has changed.
    let (mut one, mut two) = (look_up(b"abc"), look_up(b"xyz"));
    index.learn(&store, MODEL, &mut one, PodKey(1), 0);
    assert_eq!((store.reads.get(), store.writes.get()), (2, 1));
    index.learn(&store, MODEL, &mut two, PodKey(1), 0);
    assert_eq!((store.reads.get(), store.writes.get()), (3, 3));
    for text in [b"abc", b"xyz"] {
        assert_eq!(percents(&index, &store, &prompt(text), &[1], 0), [100]);
    }
    // What was read serves once.
    index.learn(&store, MODEL, &mut one, PodKey(2), 0);
    assert_eq!((store.reads.get(), store.writes.get()), (6, 4));
    let mut three = look_up(b"mno");
    three.forget_read();
    index.learn(&store, MODEL, &mut three, PodKey(1), 0);
    assert_eq!((store.reads.get(), store.writes.get()), (8, 5));
}

#[test]
fn the_turns_of_a_conversation_share_one_node() {
    let (index, store) = (index(), Store::default());
    for turn in 1..=60 {
        let before = request(&index, &store, &prompt_of(1, 0, turn * 50), 1, 0);
        let exact = (100 * (turn - 1) / turn) as u8;
        assert!((exact.saturating_sub(2)..=exact).contains(&before));
    }
    assert_eq!(store.values.borrow().len(), 1);
    assert_eq!((store.reads.get(), store.writes.get()), (60, 60));
}

#[test]
fn another_user_of_a_system_prompt_costs_one_node_more() {
    let (index, store) = (index(), Store::default());
    for user in 0..10 {
        request(&index, &store, &prompt_of(user, 40, 30), 1, 0);
    }
    // The first user reads its node, the others that node and the gap behind it.
    assert_eq!(store.reads.get(), 1 + 9 * 2);
    assert_eq!(store.writes.get(), 10);
}

#[test]
fn prompts_whose_end_changes_every_turn_are_found_at_any_depth() {
    let (index, store) = (index(), Store::default());
    let turn = |nth: u8| {
        let mut text: Vec<u8> = (0..nth).flat_map(|turn| [turn; 5]).collect();
        text.extend([100 + nth; 3]);
        prompt(&text)
    };
    for nth in 1..100 {
        store.reads.set(0);
        let known = request(&index, &store, &turn(nth), 1, 0);
        let exact = 500 * (usize::from(nth) - 1) / (usize::from(nth) * 5 + 3);
        assert!((exact.saturating_sub(2)..=exact).contains(&usize::from(known)));
        assert!(store.reads.get() <= MAX_DEPTH + 1);
    }
    assert_eq!(store.values.borrow().len(), MAX_DEPTH);
    // What the last node said before is gone, not believed: 490 of 493 blocks are in common.
    assert_eq!(percents(&index, &store, &turn(98), &[1], 0), [98]);
}

#[test]
fn reads_are_bounded_when_all_pods_differ() {
    let (index, store) = (index(), Store::default());
    let pods: Vec<u64> = (1..=60).collect();
    let whole = prompt_of(1, 0, 6000);
    for pod in &pods {
        let part = prompt_of(1, 0, *pod as usize * 100);
        index.learn(&store, MODEL, &mut part.clone(), PodKey(*pod), 0);
    }
    store.reads.set(0);
    let percents = percents(&index, &store, &whole, &pods, 0);
    assert_eq!(store.reads.get(), 1);
    for (pod, percent) in pods.iter().zip(&percents) {
        let exact = pod * 100 / 60;
        assert!((exact.saturating_sub(2)..=exact).contains(&u64::from(*percent)));
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
                &mut prompt_of(user, shared, 30),
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
            &mut prompt_of(user, 0, 64),
            PodKey(1),
            user as u64,
        );
    }
    assert!(store.values.borrow().len() as u64 <= index.sets && index.sets == 391);
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
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), 0);
    assert_eq!(percents(&index, &store, &chain, &[1], 0), [100]);
    let store = Store::default();
    store.races.set(usize::MAX);
    index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), 0);
    assert_eq!(store.writes.get(), TRIES);
    assert_eq!(percents(&index, &store, &chain, &[1], 0), [0]);
}
