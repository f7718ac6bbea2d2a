use super::*;
use crate::fleet::{FleetCache, accept_topology};
use crate::ledger::peers::STILL_TICKS;
use crate::ledger::slots::{self, SLOTS, Table};
use crate::ledger::{Amounts, DecodeCharge, PodKey, PrefillCharge};
use crate::testkit::{MemoryStore, model, topology};
use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

const P: PodKey = PodKey(1);
const D: PodKey = PodKey(2);
const VITALS: Vitals = Vitals {
    live_flows: 0,
    memory_pages: 0,
};

fn pair(tokens: u64) -> Pick {
    Pick {
        prefill: Some(PrefillCharge { pod: P, tokens }),
        decode: Some(DecodeCharge { pod: D, tokens }),
        ttl_ms: 1_000,
    }
}

fn charge(ledger: &mut Ledger, store: &MemoryStore, tokens: u64) -> Charged<()> {
    let charged = ledger.charge(store, 0, 10, |_| Ok::<_, Infallible>((pair(tokens), ())));
    charged.unwrap()
}

fn kv(ledger: &mut Ledger, store: &MemoryStore) -> u64 {
    ledger.totals(store, 0).get(P).kv_tokens
}

fn ticks(ledger: &mut Ledger, store: &MemoryStore, ticks: u8) -> TickReport {
    let mut sum = TickReport::default();
    for _ in 0..ticks {
        let report = ledger.tick(store, VITALS);
        sum.fenced |= report.fenced;
        sum.declared_dead += report.declared_dead;
        sum.lost_flows += report.lost_flows;
        sum.unreadable += report.unreadable;
        (sum.overflow, sum.dirty_models) = (report.overflow, report.dirty_models);
    }
    sum
}

#[test]
fn every_vm_sees_what_the_others_charge_and_give_back() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    let of_a = charge(&mut a, &store, 100);
    let of_b = charge(&mut b, &store, 20);
    assert_eq!(
        (of_a.state, of_b.state),
        (ChargeState::Published, ChargeState::Published)
    );
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (120, 120));

    assert!(a.prefill_done(of_a.id) && a.decode_sent(of_a.id));
    assert_eq!(b.totals(&store, 0).get(P).active_tokens, 120);
    let of_another = charge(&mut a, &store, 0);
    assert!(a.release(of_another.id));
    let totals = b.totals(&store, 0);
    assert_eq!(totals.get(P).active_tokens, 20);
    assert_eq!(
        (totals.get(D).decode_running, totals.get(D).decode_pending),
        (1, 2)
    );

    assert!(a.release(of_a.id) && !a.release(of_a.id));
    assert!(b.release(of_b.id));
    a.publish(&store);
    b.publish(&store);
    assert!(a.totals(&store, 0).is_zero() && b.totals(&store, 0).is_zero());
    assert!(record::is_idle(&store, 0));
}

#[test]
fn a_lost_race_chooses_again_with_the_winner_in_sight() {
    let store = MemoryStore::new();
    let mut a = Ledger::new(1);
    let b = Rc::new(RefCell::new(Ledger::new(2)));
    let rival = Rc::clone(&b);
    store.interpose(&record::key(FORMAT, 0), move |store| {
        let _kept = charge(&mut rival.borrow_mut(), store, 7);
    });
    let mut seen = Vec::new();
    let charged = a
        .charge(&store, 0, 10, |totals| {
            seen.push(totals.get(P).kv_tokens);
            Ok::<_, Infallible>((pair(1), totals.get(P).kv_tokens))
        })
        .unwrap();
    assert_eq!(seen, [0, 7]);
    assert_eq!((charged.decision, charged.lost_races), (7, 1));
    assert_eq!(
        (kv(&mut a, &store), kv(&mut b.borrow_mut(), &store)),
        (8, 8)
    );
}

