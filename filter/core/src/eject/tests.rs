//! What ejects, for how long, and who notices: one subject, one model, several VMs.

use super::*;
use crate::fleet::ModelFleet;
use crate::testkit::{MemoryStore, ModelBuilder, model, pod, topology};
use std::rc::Rc;

const RULES: Rules = Rules {
    after: 3,
    base_ms: 10_000,
    max_ms: 60_000,
    percent: 50,
    trial_ms: 30_000,
};
const A: Subject = Subject::Pod(PodKey(1));

fn fails(entry: &mut Entry, cause: Cause, at_ms: u64) -> Option<Change> {
    entry.fails(cause, at_ms, at_ms, &RULES, || true)
}

fn ejected(for_ms: u64, failures: u16) -> Option<Change> {
    Some(Change::Ejected { for_ms, failures })
}

/// An entry that was ejected at 1000.
fn out() -> Entry {
    let mut entry = Entry::new(A);
    assert_eq!(fails(&mut entry, Cause::Status, 1000), None);
    assert_eq!(fails(&mut entry, Cause::Timeout, 1000), None);
    assert_eq!(
        fails(&mut entry, Cause::Transport, 1000),
        ejected(10_000, 3)
    );
    entry
}

#[test]
fn failures_in_a_row_eject_and_a_success_between_them_starts_anew() {
    let mut entry = Entry::new(A);
    for _ in 0..2 {
        fails(&mut entry, Cause::Transport, 1000);
        fails(&mut entry, Cause::Transport, 1000);
        assert_eq!(entry.failures, 2);
        assert_eq!(entry.works(false, 1000, 1000, &RULES), None);
        assert_eq!(entry.failures, 2, "an answer that only began says little");
        assert_eq!(entry.works(true, 1000, 1000, &RULES), None);
        assert!(entry.is_forgotten(1000));
    }
    assert_eq!(out().phase(1000), Phase::Out);
}

#[test]
fn the_first_connection_that_ends_early_does_not_count() {
    let mut entry = Entry::new(A);
    let changes: Vec<_> = (0..4).map(|_| fails(&mut entry, Cause::Cut, 5)).collect();
    assert_eq!(changes, [None, None, None, ejected(10_000, 3)]);
    // Nor does it when it was the trial: the next request is.
    entry.begin_trial(10_005, &RULES);
    assert_eq!(entry.phase(10_006), Phase::OnTrial);
    assert_eq!(fails(&mut entry, Cause::Cut, 10_006), None);
    assert_eq!(entry.phase(10_006), Phase::Due);
    assert_eq!(fails(&mut entry, Cause::Cut, 10_007), ejected(20_000, 1));
}

#[test]
fn every_further_ejection_takes_twice_as_long_up_to_the_longest() {
    let mut entry = out();
    let mut now_ms = 1000;
    for for_ms in [20_000, 40_000, 60_000, 60_000] {
        now_ms = entry.until_ms;
        entry.begin_trial(now_ms, &RULES);
        assert_eq!(
            fails(&mut entry, Cause::Transport, now_ms),
            ejected(for_ms, 1)
        );
    }
    entry.times = 200;
    now_ms += 60_000;
    assert_eq!(
        fails(&mut entry, Cause::Transport, now_ms),
        ejected(60_000, 1)
    );
    assert_eq!(entry.times, 201);
}

#[test]
fn after_a_long_calm_the_time_starts_small_again() {
    for (calm_ms, for_ms) in [(59_999, 20_000), (60_000, 10_000)] {
        let mut entry = out();
        assert_eq!(
            entry.works(true, 11_000, 11_000, &RULES),
            Some(Change::Back)
        );
        assert!(!entry.is_forgotten(11_000 + 59_999));
        let now_ms = 11_000 + calm_ms;
        assert_eq!(fails(&mut entry, Cause::Status, now_ms), None);
        assert_eq!(fails(&mut entry, Cause::Status, now_ms), None);
        assert_eq!(fails(&mut entry, Cause::Status, now_ms), ejected(for_ms, 3));
    }
}

