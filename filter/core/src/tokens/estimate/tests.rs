use super::*;
use crate::testkit::MemoryStore;

fn name() -> Rc<str> {
    "m".into()
}

/// One VM's samples, merged; returns the ratio.
fn learned(samples: &[(u64, u64)]) -> f64 {
    let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
    for (bytes, tokens) in samples {
        estimates.learn(&store, 3, &name(), *bytes, *tokens);
    }
    estimates.tick(&store, MERGE_MS);
    ratio(&estimates)
}

fn ratio(estimates: &Estimates) -> f64 {
    estimates.ratios().next().unwrap().1
}

#[test]
fn an_unknown_model_has_four_bytes_a_token() {
    let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
    for (bytes, tokens) in [(0, 0), (3, 0), (4, 1), (4003, 1000), (u64::MAX, 1 << 62)] {
        assert_eq!(estimates.tokens(&store, 0, &name(), bytes), tokens);
    }
    // Asked for once, however many prompts come.
    assert_eq!(store.calls(), (1, 0));
}

#[test]
fn one_sample_moves_the_ratio_by_its_weight() {
    // (4·1024·d + 6000) / (1024·d + 1000) with d = 255/256.
    let expected: f64 = (4096.0 * 0.99609375 + 6000.0) / (1024.0 * 0.99609375 + 1000.0);
    assert!((learned(&[(6000, 1000)]) - expected).abs() < 1e-12);
    assert!((expected - 4.990).abs() < 0.001);
}

#[test]
fn a_ratio_stays_between_one_and_eight_bytes() {
    let many = |bytes, tokens| learned(&vec![(bytes, tokens); 2000]);
    assert!(many(100, 1000) < 1.01 && many(100, 1000) >= 1.0);
    assert!(many(100_000, 1000) > 7.99 && many(100_000, 1000) <= 8.0);
    assert!((many(3000, 1000) - 3.0).abs() < 0.01);
}

#[test]
fn a_template_around_short_prompts_does_not_count_as_text() {
    // Ten bytes that become 30 tokens, and now and then a real prompt of 5 bytes a token.
    let mut samples = vec![(10, 30); 500];
    samples.extend([(40_000, 8000); 20]);
    let ratio = learned(&samples);
    assert!((4.5..5.0).contains(&ratio), "{ratio}");
}

#[test]
fn one_odd_giant_is_soon_forgotten() {
    let mut samples = vec![(3500, 1000); 600];
    samples.push((8_000_000, 1_000_000));
    let odd = learned(&samples);
    samples.extend([(3500, 1000); 600]);
    let after = learned(&samples);
    assert!(odd < 3.6 && after < 3.51, "{odd} {after}");
}

#[test]
fn nothing_is_learned_from_an_engine_that_counts_nothing() {
    assert_eq!(
        learned(&[(10, 10), (100, 0), (0, 100)]),
        learned(&[(10, 10)])
    );
}

#[test]
fn vms_merge_once_a_second_and_lose_nothing_to_races() {
    let store = MemoryStore::new();
    let (mut one, mut two) = (Estimates::default(), Estimates::default());
    one.learn(&store, 3, &name(), 2000, 1000);
    two.learn(&store, 3, &name(), 2000, 1000);
    one.tick(&store, MERGE_MS - 1);
    assert_eq!(ratio(&one), START);
    one.tick(&store, MERGE_MS);
    store.lose_swaps(&key(3), 2);
    two.tick(&store, MERGE_MS);
    assert_eq!(ratio(&two), learned(&[(2000, 1000), (2000, 1000)]));
    // The other one sees it at its next merge, a new VM at once.
    one.tick(&store, 2 * MERGE_MS);
    assert_eq!(ratio(&one), ratio(&two));
    let mut new = Estimates::default();
    new.tokens(&store, 3, &name(), 1);
    assert_eq!(ratio(&new), ratio(&two));
}

#[test]
fn what_cannot_be_written_is_written_later() {
    let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
    estimates.learn(&store, 3, &name(), 2000, 1000);
    store.refuse(true);
    estimates.tick(&store, MERGE_MS);
    store.refuse(false);
    store.lose_swaps(&key(3), MAX_TRIES);
    estimates.tick(&store, 2 * MERGE_MS);
    assert_eq!(ratio(&estimates), START);
    estimates.tick(&store, 3 * MERGE_MS);
    assert_eq!(ratio(&estimates), learned(&[(2000, 1000)]));
    let (_, writes) = store.calls();
    estimates.tick(&store, 4 * MERGE_MS);
    assert_eq!(store.calls().1, writes, "nothing new, nothing written");
}

#[test]
fn the_record_of_another_model_or_of_no_filter_counts_for_nothing() {
    let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
    estimates.learn(&store, 3, &name(), 2000, 1000);
    estimates.tick(&store, MERGE_MS);
    // The slot was given to another model, in the same VM and in a new one.
    let other: Rc<str> = "other".into();
    assert_eq!(estimates.tokens(&store, 3, &other, 400), 100);
    assert_eq!(Estimates::default().tokens(&store, 3, &other, 400), 100);
    let good = store.get(&key(3)).unwrap().bytes;
    assert_eq!(good.len(), RECORD);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad.truncate(at);
        store.put(&key(3), &bad);
        assert_eq!(Estimates::default().tokens(&store, 3, &name(), 400), 100);
    }
    for (bytes, tokens) in [
        (f64::NAN, 1.0),
        (1.0, f64::INFINITY),
        (-4.0, -1.0),
        (4.0, 0.0),
    ] {
        store.put(&key(3), &Sums { bytes, tokens }.encode("m"));
        assert_eq!(Estimates::default().tokens(&store, 3, &name(), 400), 100);
    }
}

#[cfg(not(target_family = "wasm"))]
mod properties {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_estimate_grows_with_the_bytes(
            samples in prop::collection::vec((any::<u32>(), any::<u32>()), 0..20),
            bytes in 0_u64..1 << 50,
            more in any::<u64>(),
        ) {
            let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
            for (bytes, tokens) in samples {
                estimates.learn(&store, 0, &name(), bytes.into(), tokens.into());
            }
            estimates.tick(&store, MERGE_MS);
            let fewer = estimates.tokens(&store, 0, &name(), bytes);
            let total = bytes.saturating_add(more);
            prop_assert!(fewer <= estimates.tokens(&store, 0, &name(), total));
            prop_assert!(bytes / 8 <= fewer && fewer <= bytes);
        }
    }
}

#[test]
fn a_vm_learns_from_a_bounded_number_of_prompts_between_merges() {
    let (store, mut estimates) = (MemoryStore::new(), Estimates::default());
    for nth in 0..SAMPLES {
        assert!(estimates.are_wanted(), "{nth}");
        estimates.learn(&store, 3, &name(), 6000, 1000);
    }
    assert!(!estimates.are_wanted());
    estimates.tick(&store, MERGE_MS);
    assert!(estimates.are_wanted());
}
