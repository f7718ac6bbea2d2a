use super::*;
use crate::testkit::{MemoryStore, TopologyBuilder, model, topology};
use pd_wire::samples::PodSample;

fn store_with(topology: &TopologyBuilder) -> MemoryStore {
    let store = MemoryStore::new();
    accept_topology(&store, &topology.json(), 1_000).unwrap();
    store
}

fn held(store: &MemoryStore) -> (Vec<u8>, Vec<u8>) {
    let bytes = |key| {
        store
            .get(key)
            .map(|stored| stored.bytes)
            .unwrap_or_default()
    };
    (bytes(KEY_TOPOLOGY), bytes(KEY_SAMPLES))
}

#[test]
fn a_newer_topology_is_stored_and_the_head_moves() {
    let first = topology(5, 1).model(model("m").pair("r"));
    let store = store_with(&first);
    let reply = accept_topology(&store, &topology(5, 2).json(), 2_000).unwrap();
    assert_eq!(
        (reply.epoch, reply.sequence, reply.topology_sequence),
        (5, 2, 2)
    );
    assert_eq!(
        (reply.error.as_str(), reply.agent.as_str()),
        ("", "agent-1")
    );
    let head = Head::parse(&store.get(KEY_HEAD).unwrap().bytes);
    assert_eq!(
        head,
        Head {
            topology: (5, 2),
            samples: (0, 0)
        }
    );
}

#[test]
fn what_is_not_newer_is_a_conflict_that_names_what_is_held() {
    let store = store_with(&topology(5, 7).model(model("m").pair("r")));
    let before = held(&store);
    for older in [
        topology(5, 7),
        topology(5, 6),
        topology(4, 9),
        topology(5, 8).agent("other"),
    ] {
        let refusal = accept_topology(&store, &older.json(), 2_000).unwrap_err();
        assert_eq!(
            (
                refusal.status.code(),
                refusal.reply.epoch,
                refusal.reply.sequence
            ),
            (409, 5, 7)
        );
        assert_eq!(refusal.reply.agent, "agent-1");
        assert!(
            refusal.reply.error.contains("higher epoch"),
            "{}",
            refusal.reply.error
        );
    }
    assert_eq!(held(&store), before);
    assert_eq!(
        accept_topology(&store, &topology(6, 0).agent("other").json(), 0)
            .unwrap()
            .epoch,
        6
    );
}

#[test]
fn samples_need_the_topology_they_index() {
    let first = topology(5, 1).model(model("m").pair("r"));
    let empty = MemoryStore::new();
    let refusal = accept_samples(&empty, &first.samples(1).encode(), 0).unwrap_err();
    assert_eq!(
        (refusal.status, refusal.reply.epoch),
        (PushStatus::Conflict, 0)
    );

    let store = store_with(&first);
    for wrong in [
        topology(5, 2).samples(9),
        topology(4, 1).samples(9),
        topology(6, 1).samples(9),
        topology(5, 1).agent("other").samples(9),
    ] {
        let refusal = accept_samples(&store, &wrong.encode(), 0).unwrap_err();
        assert_eq!(
            (refusal.status, refusal.reply.topology_sequence),
            (PushStatus::Conflict, 1)
        );
        assert!(refusal.reply.error.contains("push the topology first"));
    }
    let reply = accept_samples(&store, &first.samples(3).encode(), 0).unwrap();
    assert_eq!((reply.sequence, reply.topology_sequence), (3, 1));
    let again = accept_samples(&store, &first.samples(3).encode(), 0).unwrap_err();
    assert_eq!(
        (again.status, again.reply.sequence),
        (PushStatus::Conflict, 3)
    );
    assert!(accept_samples(&store, &first.samples(4).encode(), 0).is_ok());
}