#[test]
fn a_streak_that_takes_too_long_starts_anew() {
    let mut entry = Entry::new(A);
    fails(&mut entry, Cause::Status, 0);
    fails(&mut entry, Cause::Status, 59_999);
    assert_eq!(entry.failures, 2);
    assert!(entry.is_forgotten(60_000));
    fails(&mut entry, Cause::Status, 60_000);
    assert_eq!(entry.failures, 1);
}

#[test]
fn what_was_chosen_before_the_time_was_over_is_old_news() {
    let mut entry = out();
    let before = entry;
    for chosen_at_ms in [0, 1000, 10_999] {
        for now_ms in [1000, 5000, 12_000] {
            let failed = entry.fails(Cause::Status, chosen_at_ms, now_ms, &RULES, || true);
            assert_eq!(failed, None);
            assert_eq!(entry.works(true, chosen_at_ms, now_ms, &RULES), None);
            assert_eq!(entry, before);
        }
    }
    entry.begin_trial(11_000, &RULES);
    assert_eq!(
        entry.works(false, 11_000, 11_500, &RULES),
        Some(Change::Back)
    );
    assert_eq!(
        entry.fails(Cause::Status, 10_999, 12_000, &RULES, || true),
        None
    );
}

#[test]
fn an_answer_brings_back_on_parole_and_a_good_end_for_good() {
    let mut entry = out();
    entry.begin_trial(11_000, &RULES);
    assert_eq!(
        entry.works(false, 11_000, 11_500, &RULES),
        Some(Change::Back)
    );
    let mut cut = entry;
    assert_eq!(
        fails(&mut cut, Cause::Transport, 12_000),
        ejected(20_000, 3)
    );
    assert_eq!(entry.works(true, 11_000, 20_000, &RULES), None);
    assert_eq!(entry.failures, 0);
    assert_eq!(fails(&mut entry, Cause::Transport, 20_001), None);
}

#[test]
fn a_trial_is_one_request_and_is_given_up_in_time() {
    let mut entry = out();
    assert_eq!(entry.phase(10_999), Phase::Out);
    entry.begin_trial(10_999, &RULES);
    assert_eq!(entry.phase(11_000), Phase::Due);
    entry.begin_trial(11_000, &RULES);
    assert_eq!(entry.phase(11_000), Phase::OnTrial);
    assert_eq!(entry.phase(40_999), Phase::OnTrial);
    assert_eq!(entry.phase(41_000), Phase::Due);
}

#[test]
fn whom_the_model_needs_is_kept_and_goes_when_it_can_be_spared() {
    let mut entry = Entry::new(A);
    for _ in 0..10 {
        let change = entry.fails(Cause::Status, 5, 5, &RULES, || false);
        assert_eq!((change, entry.failures.min(3)), (None, entry.failures));
    }
    assert_eq!(fails(&mut entry, Cause::Status, 6), ejected(10_000, 3));
}

#[test]
fn only_a_broken_engines_status_counts() {
    let counted: Vec<u16> = (100..600)
        .filter(|status| Cause::of_status(*status).is_some())
        .collect();
    let wanted: Vec<u16> = (500..600).filter(|status| *status != 503).collect();
    assert_eq!(counted, wanted);
}

// === a model ===

fn key(fleet: &ModelFleet, name: &str) -> PodKey {
    let found = fleet.pods.iter().find(|pod| pod.name == name);
    found.expect("the fleet has it").key
}

fn position(fleet: &ModelFleet, name: &str) -> u16 {
    let at = fleet.pods.iter().position(|pod| pod.name == name);
    u16::try_from(at.expect("the fleet has it")).unwrap()
}

/// A pod's name, or a pair's `prefill+decode`.
fn subject(fleet: &ModelFleet, name: &str) -> Subject {
    match name.split_once('+') {
        Some((prefill, decode)) => Subject::Pair(key(fleet, prefill), key(fleet, decode)),
        None => Subject::Pod(key(fleet, name)),
    }
}

