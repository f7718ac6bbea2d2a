//! The index against one without bounds, over random prompts.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// The same facts without bounds: prompts by pod.
#[derive(Default)]
struct Exact(HashMap<u64, Vec<Vec<u8>>>);

impl Exact {
    fn learn(&mut self, text: &[u8], pod: u64) {
        self.0.entry(pod).or_default().push(text.to_vec());
    }

    fn percent(&self, text: &[u8], pod: u64) -> u8 {
        let held = self.0.get(&pod).into_iter().flatten();
        let common = held.map(|held| held.iter().zip(text).take_while(|(a, b)| a == b).count());
        (common.max().unwrap_or(0) * 100 / text.len().max(1)) as u8
    }
}

/// Up to `most` prompts that share beginnings of all lengths: runs of few letters.
fn prompts(most: usize, longest_run: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
    let run = (0u8..3, 1..longest_run).prop_map(|(letter, length)| vec![letter; length]);
    let text = prop::collection::vec(run, 0..5).prop_map(|runs| runs.concat());
    prop::collection::vec(text, 1..=most)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    // As many prompts as a path may have nodes: more could branch more often.
    #[test]
    fn with_room_the_index_is_exact_up_to_16_kb(
        texts in prompts(MAX_DEPTH, 32), pods in prop::collection::vec(0u64..4, MAX_DEPTH),
    ) {
        let (index, store, mut exact) = (PrefixIndex::new(10_000_000, TTL_MS), Store::default(), Exact::default());
        for (text, pod) in texts.iter().zip(&pods) {
            for other in 0..4 {
                let ours = percents(&index, &store, &prompt(text), &[other], 0);
                prop_assert_eq!(ours[0], exact.percent(text, other));
            }
            request(&index, &store, &prompt(text), *pod, 0);
            exact.learn(text, *pod);
        }
    }

    #[test]
    fn with_room_the_index_is_at_most_2_percent_below(
        texts in prompts(MAX_DEPTH, 2000), pods in prop::collection::vec(0u64..4, MAX_DEPTH),
    ) {
        let (index, store, mut exact) = (PrefixIndex::new(10_000_000, TTL_MS), Store::default(), Exact::default());
        for (text, pod) in texts.iter().zip(&pods) {
            for other in 0..4 {
                let ours = percents(&index, &store, &prompt(text), &[other], 0);
                let exact = exact.percent(text, other);
                prop_assert!((exact.saturating_sub(2)..=exact).contains(&ours[0]), "{} {exact}", ours[0]);
            }
            request(&index, &store, &prompt(text), *pod, 0);
            exact.learn(text, *pod);
        }
    }

    #[test]
    fn without_room_it_never_reports_more_than_was_learnt(
        texts in prompts(24, 120), pods in prop::collection::vec(0u64..4, 24),
    ) {
        let (index, store, mut exact) = (PrefixIndex::new(1, TTL_MS), Store::default(), Exact::default());
        for (text, pod) in texts.iter().zip(&pods) {
            request(&index, &store, &prompt(text), *pod, 0);
            exact.learn(text, *pod);
        }
        prop_assert!(store.values.borrow().len() == 1 || texts.iter().all(Vec::is_empty));
        prop_assert!(store.longest() <= SET_BYTES);
        for text in &texts {
            let ours = percents(&index, &store, &prompt(text), &[0, 1, 2, 3], 0);
            for (pod, percent) in ours.into_iter().enumerate() {
                prop_assert!(percent <= exact.percent(text, pod as u64));
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
            index.learn(&store, MODEL, &mut chain.clone(), PodKey(9), 0);
            let valid = store.values.borrow()["pd.prefix.0"].0.clone();
            bytes = [&valid[..cut.min(valid.len())], &bytes].concat();
        }
        store.values.borrow_mut().insert("pd.prefix.0".to_owned(), (bytes, 1));
        let _ = percents(&index, &store, &chain, &[1, 9], 0);
        index.learn(&store, MODEL, &mut chain.clone(), PodKey(1), 0);
        prop_assert_eq!(percents(&index, &store, &chain, &[1], 0), [100]);
        prop_assert!(store.longest() <= SET_BYTES);
    }
}