#[test]
fn after_eight_lost_races_the_last_choice_is_charged_and_published_at_the_tick() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    store.lose_swaps(&record::key(FORMAT, 0), 8);
    let mut choices = 0;
    let charged = a
        .charge(&store, 0, 10, |_| {
            choices += 1;
            Ok::<_, Infallible>((pair(5), ()))
        })
        .unwrap();
    assert_eq!(
        (choices, charged.lost_races, charged.state),
        (8, 8, ChargeState::Pending)
    );
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (5, 0));
    assert_eq!(a.tick(&store, VITALS).dirty_models, 0);
    assert_eq!(kv(&mut b, &store), 5);
}

#[test]
fn a_release_that_loses_its_swaps_is_shown_at_the_tick() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    let charged = charge(&mut a, &store, 5);
    store.lose_swaps(&record::key(FORMAT, 0), 24);
    assert!(a.release(charged.id));
    a.publish(&store);
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (0, 5));
    assert_eq!(a.tick(&store, VITALS).dirty_models, 1);
    a.tick(&store, VITALS);
    assert_eq!(kv(&mut b, &store), 0);
}

#[test]
fn a_choice_that_fails_charges_nothing() {
    let store = MemoryStore::new();
    let mut a = Ledger::new(1);
    let failed = a.charge(&store, 0, 10, |_| Err::<(Pick, ()), _>("no pod"));
    assert_eq!(failed.unwrap_err(), "no pod");
    assert!(a.live_charges() == 0 && record::is_idle(&store, 0));
}

#[test]
fn what_a_dead_vm_held_is_dropped_and_its_slot_reused() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    let _lost_with_the_vm = charge(&mut a, &store, 5);
    let dead = a.vm().unwrap();
    let live_flows = 7;
    a.tick(
        &store,
        Vitals {
            live_flows,
            ..VITALS
        },
    );
    assert_eq!(ticks(&mut b, &store, STILL_TICKS).declared_dead, 0);
    assert_eq!(kv(&mut b, &store), 5);
    let report = ticks(&mut b, &store, 1);
    assert_eq!((report.declared_dead, report.lost_flows), (1, live_flows));
    assert_eq!(kv(&mut b, &store), 0);
    assert!(record::is_idle(&store, 0));

    let mut c = Ledger::new(3);
    c.tick(&store, VITALS);
    let reused = c.vm().unwrap();
    assert_eq!(
        (reused.slot, reused.generation),
        (dead.slot, dead.generation + 1)
    );
}

#[test]
fn a_vm_fenced_by_mistake_charges_its_live_requests_again_under_another_name() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    let first = charge(&mut a, &store, 5);
    let name = a.vm();
    ticks(&mut b, &store, STILL_TICKS + 1);
    assert_eq!(kv(&mut b, &store), 0);

    // It does not know yet, and writes under its old name: nobody counts that.
    let second = charge(&mut a, &store, 1);
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (6, 0));

    let report = a.tick(&store, VITALS);
    assert!(report.fenced && a.vm() != name);
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (6, 6));
    assert!(a.release(first.id) && a.release(second.id));
    a.publish(&store);
    assert!(b.totals(&store, 0).is_zero() && record::is_idle(&store, 0));
}

#[test]
fn a_pause_of_the_whole_process_and_slow_ticks_fence_nobody() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    for round in 0..200 {
        assert_eq!(a.tick(&store, VITALS).declared_dead, 0);
        if round % usize::from(STILL_TICKS - 1) == 0 {
            assert_eq!(b.tick(&store, VITALS), TickReport::default());
        }
    }
}

/// A table with all numbered slots taken.
fn full_table() -> Table {
    let mut table = Table::default();
    while table.claim_numbered().is_some() {}
    table
}