/// Ejected one after the other; the last comes back last.
fn all_out(fleet: &ModelFleet, names: &[&str]) -> Vec<Entry> {
    let times = 5000..;
    names
        .iter()
        .zip(times)
        .map(|(name, until_ms)| Entry {
            ejected: true,
            until_ms,
            ..Entry::new(subject(fleet, name))
        })
        .collect()
}

/// One roleset of the given numbers of pods, `p0…` and `d0…`.
fn roleset(prefill: usize, decode: usize) -> ModelBuilder {
    let mut served = model("m");
    for n in 0..prefill {
        served = served.pod(pod(&format!("p{n}")).prefill().roleset("r"));
    }
    for n in 0..decode {
        served = served.pod(pod(&format!("d{n}")).decode().roleset("r"));
    }
    served
}

#[test]
fn a_model_keeps_half_of_its_pairs_and_the_last_of_everything() {
    let pairs = |n: usize| (0..n).fold(model("m"), |it, n| it.pair(&format!("r{n}")));
    let singles = |n: usize| (0..n).fold(model("m"), |it, n| it.pod(pod(&format!("s{n}"))));
    let cases: Vec<(ModelBuilder, u64, &[&str], &[&str])> = vec![
        (pairs(1), 50, &["r0-p", "r0-d", "r0-p+r0-d"], &[]),
        (pairs(1), 100, &["r0-p", "r0-d"], &[]),
        (pairs(2), 50, &["r1-d", "r0-p"], &["r1-d"]),
        (pairs(2), 49, &["r0-p"], &[]),
        (pairs(3), 50, &["r2-p", "r0-p"], &["r2-p"]),
        (
            pairs(4),
            50,
            &["r0-p", "r0-d", "r1-d", "r2-p"],
            &["r0-p", "r0-d", "r1-d"],
        ),
        (
            pairs(4),
            100,
            &["r0-p", "r1-p", "r2-p", "r3-p"],
            &["r0-p", "r1-p", "r2-p"],
        ),
        (pairs(4), 0, &["r0-p"], &[]),
        // Two prefill and two decode pods make four pairs.
        (roleset(2, 2), 50, &["p0", "d0", "p0+d0"], &["p0", "p0+d0"]),
        (
            roleset(2, 2),
            50,
            &["p0+d0", "p1+d1", "p0+d1"],
            &["p0+d0", "p1+d1"],
        ),
        (roleset(2, 2), 75, &["p0+d0", "p0"], &["p0+d0", "p0"]),
        (roleset(1, 3), 50, &["p0", "d0", "d1"], &["d0"]),
        (singles(1), 50, &["s0"], &[]),
        (singles(3), 50, &["s0", "s1"], &["s0"]),
        (singles(2), 100, &["s0", "s1"], &["s0"]),
        // A lone standard pod may go while there are pairs, whatever became of them.
        (
            pairs(2).pod(pod("s0")),
            50,
            &["s0", "r0-p", "r1-p"],
            &["s0", "r0-p"],
        ),
        (
            pairs(1).pod(pod("s0")).pod(pod("s1")),
            50,
            &["s0", "s1", "r0-p"],
            &["s0"],
        ),
        (pairs(2).pod(pod("s0")), 0, &["s0"], &[]),
        // Decode pods without a prefill pod serve alone.
        (
            model("m").pod(pod("d0").decode()).pod(pod("d1").decode()),
            50,
            &["d0", "d1"],
            &["d0"],
        ),
        // Pods that are not usable are no reserve, and cannot be taken.
        (
            pairs(1)
                .pair("r1")
                .pod(pod("x").prefill().roleset("r2").unready()),
            50,
            &["x", "r0-p"],
            &["r0-p"],
        ),
    ];
    for (at, (served, percent, given, kept_out)) in cases.into_iter().enumerate() {
        let fleet = served.fleet();
        let entries = all_out(&fleet, given);
        let view = View::of(&fleet, &entries, percent, 4000).unwrap();
        let avoided: Vec<&str> = given
            .iter()
            .copied()
            .filter(|name| match name.split_once('+') {
                Some((prefill, decode)) => {
                    let pair = (position(&fleet, prefill), position(&fleet, decode));
                    view.blocked_pairs().contains(&pair)
                }
                None => !view.allows(position(&fleet, name)),
            })
            .collect();
        assert_eq!(avoided, kept_out, "case {at}");
        // What is decided at a failure agrees.
        for (last, name) in given.iter().enumerate() {
            let may = View::may_take(&fleet, &entries[..last], subject(&fleet, name), percent);
            assert_eq!(may, kept_out.contains(name), "case {at}, {name}");
        }
    }
}

