//! Several VMs, one picture.

use super::*;
use crate::testkit::{MemoryStore, model, pod};
use BucketServeMode::{Rps, Throughput};
use pd_wire::profile::{ModelConfig, Profile};

fn fleet(rolesets: usize) -> Rc<ModelFleet> {
    let named = (0..rolesets).map(|n| format!("r{n}"));
    named
        .fold(model("m"), |model, name| model.pair(&name))
        .fleet()
}

fn ask(fleet: &ModelFleet, prompt_tokens: u64, now_ms: u64) -> Ask<'_> {
    Ask {
        fleet,
        profile: None,
        mode: Rps,
        prompt_tokens,
        now_ms,
    }
}

fn stored(store: &MemoryStore, fleet: &ModelFleet) -> Option<Histogram> {
    let stored = store.get(&key(fleet.slot))?;
    Histogram::decode(&stored.bytes, model_hash(&fleet.name))
}

/// As many requests of 16 and of 64 tokens, at one time.
fn record_both(serve: &mut Serve, fleet: &ModelFleet, now_ms: u64) {
    for tokens in [16, 64] {
        serve.record(&ask(fleet, tokens, now_ms));
    }
}

#[test]
fn a_vm_has_bands_from_the_first_tick_on() {
    let (store, fleet, mut serve) = (MemoryStore::new(), fleet(2), Serve::default());
    record_both(&mut serve, &fleet, 0);
    assert_eq!(serve.roleset_for(&ask(&fleet, 16, 0)), None);
    serve.tick(&store, 100);
    let found = [0, 17, 18, u64::MAX].map(|tokens| serve.roleset_for(&ask(&fleet, tokens, 100)));
    assert_eq!(found, [Some(0), Some(0), Some(1), Some(1)]);
}

#[test]
fn requests_touch_no_store_and_ticks_one_record_a_second() {
    let (store, fleet, mut serve) = (MemoryStore::new(), fleet(2), Serve::default());
    for now_ms in (0..10_000).step_by(10) {
        let before = store.calls();
        record_both(&mut serve, &fleet, now_ms);
        serve.roleset_for(&ask(&fleet, 16, now_ms));
        assert_eq!(store.calls(), before);
        if now_ms % 100 == 0 {
            serve.tick(&store, now_ms);
        }
    }
    assert_eq!(store.calls(), (10, 10));
    assert_eq!(store.keys(), [key(fleet.slot)]);
}

#[test]
fn nothing_is_stored_without_requests_and_idle_models_are_let_go() {
    let (store, fleet, mut serve) = (MemoryStore::new(), fleet(2), Serve::default());
    serve.tick(&store, 0);
    assert_eq!(store.calls(), (0, 0));
    record_both(&mut serve, &fleet, 0);
    for now_ms in (0..=60_000).step_by(100) {
        serve.tick(&store, now_ms);
    }
    let reads = store.calls().0;
    assert_eq!(store.calls().1, 1);
    serve.tick(&store, 61_000);
    assert_eq!((store.calls().0, serve.models.len()), (reads, 0));
    // The picture itself stays, for whoever comes next.
    let mut next = Serve::default();
    next.roleset_for(&ask(&fleet, 16, 61_000));
    next.tick(&store, 61_000);
    assert_eq!(next.roleset_for(&ask(&fleet, 16, 61_000)), Some(0));
}

#[test]
fn sixteen_vms_lose_nothing_but_the_last_second_of_the_dead() {
    let (store, fleet) = (MemoryStore::new(), fleet(2));
    let mut vms: Vec<Serve> = (0..16).map(|_| Serve::default()).collect();
    for round in 0..8_u64 {
        for (n, vm) in (0..).zip(&mut vms) {
            for request in 0..10 {
                vm.record(&ask(&fleet, 1 + n * 100 + request, 0));
            }
            // Some lose races, one as many as it may before it gives up until later.
            let races = if n == round {
                MAX_TRIES
            } else {
                u32::from(n % 3 == 0)
            };
            store.lose_swaps(&key(fleet.slot), races);
            // All at one time, so that nothing decays; merging again is made due.
            if let Some(picture) = vm.models.get_mut(&fleet.slot) {
                picture.merge_at = 0;
            }
            vm.tick(&store, 0);
        }
        // The ten requests of that one wait for its next merge.
        let expected = (round as f64 + 1.0) * 160.0 - 10.0;
        assert_eq!(stored(&store, &fleet).unwrap().requests(), expected);
    }
    // The last that lost too many races, and one that dies with what it has noted.
    vms[7].models.get_mut(&fleet.slot).unwrap().merge_at = 0;
    vms[7].tick(&store, 0);
    assert_eq!(stored(&store, &fleet).unwrap().requests(), 1280.0);
    vms[3].record(&ask(&fleet, 5, 0));
    drop(vms.remove(3));
    for vm in &mut vms {
        vm.tick(&store, 2000);
    }
    let mut expected = Histogram::new(0);
    for n in 0..16 {
        for request in 0..80 {
            expected.record(1 + n * 100 + request % 10, 0);
        }
    }
    let now = stored(&store, &fleet).unwrap();
    assert_eq!(now, expected);
    // And all of them see it.
    for vm in &vms {
        let picture = &vm.models[&fleet.slot];
        let mut seen = now.clone();
        seen.settle(2000);
        assert_eq!(picture.seen, seen);
        assert!(picture.fresh.is_empty());
    }
}

