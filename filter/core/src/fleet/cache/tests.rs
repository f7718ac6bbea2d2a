use super::*;
use crate::fleet::{Roleset, accept_samples, accept_topology};
use crate::testkit::{MemoryStore, TopologyBuilder, model, pod, topology};
use pd_wire::samples::Samples;

fn two_models(sequence: u64) -> TopologyBuilder {
    topology(1, sequence)
        .model(
            model("b")
                .pair("r0")
                .pod(pod("ns/x").prefill().roleset("half")),
        )
        .model(
            model("a")
                .pair("r1")
                .pod(pod("c").unready().label("zone", "1")),
        )
        .replicas(3)
}

fn push(store: &MemoryStore, topology: &TopologyBuilder, now_ms: u64) {
    accept_topology(store, &topology.json(), now_ms).unwrap();
}

fn sample(ordinal: u32, running: f64) -> PodSample {
    PodSample {
        ordinal,
        age_ms: 30,
        running: Some(running),
        ..PodSample::default()
    }
}

fn push_samples(store: &MemoryStore, samples: Samples, pods: &[PodSample], now_ms: u64) {
    let samples = Samples {
        pods: pods.to_vec(),
        ..samples
    };
    accept_samples(store, &samples.encode(), now_ms).unwrap();
}

/// Pod name, running requests and time of every sample of a model.
fn seen(cache: &mut FleetCache, name: &str) -> Vec<(String, Option<f64>, u64)> {
    let fleet = cache.model(name).unwrap();
    let pods = (0_u16..).zip(fleet.pods.iter());
    pods.filter_map(|(at, pod)| {
        let (sample, taken_at_ms) = fleet.sample(at)?;
        assert_eq!(sample.ordinal, u32::from(at));
        Some((pod.name.clone(), sample.running, taken_at_ms))
    })
    .collect()
}

#[test]
fn a_pushed_topology_is_found_with_its_rolesets() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    assert!(!cache.refresh(&store) && !cache.ready());
    push(&store, &two_models(1), 1_000);
    assert!(cache.refresh(&store) && cache.ready());
    assert_eq!(cache.models().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(cache.replicas(), 3);
    assert!(cache.model("c").is_none());

    let fleet = cache.model("b").unwrap();
    let names: Vec<&str> = fleet.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!((names, fleet.slot), (vec!["r0-d", "r0-p", "x"], 0));
    let roleset = Roleset {
        namespace: "default".to_owned(),
        name: "r0".to_owned(),
        prefill: vec![1],
        decode: vec![0],
    };
    assert_eq!(*fleet.rolesets, [roleset]);
    let other = cache.model("a").unwrap();
    assert_eq!((other.slot, other.pod(0).unwrap().usable), (1, false));
    assert_eq!(
        other.pod(0).unwrap().labels,
        [("zone".to_owned(), "1".to_owned())]
    );
    assert_eq!(other.pod(9), None);

    let status = cache.topology_status(1_500).unwrap();
    assert_eq!((status.age_ms, status.pods, status.sequence), (500, 6, 1));
    assert_eq!(cache.samples_status(1_500), None);
}

#[test]
fn nothing_new_costs_one_small_read_and_new_samples_share_the_pods() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    let topology = two_models(1);
    push(&store, &topology, 0);
    cache.refresh(&store);
    let before = cache.model("a").unwrap();

    let (reads, _) = store.calls();
    assert!(!cache.refresh(&store));
    assert_eq!(store.calls().0, reads + 1);
    assert!(Rc::ptr_eq(&before, &cache.model("a").unwrap()));

    push_samples(&store, topology.samples(1), &[sample(3, 2.0)], 100);
    assert!(cache.refresh(&store));
    let after = cache.model("a").unwrap();
    assert!(!Rc::ptr_eq(&before, &after) && Rc::ptr_eq(&before.pods, &after.pods));
    assert_eq!(before.sample(1), None);
}