#[test]
fn who_is_due_for_a_trial_may_be_chosen_and_is_named() {
    let fleet = (0..4)
        .fold(model("m"), |it, n| it.pair(&format!("r{n}")))
        .fleet();
    let entries = all_out(&fleet, &["r0-p", "r1-p+r1-d"]);
    let [p0, d0, p1, d1] = ["r0-p", "r0-d", "r1-p", "r1-d"].map(|name| position(&fleet, name));
    let view = View::of(&fleet, &entries, 50, 4999).unwrap();
    assert!(!view.allows(p0) && view.trials(Some(p0), d0).is_empty());
    assert_eq!(view.blocked_pairs(), [(p1, d1)]);
    let view = View::of(&fleet, &entries, 50, 5001).unwrap();
    assert!(view.allows(p0) && view.blocked_pairs().is_empty());
    assert_eq!(view.trials(Some(p0), d0), [subject(&fleet, "r0-p")]);
    assert_eq!(view.trials(Some(p1), d1), [subject(&fleet, "r1-p+r1-d")]);
    assert!(view.trials(None, d1).is_empty());
    assert_eq!(View::of(&fleet, &[Entry::new(A)], 50, 5001), None);
}

// === several VMs ===

/// Some VMs over one store, and a model of two pairs.
struct Stand {
    store: MemoryStore,
    fleet: Rc<ModelFleet>,
    vms: Vec<(Ejections, FleetCache)>,
}

impl Stand {
    fn new(vms: usize) -> Self {
        let store = MemoryStore::new();
        let mut stand = Self {
            fleet: model("m").fleet(),
            vms: (0..vms).map(|_| Default::default()).collect(),
            store,
        };
        stand.push(1, model("m").pair("r0").pair("r1"));
        stand
    }

    fn push(&mut self, sequence: u64, served: ModelBuilder) {
        let bytes = topology(1, sequence).model(served).json();
        crate::fleet::accept_topology(&self.store, &bytes, 0).unwrap();
        for (_, cache) in &mut self.vms {
            cache.refresh(&self.store);
            self.fleet = cache.model("m").unwrap();
        }
    }

    fn report(&mut self, vm: usize, name: &str, outcome: Outcome, now_ms: u64) -> Option<Change> {
        let evidence = Evidence {
            subject: subject(&self.fleet, name),
            outcome,
            chosen_at_ms: now_ms,
        };
        let eject = &mut self.vms[vm].0;
        eject.report(&self.store, &self.fleet, &evidence, &RULES, now_ms)
    }

    fn tick(&mut self, now_ms: u64) {
        for (vm, (eject, cache)) in self.vms.iter_mut().enumerate() {
            eject.tick(&self.store, cache, now_ms, vm == 0);
        }
    }

    fn avoids(&self, vm: usize, name: &str, now_ms: u64) -> bool {
        let view = self.vms[vm].0.view(&self.fleet, &RULES, now_ms);
        view.is_some_and(|view| !view.allows(position(&self.fleet, name)))
    }

    fn stored(&self) -> Vec<Entry> {
        let stored = self.store.get(&record::key(self.fleet.slot));
        stored.map_or_else(Vec::new, |stored| record::decode(&stored.bytes))
    }
}

const REFUSED: Outcome = Outcome::Fails(Cause::Transport);