#[test]
fn races_between_read_and_write_are_merged_and_not_overwritten() {
    let (store, fleet) = (MemoryStore::new(), fleet(2));
    let (mut one, mut other) = (Serve::default(), Serve::default());
    record_both(&mut one, &fleet, 0);
    record_both(&mut other, &fleet, 0);
    store.interpose(&key(fleet.slot), move |store| other.tick(store, 0));
    one.tick(&store, 0);
    assert_eq!(stored(&store, &fleet).unwrap().requests(), 4.0);
}

#[test]
fn a_store_that_refuses_costs_nothing_but_time() {
    let (store, fleet, mut serve) = (MemoryStore::new(), fleet(2), Serve::default());
    record_both(&mut serve, &fleet, 0);
    store.refuse(true);
    serve.tick(&store, 0);
    // The VM goes by what it has seen itself.
    assert_eq!(serve.roleset_for(&ask(&fleet, 16, 0)), Some(0));
    store.refuse(false);
    serve.tick(&store, 30_000);
    assert_eq!(stored(&store, &fleet).unwrap().requests(), 1.0);
    // What never gets through is forgotten in the end.
    record_both(&mut serve, &fleet, 30_000);
    store.refuse(true);
    for minute in 1..20 {
        serve.tick(&store, minute * 60_000);
    }
    assert!(serve.models.is_empty());
}

#[test]
fn a_broken_record_and_one_of_another_model_count_as_none() {
    let (store, fleet, mut serve) = (MemoryStore::new(), fleet(2), Serve::default());
    let mut foreign = Histogram::new(0);
    foreign.record(16, 0);
    for bytes in [
        Vec::new(),
        vec![0xff; 2705],
        foreign.encode(model_hash("n")),
    ] {
        store.put(&key(fleet.slot), &bytes);
        record_both(&mut serve, &fleet, 0);
        serve.models.get_mut(&fleet.slot).unwrap().merge_at = 0;
        serve.tick(&store, 0);
        assert_eq!(stored(&store, &fleet).unwrap().requests(), 2.0);
    }
    // The slot is given to another model.
    let other = ModelFleet {
        name: "n".into(),
        ..(*fleet).clone()
    };
    assert_eq!(serve.roleset_for(&ask(&other, 16, 0)), None);
    serve.tick(&store, 0);
    assert_eq!(serve.roleset_for(&ask(&other, 16, 0)), None);
}

#[test]
fn plans_follow_topology_mode_and_profile_and_are_few() {
    let long = |prompt_min| ModelConfig {
        profiles: ["long", "a", "b", "c", "d", "e"]
            .map(|name| {
                let profile = Profile {
                    prompt_min,
                    ..Profile::default()
                };
                (name.to_owned(), profile)
            })
            .into(),
        ..ModelConfig::default()
    };
    let build = |rolesets: usize| {
        let names = (0..rolesets).map(|n| format!("r{n}"));
        let pods = names.flat_map(|name| {
            [
                pod(&format!("{name}-p"))
                    .prefill()
                    .roleset(&name)
                    .config(long(20)),
                pod(&format!("{name}-d")).decode().roleset(&name),
            ]
        });
        pods.fold(model("m"), crate::testkit::ModelBuilder::pod)
            .fleet()
    };
    let (store, two, mut serve) = (MemoryStore::new(), build(2), Serve::default());
    for tokens in [16, 16, 16, 64, 64, 256] {
        serve.record(&ask(&two, tokens, 0));
    }
    serve.tick(&store, 0);
    let mut of = |fleet: &ModelFleet, mode, profile, prompt_tokens| {
        serve.roleset_for(&Ask {
            mode,
            profile,
            ..ask(fleet, prompt_tokens, 0)
        })
    };
    assert_eq!(of(&two, Rps, None, 64), Some(1));
    // 432 tokens, 256 of them in one prompt: too much for either.
    assert_eq!(of(&two, Throughput, None, 64), Some(0));
    assert_eq!(of(&two, Throughput, None, 256), None);
    // With that profile prompts below 20 tokens are not theirs, and 3 requests remain.
    assert_eq!(of(&two, Rps, Some("long"), 16), None);
    assert_eq!(of(&two, Rps, Some("long"), 69), None);
    assert_eq!(of(&two, Rps, Some("long"), 256), Some(1));
    // One roleset left, then three.
    assert_eq!(of(&build(1), Rps, None, 64), None);
    let three = build(3);
    assert_eq!(of(&three, Rps, None, 16), None);
    // Two requests each: the third of 16 tokens and the second of 64 could go either way.
    assert_eq!(of(&three, Rps, None, 64), None);
    assert_eq!(of(&three, Rps, None, 256), Some(2));
    for name in ["x", "y", "z", "long", "a", "b", "c", "d", "e"] {
        for mode in [Rps, Throughput] {
            of(&three, mode, Some(name), 64);
        }
    }
    assert_eq!(of(&three, Rps, None, 256), Some(2));
    let plans = &serve.models[&three.slot].plans;
    assert_eq!(plans.len(), MAX_PLANS);
    assert!(
        plans
            .iter()
            .all(|held| held.profile.as_deref() != Some("x"))
    );
}