#[test]
fn every_kind_of_wrong_message_has_its_status_and_changes_nothing() {
    let first = topology(5, 1).model(model("m").pair("r"));
    let store = store_with(&first);
    accept_samples(&store, &first.samples(1).encode(), 0).unwrap();
    let before = held(&store);
    let status = |bytes: &[u8]| accept_topology(&store, bytes, 0).unwrap_err().status.code();
    assert_eq!(status(b"{"), 400);
    assert_eq!(status(br#"{"stamp":{"version":2}}"#), 426);
    assert_eq!(status(&vec![b' '; pd_wire::topology::MAX_MESSAGE + 1]), 413);
    assert_eq!(status(&topology(6, 1).replicas(0).json()), 400);

    let status = |bytes: &[u8]| accept_samples(&store, bytes, 0).unwrap_err().status.code();
    assert_eq!(status(b"PDX"), 400);
    assert_eq!(status(b"PDS\x02"), 426);
    assert_eq!(status(&vec![0; pd_wire::topology::MAX_MESSAGE + 1]), 413);
    let mut stray = first.samples(2);
    stray.pods = vec![PodSample {
        ordinal: 2,
        ..PodSample::default()
    }];
    assert_eq!(status(&stray.encode()), 400);
    assert_eq!(held(&store), before);
}

#[test]
fn of_two_pushes_at_once_the_newer_one_stays() {
    let store = store_with(&topology(5, 1));
    store.interpose(KEY_TOPOLOGY, |store| {
        accept_topology(store, &topology(5, 3).json(), 0).unwrap();
    });
    let late = accept_topology(&store, &topology(5, 2).json(), 0).unwrap_err();
    assert_eq!(
        (late.status, late.reply.sequence),
        (PushStatus::Conflict, 3)
    );

    store.interpose(KEY_TOPOLOGY, |store| {
        accept_topology(store, &topology(5, 4).json(), 0).unwrap();
    });
    assert_eq!(
        accept_topology(&store, &topology(5, 5).json(), 0)
            .unwrap()
            .sequence,
        5
    );
    let head = Head::parse(&store.get(KEY_HEAD).unwrap().bytes);
    assert_eq!(head.topology, (5, 5));
}

#[test]
fn the_head_only_ever_rises() {
    let store = MemoryStore::new();
    store.interpose(KEY_HEAD, |store| {
        accept_topology(store, &topology(5, 2).json(), 0).unwrap();
    });
    accept_topology(&store, &topology(5, 1).json(), 0).unwrap();
    let head = Head::parse(&store.get(KEY_HEAD).unwrap().bytes);
    assert_eq!(head.topology, (5, 2));
}

#[test]
fn a_store_that_does_not_take_the_message_is_said_so() {
    let store = store_with(&topology(5, 1));
    store.refuse(true);
    let refusal = accept_topology(&store, &topology(5, 2).json(), 0).unwrap_err();
    assert_eq!((refusal.status.code(), refusal.reply.sequence), (503, 1));
    store.refuse(false);
    store.lose_swaps(KEY_TOPOLOGY, MAX_TRIES);
    let refusal = accept_topology(&store, &topology(5, 2).json(), 0).unwrap_err();
    assert_eq!(refusal.status, PushStatus::Unavailable);
    assert!(accept_topology(&store, &topology(5, 2).json(), 0).is_ok());
}

#[test]
fn a_stored_form_that_cannot_be_read_is_replaced() {
    let store = MemoryStore::new();
    store.put(KEY_TOPOLOGY, b"\xffunknown");
    store.put(KEY_HEAD, b"\xff");
    let first = topology(1, 1).model(model("m").pair("r"));
    accept_topology(&store, &first.json(), 0).unwrap();
    store.put(KEY_SAMPLES, b"");
    accept_samples(&store, &first.samples(1).encode(), 0).unwrap();
    let head = Head::parse(&store.get(KEY_HEAD).unwrap().bytes);
    assert_eq!(
        head,
        Head {
            topology: (1, 1),
            samples: (1, 1)
        }
    );
}