#[test]
fn failures_of_all_vms_count_together_and_all_avoid_the_pod_after_a_tick() {
    let mut stand = Stand::new(3);
    assert_eq!(stand.report(0, "r0-p", REFUSED, 100), None);
    assert_eq!(stand.report(1, "r0-p", REFUSED, 110), None);
    assert_eq!(stand.report(2, "r0-p", REFUSED, 120), ejected(10_000, 3));
    assert!(stand.avoids(2, "r0-p", 130), "who ejects knows at once");
    assert!(!stand.avoids(0, "r0-p", 130));
    stand.tick(200);
    assert!((0..3).all(|vm| stand.avoids(vm, "r0-p", 200)));
    assert!((0..3).all(|vm| !stand.avoids(vm, "r1-p", 200)));
    // The other pair is the last one.
    for now_ms in 300..320 {
        assert_eq!(stand.report(0, "r1-d", REFUSED, now_ms), None);
    }
}

#[test]
fn a_healthy_fleet_reads_and_writes_nothing() {
    let mut stand = Stand::new(2);
    stand.tick(100);
    let before = stand.store.calls();
    for now_ms in 100..200 {
        assert!(stand.vms[0].0.view(&stand.fleet, &RULES, now_ms).is_none());
        for outcome in [Outcome::Answers, Outcome::Works] {
            assert_eq!(stand.report(0, "r0-p", outcome, now_ms), None);
        }
    }
    assert_eq!(stand.store.calls(), before);
    // The first success after a failure is a write, the next is not.
    stand.report(0, "r0-p", REFUSED, 200);
    stand.report(0, "r0-p", Outcome::Works, 201);
    assert_eq!(stand.stored(), []);
    let after = stand.store.calls();
    stand.report(0, "r0-p", Outcome::Works, 202);
    assert_eq!(stand.store.calls(), after);
}

#[test]
fn one_vm_wins_the_trial_and_its_success_brings_the_pod_back_for_all() {
    let mut stand = Stand::new(3);
    for now_ms in 0..3 {
        stand.report(0, "r0-p", REFUSED, now_ms);
    }
    stand.tick(100);
    let (p, d) = (
        position(&stand.fleet, "r0-p"),
        position(&stand.fleet, "r0-d"),
    );
    let now_ms = 10_002;
    let mut won = Vec::new();
    for vm in [1, 0, 2] {
        let view = stand.vms[vm].0.view(&stand.fleet, &RULES, now_ms).unwrap();
        let trials = view.trials(Some(p), d);
        assert_eq!(trials, [subject(&stand.fleet, "r0-p")]);
        let eject = &mut stand.vms[vm].0;
        if eject.admit(&stand.store, stand.fleet.slot, &trials, &RULES, now_ms) {
            won.push(vm);
        } else {
            assert!(stand.avoids(vm, "r0-p", now_ms), "who lost knows at once");
        }
    }
    assert_eq!(won, [1]);
    assert_eq!(
        stand.report(1, "r0-p", Outcome::Answers, 10_010),
        Some(Change::Back)
    );
    stand.tick(10_100);
    assert!((0..3).all(|vm| !stand.avoids(vm, "r0-p", 10_100)));
    stand.report(2, "r0-p", Outcome::Works, 10_200);
    assert_eq!(stand.stored()[0].failures, 0);
    stand.tick(70_010);
    assert_eq!(stand.stored(), []);
}

#[test]
fn a_trial_of_two_at_once_needs_both() {
    let mut stand = Stand::new(2);
    stand.push(
        2,
        (0..4).fold(model("m"), |it, n| it.pair(&format!("r{n}"))),
    );
    for now_ms in 0..3 {
        stand.report(0, "r0-p", REFUSED, now_ms);
        stand.report(0, "r0-d", REFUSED, now_ms);
    }
    let both = ["r0-p", "r0-d"].map(|name| subject(&stand.fleet, name));
    let slot = stand.fleet.slot;
    let Stand { store, vms, .. } = &mut stand;
    let [(one, _), (other, _)] = vms.as_mut_slice() else {
        unreachable!()
    };
    assert!(other.admit(store, slot, &both[1..], &RULES, 11_000));
    assert!(!one.admit(store, slot, &both, &RULES, 11_000));
    assert!(one.admit(store, slot, &both[..1], &RULES, 11_000));
    assert!(one.admit(store, slot, &[], &RULES, 11_000));
}