/// Ticks while the owners of all numbered slots beat.
fn tick_in_company(ledger: &mut Ledger, store: &MemoryStore) -> TickReport {
    let key = slots::key(FORMAT);
    let mut table = Table::parse(&store.get(&key).unwrap().bytes).unwrap();
    let numbered: Vec<VmId> = table
        .owners()
        .map(|(vm, _)| vm)
        .filter(|vm| vm.slot != OVERFLOW)
        .collect();
    numbered.into_iter().for_each(|vm| table.beat(vm, VITALS));
    store.put(&key, &table.encode(FORMAT));
    ledger.tick(store, VITALS)
}

#[test]
fn vms_without_a_slot_charge_exactly_are_recovered_and_move_when_one_is_free() {
    let store = MemoryStore::new();
    store.put(&slots::key(FORMAT), &full_table().encode(FORMAT));
    let (mut a, mut b, mut c) = (Ledger::new(9), Ledger::new(9), Ledger::new(4));
    let of_a = charge(&mut a, &store, 1);
    let of_b = charge(&mut b, &store, 20);
    let _lost_with_the_vm = charge(&mut c, &store, 300);
    let names = [a.vm().unwrap(), b.vm().unwrap(), c.vm().unwrap()];
    assert!(names.iter().all(|vm| vm.slot == OVERFLOW));
    assert_ne!(names[0], names[1]);
    assert_eq!(kv(&mut a, &store), 321);
    assert!(b.release(of_b.id));
    b.publish(&store);
    assert_eq!(kv(&mut a, &store), 301);

    for _ in 0..=STILL_TICKS {
        assert!(tick_in_company(&mut a, &store).overflow && b.tick(&store, VITALS).overflow);
    }
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (1, 1));

    // The numbered VMs stop beating: their slots become free, and A moves into one.
    for _ in 0..=STILL_TICKS + 1 {
        a.tick(&store, VITALS);
        b.tick(&store, VITALS);
    }
    assert_ne!(a.vm().unwrap().slot, OVERFLOW);
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (1, 1));
    assert!(a.release(of_a.id));
    a.publish(&store);
    ticks(&mut b, &store, 1);
    assert!(b.totals(&store, 0).is_zero() && record::is_idle(&store, 0));
    let owners = Table::parse(&store.get(&slots::key(FORMAT)).unwrap().bytes).unwrap();
    assert_eq!(owners.owners().count(), 2);
}

#[test]
fn without_any_place_left_charges_stay_exact_in_the_vm() {
    let store = MemoryStore::new();
    let mut table = full_table();
    while table.claim(1).is_some() {}
    assert_eq!(table.owners().count(), SLOTS + slots::MAX_OVERFLOW);
    store.put(&slots::key(FORMAT), &table.encode(FORMAT));
    let mut a = Ledger::new(1);
    let charged = charge(&mut a, &store, 5);
    assert_eq!((charged.state, a.vm()), (ChargeState::Pending, None));
    assert_eq!(kv(&mut a, &store), 5);
    let report = a.tick(&store, VITALS);
    assert!(report.overflow && report.dirty_models == 1);
    assert!(a.release(charged.id));
    assert_eq!(a.tick(&store, VITALS).dirty_models, 0);
}

#[test]
fn an_older_release_is_counted_while_one_of_its_vms_beats() {
    let store = MemoryStore::new();
    let (mut old, mut new) = (Ledger::of_format(1, 1), Ledger::of_format(1, 2));
    ticks(&mut old, &store, 1);
    ticks(&mut new, &store, 1);
    ticks(&mut old, &store, 1);
    let of_old = charge(&mut old, &store, 5);
    let of_new = charge(&mut new, &store, 70);
    assert_eq!((kv(&mut old, &store), kv(&mut new, &store)), (75, 75));
    assert!(new.release(of_new.id));
    new.publish(&store);
    assert_eq!((kv(&mut old, &store), kv(&mut new, &store)), (5, 5));

    let before = store.get(&record::key(1, 0));
    assert_eq!(ticks(&mut new, &store, STILL_TICKS + 1).declared_dead, 0);
    assert_eq!(kv(&mut new, &store), 0);
    assert_eq!(store.get(&record::key(1, 0)), before);

    // It was only slow: its beat makes it count again.
    ticks(&mut old, &store, 1);
    ticks(&mut new, &store, 1);
    assert_eq!(kv(&mut new, &store), 5);
    assert!(old.release(of_old.id));
    old.publish(&store);
    assert_eq!(kv(&mut new, &store), 0);
}

