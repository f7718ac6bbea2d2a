//! The index against one without bounds, over random prompts.

use super::*;
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

/// The same facts without bounds: blocks by pod.
#[derive(Default)]
struct Exact(HashMap<u64, HashSet<u64>>);

impl Exact {
    fn learn(&mut self, chain: &Chain, pod: u64) {
        self.0.entry(pod).or_default().extend(chain.hashes());
    }

    fn percent(&self, chain: &Chain, pod: u64) -> u8 {
        let Some(held) = self.0.get(&pod) else {
            return 0;
        };
        let matched = chain
            .hashes()
            .iter()
            .take_while(|hash| held.contains(hash))
            .count();
        (matched * 100 / chain.len().max(1)) as u8
    }
}

/// Prompts that share beginnings of all lengths: runs of few letters.
fn prompts() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let run = (0u8..3, 1usize..120).prop_map(|(letter, length)| vec![letter; length]);
    let text = prop::collection::vec(run, 0..5).prop_map(|runs| runs.concat());
    prop::collection::vec(text, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn with_room_the_index_is_exact(texts in prompts(), pods in prop::collection::vec(0u64..4, 24)) {
        let (index, store, mut exact) = (PrefixIndex::new(10_000_000, TTL_MS), Store::default(), Exact::default());
        for (text, pod) in texts.iter().zip(&pods) {
            let chain = prompt(text);
            for other in 0..4 {
                let ours = percents(&index, &store, &chain, &[other], 0);
                prop_assert_eq!(ours[0], exact.percent(&chain, other));
            }
            index.learn(&store, MODEL, &chain, PodKey(*pod), 0);
            exact.learn(&chain, *pod);
        }
    }

    #[test]
    fn without_room_it_never_reports_more_than_was_learnt(
        texts in prompts(), pods in prop::collection::vec(0u64..4, 24),
    ) {
        let (index, store, mut exact) = (PrefixIndex::new(1, TTL_MS), Store::default(), Exact::default());
        for (text, pod) in texts.iter().zip(&pods) {
            index.learn(&store, MODEL, &prompt(text), PodKey(*pod), 0);
            exact.learn(&prompt(text), *pod);
        }
        prop_assert!(store.values.borrow().len() == 1 || texts.iter().all(Vec::is_empty));
        prop_assert!(store.longest() <= SET_BYTES);
        for text in &texts {
            let chain = prompt(text);
            let ours = percents(&index, &store, &chain, &[0, 1, 2, 3], 0);
            for (pod, percent) in ours.into_iter().enumerate() {
                prop_assert!(percent <= exact.percent(&chain, pod as u64));
            }
        }
    }

    #[test]
    fn any_stored_bytes_are_survived_and_replaced(
        mut bytes: Vec<u8>, versioned: bool, cut in 0usize..200,
    ) {
        let (index, store) = (PrefixIndex::new(1, TTL_MS), Store::default());
        let chain = prompt(b"aabbccddeeffgghhiijjkk");
        if versioned {
            index.learn(&store, MODEL, &chain, PodKey(9), 0);
            let valid = store.values.borrow()["pd.prefix.0"].0.clone();
            bytes = [&valid[..cut.min(valid.len())], &bytes].concat();
        }
        store.values.borrow_mut().insert("pd.prefix.0".to_owned(), (bytes, 1));
        let _ = percents(&index, &store, &chain, &[1, 9], 0);
        index.learn(&store, MODEL, &chain, PodKey(1), 0);
        prop_assert_eq!(percents(&index, &store, &chain, &[1], 0), [100]);
        prop_assert!(store.longest() <= SET_BYTES);
    }
}