#[test]
fn lost_swaps_are_tried_again_and_given_up_in_the_end() {
    let mut stand = Stand::new(1);
    let key = record::key(stand.fleet.slot);
    for (races, counted) in [(0, 1), (7, 2), (8, 2)] {
        stand.store.lose_swaps(&key, races);
        stand.report(0, "r0-p", REFUSED, 100);
        assert_eq!(stand.stored()[0].failures, counted);
    }
    stand.store.refuse(true);
    assert_eq!(stand.report(0, "r0-p", REFUSED, 100), None);
    let trials = [subject(&stand.fleet, "r0-p")];
    let slot = stand.fleet.slot;
    stand.store.refuse(false);
    stand.report(0, "r0-p", REFUSED, 100);
    stand.store.refuse(true);
    let Stand { store, vms, .. } = &mut stand;
    assert!(!vms[0].0.admit(store, slot, &trials, &RULES, 20_000));
}

#[test]
fn pods_that_left_and_old_records_are_dropped() {
    let mut stand = Stand::new(2);
    for now_ms in 0..3 {
        stand.report(0, "r0-p", REFUSED, now_ms);
    }
    stand.report(0, "r1-p+r1-d", REFUSED, 3);
    stand.tick(1000);
    assert_eq!(stand.stored().len(), 2);
    // The same name with another UID is another pod.
    let again = model("m")
        .pod(pod("r0-p").prefill().roleset("r0").uid("new"))
        .pod(pod("r0-d").decode().roleset("r0"))
        .pair("r1");
    stand.push(2, again);
    assert!(!stand.avoids(0, "r0-p", 1500));
    stand.tick(1500);
    assert_eq!(stand.stored().len(), 2, "once a second");
    stand.tick(2000);
    assert_eq!(stand.stored().len(), 1);
    stand.tick(61_000);
    assert_eq!(stand.stored(), []);
    // Somebody else's failure is not noted for pods that are not there.
    let gone = Evidence {
        subject: Subject::Pod(PodKey(7)),
        outcome: REFUSED,
        chosen_at_ms: 0,
    };
    let Stand { store, vms, fleet } = &mut stand;
    vms[0].0.report(store, fleet, &gone, &RULES, 61_000);
    assert_eq!(stand.stored(), []);
}

#[test]
fn a_model_that_left_is_forgotten_by_every_vm() {
    let mut stand = Stand::new(1);
    for now_ms in 0..3 {
        stand.report(0, "r0-p", REFUSED, now_ms);
    }
    let bytes = topology(1, 2).json();
    crate::fleet::accept_topology(&stand.store, &bytes, 0).unwrap();
    stand.vms[0].1.refresh(&stand.store);
    stand.tick(1000);
    assert!(stand.vms[0].0.models.is_empty());
}

#[test]
fn garbage_and_the_other_format_count_as_empty() {
    let mut stand = Stand::new(1);
    let entries = all_out(&stand.fleet, &["r0-p", "r0-p+r0-d"]);
    let good = record::encode(&entries);
    assert_eq!(record::decode(&good).len(), 2);
    let mut other = good.clone();
    other[0] = crate::OTHER_FORMAT;
    let long = [good.clone(), vec![0; 46 * MAX_ENTRIES]].concat();
    let key = record::key(stand.fleet.slot);
    for broken in [&other[..], &good[..20], &long, b"", &[9; 4]] {
        stand.store.put(&key, broken);
        stand.tick(100);
        assert!(!stand.avoids(0, "r0-p", 100));
        stand.report(0, "r0-p", REFUSED, 100);
        assert_eq!(stand.stored().len(), 1);
    }
}

#[test]
fn records_read_back_as_written() {
    let entries: Vec<Entry> = [Cause::Cut, Cause::HandOver, Cause::BadResponse]
        .into_iter()
        .zip(1..)
        .map(|(cause, n)| Entry {
            cause,
            failures: 7,
            spared: n == 1,
            times: 3,
            ejected: n != 2,
            until_ms: u64::MAX,
            trial_until_ms: 4,
            forget_at_ms: n,
            subject: Subject::Pair(PodKey(n), PodKey(u64::MAX)),
        })
        .collect();
    assert_eq!(record::decode(&record::encode(&entries)), entries);
}