#[test]
fn records_that_cannot_be_read_count_as_empty_are_reported_and_come_back() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1_001), Ledger::new(1_002));
    ticks(&mut a, &store, 1);
    ticks(&mut b, &store, 1);
    let of_a = charge(&mut a, &store, 5);
    store.put(&record::key(FORMAT, 0), b"garbage");
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (5, 0));
    assert_eq!(b.tick(&store, VITALS).unreadable, 1);

    store.put(&slots::key(FORMAT), b"garbage");
    let report = ticks(&mut a, &store, 1);
    assert!(report.fenced && report.unreadable > 0);
    ticks(&mut b, &store, 1);
    assert_ne!(a.vm(), b.vm());
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (5, 5));
    assert!(a.release(of_a.id));
    a.publish(&store);
    assert!(b.totals(&store, 0).is_zero());
}

#[test]
fn a_store_that_refuses_writes_delays_publication_and_loses_nothing() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    store.refuse(true);
    let charged = charge(&mut a, &store, 5);
    assert_eq!(charged.state, ChargeState::Pending);
    assert_eq!((kv(&mut a, &store), kv(&mut b, &store)), (5, 0));
    store.refuse(false);
    ticks(&mut a, &store, 1);
    assert_eq!(kv(&mut b, &store), 5);
}

#[test]
fn a_leaked_charge_is_given_back_after_its_ttl() {
    let store = MemoryStore::new();
    let mut a = Ledger::new(1);
    let charged = charge(&mut a, &store, 5);
    assert_eq!(a.expire(&store, 1_009), []);
    let expired = a.expire(&store, 1_010);
    assert_eq!(
        (expired[0].id, expired[0].prefill),
        (charged.id, pair(5).prefill)
    );
    assert!(record::is_idle(&store, 0) && !a.release(charged.id));
}

#[test]
fn ledgers_are_reported_by_name_and_pods_that_left_by_key() {
    let store = MemoryStore::new();
    let mut fleet = FleetCache::new();
    let pushed = topology(1, 1).model(model("m").pair("r"));
    accept_topology(&store, &pushed.json(), 0).unwrap();
    fleet.refresh(&store);
    let decode = fleet.model("m").unwrap().pod(0).unwrap().key;
    let mut a = Ledger::new(1);
    let pick = Pick {
        decode: Some(DecodeCharge {
            pod: decode,
            tokens: 9,
        }),
        ..pair(4)
    };
    let charged = a
        .charge(&store, 0, 10, |_| Ok::<_, Infallible>((pick, ())))
        .unwrap();
    let elsewhere = a
        .charge(&store, 200, 10, |_| Ok::<_, Infallible>((pair(1), ())))
        .unwrap();

    let report = a.ledgers(&store, &mut fleet);
    let models: Vec<&str> = report.models.iter().map(|it| it.model.as_str()).collect();
    assert_eq!(models, ["m", "slot-200"]);
    let pods: Vec<(&str, &str, u64)> = report.models[0]
        .pods
        .iter()
        .map(|pod| {
            (
                pod.namespace.as_str(),
                pod.name.as_str(),
                pod.charged.decode_tokens,
            )
        })
        .collect();
    assert_eq!(pods, [("", "0000000000000001", 0), ("default", "r-d", 9)]);
    assert_eq!(
        (report.total.kv_tokens, report.total.decode_tokens),
        (5, 10)
    );

    a.release(charged.id);
    a.release(elsewhere.id);
    assert_eq!(
        a.ledgers(&store, &mut fleet),
        pd_wire::control::Ledgers::default()
    );
}