#[test]
fn samples_reach_their_pods_with_the_time_they_were_taken() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    let topology = two_models(1);
    push(&store, &topology, 0);
    // Pushed order: r0-p, r0-d, x | r1-p, r1-d, c.
    let pods = [sample(1, 1.0), sample(2, 2.0), sample(3, 3.0)];
    push_samples(&store, topology.samples(1), &pods, 1_000);
    cache.refresh(&store);
    assert_eq!(
        seen(&mut cache, "b"),
        [
            ("r0-d".to_owned(), Some(1.0), 970),
            ("x".to_owned(), Some(2.0), 970)
        ]
    );
    assert_eq!(seen(&mut cache, "a"), [("r1-p".to_owned(), Some(3.0), 970)]);
    assert_eq!(cache.samples_status(1_100).unwrap().pods, 3);

    push_samples(&store, topology.samples(2), &[sample(0, 9.0)], 10);
    cache.refresh(&store);
    assert_eq!(seen(&mut cache, "b"), [("r0-p".to_owned(), Some(9.0), 0)]);
    assert_eq!(seen(&mut cache, "a"), []);
}

#[test]
fn samples_outlive_a_new_topology_but_not_a_recreated_pod() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    let first = topology(1, 1).model(model("m").pair("r"));
    push(&store, &first, 0);
    push_samples(
        &store,
        first.samples(1),
        &[sample(0, 1.0), sample(1, 2.0)],
        100,
    );
    cache.refresh(&store);
    let next = topology(1, 2).model(model("other").pod(pod("o"))).model(
        model("m")
            .pod(pod("a"))
            .pod(pod("r-p").uid("new"))
            .pod(pod("r-d")),
    );
    push(&store, &next, 200);
    assert!(cache.refresh(&store));
    assert_eq!(seen(&mut cache, "m"), [("r-d".to_owned(), Some(2.0), 70)]);
}

#[test]
fn what_cannot_be_read_leaves_what_is_held_in_force() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    push(&store, &two_models(1), 0);
    cache.refresh(&store);
    let before = cache.model("a").unwrap();
    for garbage in [
        &b""[..],
        b"\x09",
        b"\x01\xff\xff\xff\xff\x00\x00\x00\x00",
        &[1; 40],
    ] {
        store.put(KEY_TOPOLOGY, garbage);
        store.put(KEY_SAMPLES, garbage);
        store.put(KEY_HEAD, garbage);
        assert!(!cache.refresh(&store));
        assert_eq!(*cache.model("a").unwrap(), *before);
    }
}

#[test]
fn a_stored_model_cut_short_is_not_found_and_never_a_panic() {
    let store = MemoryStore::new();
    push(&store, &two_models(1), 0);
    let bytes = store.get(KEY_TOPOLOGY).unwrap().bytes;
    for len in 0..bytes.len() {
        store.put(KEY_TOPOLOGY, &bytes[..len]);
        let mut cache = FleetCache::new();
        cache.refresh(&store);
        assert!(
            cache.model("a").is_none() || cache.model("b").is_none(),
            "{len} bytes"
        );
    }
}

#[test]
fn the_summary_counts_pods_and_rolesets_and_follows_the_topology() {
    let store = MemoryStore::new();
    let mut cache = FleetCache::new();
    assert_eq!(cache.summary(), []);
    push(&store, &two_models(1), 1_000);
    cache.refresh(&store);
    let status = |name: &str, pods, usable, rolesets| ModelStatus {
        name: name.to_owned(),
        pods,
        usable,
        rolesets,
    };
    let expected = [status("a", 3, 2, 1), status("b", 3, 3, 1)];
    assert_eq!(cache.summary(), expected);
    assert!(cache.decoded.is_empty(), "a summary keeps no model");
    push(
        &store,
        &topology(1, 2).model(model("b").pod(pod("c").draining())),
        2_000,
    );
    cache.refresh(&store);
    assert_eq!(cache.summary(), [status("b", 1, 0, 0)]);
}