#[test]
fn a_full_record_forgets_the_least_and_keeps_the_ejected() {
    let full = |ejected: bool| -> Vec<Entry> {
        (0..MAX_ENTRIES as u64)
            .map(|n| Entry {
                ejected: ejected || n == 0,
                forget_at_ms: n,
                until_ms: n,
                ..Entry::new(Subject::Pod(PodKey(n)))
            })
            .collect()
    };
    for (all, dropped) in [(false, 1), (true, 0)] {
        let mut entries = full(all);
        record::make_room(&mut entries);
        assert_eq!(entries.len(), MAX_ENTRIES - 1);
        assert!(
            entries
                .iter()
                .all(|entry| entry.subject != Subject::Pod(PodKey(dropped)))
        );
    }
}

#[test]
fn switched_off_nothing_is_noted_and_nobody_is_avoided() {
    let mut stand = Stand::new(1);
    for now_ms in 0..3 {
        stand.report(0, "r0-p", REFUSED, now_ms);
    }
    let off = Rules { after: 0, ..RULES };
    let Stand { store, vms, fleet } = &mut stand;
    assert!(vms[0].0.view(fleet, &off, 100).is_none());
    let before = store.calls();
    let evidence = Evidence {
        subject: subject(fleet, "r1-p"),
        outcome: REFUSED,
        chosen_at_ms: 0,
    };
    assert_eq!(vms[0].0.report(store, fleet, &evidence, &off, 0), None);
    assert_eq!(store.calls(), before);
}

#[test]
fn the_status_page_lists_who_is_out_and_why() {
    let mut stand = Stand::new(1);
    for now_ms in 0..3 {
        stand.report(0, "r0-p+r0-d", Outcome::Fails(Cause::HandOver), now_ms);
    }
    stand.report(0, "r1-p", REFUSED, 3);
    let Stand { store, vms, .. } = &mut stand;
    let mut listed = |now_ms| Ejections::list(store, &mut vms[0].1, now_ms);
    let out = pd_wire::control::Ejected {
        model: "m".to_owned(),
        pods: vec!["default/r0-p".to_owned(), "default/r0-d".to_owned()],
        phase: "ejected".to_owned(),
        remaining_ms: 9002,
        cause: "hand_over".to_owned(),
        times: 1,
    };
    assert_eq!(listed(1000), std::slice::from_ref(&out));
    let due = &listed(10_002)[0];
    assert_eq!((due.phase.as_str(), due.remaining_ms), ("trial_due", 0));
}

#[test]
fn with_many_models_each_is_read_every_few_ticks() {
    let store = MemoryStore::new();
    let mut builder = topology(1, 1);
    for n in 0..150 {
        let served = model(&format!("m{n:03}"));
        builder = builder.model(served.pair(&format!("{n}-r0")).pair(&format!("{n}-r1")));
    }
    crate::fleet::accept_topology(&store, &builder.json(), 0).unwrap();
    let mut cache = FleetCache::new();
    cache.refresh(&store);
    let mut eject = Ejections::default();
    let mut writer = Ejections::default();
    for n in 0..150 {
        let fleet = cache.model(&format!("m{n:03}")).unwrap();
        let evidence = Evidence {
            subject: subject(&fleet, &format!("{n}-r0-p")),
            outcome: REFUSED,
            chosen_at_ms: 0,
        };
        writer.report(&store, &fleet, &evidence, &RULES, 0);
    }
    let known: Vec<usize> = (0..3)
        .map(|_| {
            eject.tick(&store, &mut cache, 100, false);
            eject.models.len()
        })
        .collect();
    assert_eq!(known, [64, 128, 150]);
    let (reads, _) = store.calls();
    eject.tick(&store, &mut cache, 200, false);
    assert_eq!(store.calls().0 - reads, 64);
}