#[test]
fn vms_are_reported_with_their_vitals() {
    let store = MemoryStore::new();
    let mut a = Ledger::new(1);
    a.tick(
        &store,
        Vitals {
            live_flows: 3,
            memory_pages: 40,
        },
    );
    let vms = Ledger::new(2).vms(&store);
    assert_eq!(vms.len(), 1);
    assert_eq!((vms[0].slot, vms[0].generation, vms[0].beat), (0, 1, 1));
    assert_eq!((vms[0].live_flows, vms[0].memory_pages), (3, 40));
}

#[test]
fn a_sum_shown_to_others_survives_a_record_written_over_by_somebody_else() {
    let store = MemoryStore::new();
    let (mut a, mut b) = (Ledger::new(1), Ledger::new(2));
    let _kept = charge(&mut a, &store, 5);
    let mut writer = RecordWriter::default();
    writer.begin(FORMAT);
    store.put(&record::key(FORMAT, 0), writer.finish().unwrap());
    assert_eq!(kv(&mut b, &store), 0);
    ticks(&mut a, &store, u8::MAX);
    ticks(&mut a, &store, 1);
    assert_eq!(
        b.totals(&store, 0).get(P),
        Amounts {
            active_tokens: 5,
            kv_tokens: 5,
            prefill_requests: 1,
            ..Amounts::default()
        }
    );
}

#[test]
fn one_live_vm_is_the_janitor_and_another_follows_when_it_dies() {
    let store = MemoryStore::new();
    let (mut a, mut b, mut c) = (Ledger::new(1), Ledger::new(2), Ledger::new(3));
    assert!(!a.is_janitor(), "not before it has a slot");
    for _ in 0..3 {
        for ledger in [&mut a, &mut b, &mut c] {
            ledger.tick(&store, VITALS);
        }
    }
    assert_eq!(
        [&a, &b, &c].map(|ledger| ledger.is_janitor()),
        [true, false, false]
    );
    for _ in 0..=STILL_TICKS {
        for ledger in [&mut b, &mut c] {
            ledger.tick(&store, VITALS);
        }
    }
    assert_eq!([&b, &c].map(|ledger| ledger.is_janitor()), [true, false]);
    // Fenced: it takes the lowest slot again, and the others see that.
    for ledger in [&mut a, &mut b, &mut c] {
        ledger.tick(&store, VITALS);
    }
    assert_eq!(
        [&a, &b, &c].map(|ledger| ledger.is_janitor()),
        [true, false, false]
    );
}

#[test]
fn an_expired_charge_is_told_by_the_names_of_its_pods() {
    let store = MemoryStore::new();
    accept_topology(
        &store,
        &topology(1, 1).model(model("m").pair("r")).json(),
        0,
    )
    .unwrap();
    let mut fleet = FleetCache::new();
    fleet.refresh(&store);
    let served = fleet.model("m").unwrap();
    let prefill = served.pods.iter().find(|pod| pod.name == "r-p");
    let mut ledger = Ledger::new(1);
    let pick = Pick {
        prefill: Some(PrefillCharge {
            pod: prefill.unwrap().key,
            tokens: 3_600,
        }),
        decode: Some(DecodeCharge {
            pod: PodKey(9),
            tokens: 100,
        }),
        ttl_ms: 1_000,
    };
    let Ok(_kept) = ledger.charge(&store, served.slot, 10, |_| Ok::<_, Infallible>((pick, ())));
    let expired = ledger.expire(&store, 1_510);
    assert_eq!(expired.len(), 1);
    assert_eq!(
        expired[0].describe(&mut fleet),
        "a charge of model m, held for 1500 ms, 3600 tokens at prefill pod default/r-p, \
         100 tokens at decode pod /0000000000000009"
    );
    assert_eq!(ledger.live_charges(), 0);
}
