//! Properties of ejections, over random fleets and interleavings of sixteen VMs.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

use pd_core::eject::{
    Cause, Change, Ejections, Evidence, MAX_ENTRIES, Outcome, Rules, Subject, View,
};
use pd_core::fleet::{FleetCache, ModelFleet, accept_topology};
use pd_core::port::SharedStore;
use pd_core::testkit::{MemoryStore, ModelBuilder, model, pod, topology};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::rc::Rc;

const VMS: usize = 16;
const CAUSES: [Cause; 6] = [
    Cause::Transport,
    Cause::Cut,
    Cause::Timeout,
    Cause::Status,
    Cause::BadResponse,
    Cause::HandOver,
];

/// What one VM does.
#[derive(Clone, Debug)]
enum Act {
    /// A leg ended: whose, how, and how long after its pods were chosen.
    Report(usize, Outcome, u64),
    /// Asks for the trials of these pods.
    Choose(usize, usize),
    Tick,
    /// The VM dies and a fresh one takes its place.
    Die,
    /// Time passes for all.
    Wait(u64),
}

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        1 => Just(Outcome::Works),
        1 => Just(Outcome::Answers),
        4 => prop::sample::select(&CAUSES[..]).prop_map(Outcome::Fails),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let wait = prop_oneof![4 => 0..200_u64, 2 => 0..15_000_u64, 1 => 0..100_000_u64];
    prop_oneof![
        8 => (0..64_usize, outcome(), prop_oneof![Just(0), 0..20_000_u64])
            .prop_map(|(who, how, age)| Act::Report(who, how, age)),
        3 => (0..64_usize, 0..64_usize).prop_map(|(p, d)| Act::Choose(p, d)),
        3 => Just(Act::Tick),
        1 => Just(Act::Die),
        3 => wait.prop_map(Act::Wait),
    ]
}

/// Rolesets of prefill and decode pods, standard pods, and decode pods that stand alone.
fn fleet() -> impl Strategy<Value = ModelBuilder> {
    let rolesets = prop::collection::vec((0..4_usize, 0..4_usize), 0..4);
    (rolesets, 0..3_usize, 0..3_usize).prop_map(|(rolesets, standard, alone)| {
        let mut served = model("m").pod(pod("first"));
        for (set, (prefill, decode)) in rolesets.into_iter().enumerate() {
            let name = format!("r{set}");
            for n in 0..prefill {
                served = served.pod(pod(&format!("{name}-p{n}")).prefill().roleset(&name));
            }
            for n in 0..decode {
                served = served.pod(pod(&format!("{name}-d{n}")).decode().roleset(&name));
            }
        }
        for n in 0..standard {
            served = served.pod(pod(&format!("s{n}")));
        }
        for n in 0..alone {
            served = served.pod(pod(&format!("a{n}")).decode());
        }
        served
    })
}

fn rules() -> impl Strategy<Value = Rules> {
    (1..6_u16, 1..20_000_u64, 1..100_000_u64, 0..=100_u64).prop_map(
        |(after, base_ms, max_ms, percent)| Rules {
            after,
            base_ms,
            max_ms,
            percent,
            trial_ms: base_ms.max(5000),
        },
    )
}

/// Everything that can be ejected.
fn subjects(fleet: &ModelFleet) -> Vec<Subject> {
    let pods = fleet.pods.iter().map(|pod| Subject::Pod(pod.key));
    let key = |at: u16| fleet.pods[usize::from(at)].key;
    let pairs = fleet.rolesets.iter().flat_map(|set| {
        let decodes = move |p| set.decode.iter().map(move |d| (p, *d));
        set.prefill.iter().flat_map(move |p| decodes(*p))
    });
    pods.chain(pairs.map(|(p, d)| Subject::Pair(key(p), key(d))))
        .collect()
}

/// Pairs of a fleet, and those that a view leaves.
fn pairs(fleet: &ModelFleet, view: Option<&View>) -> (usize, usize) {
    let (mut all, mut left) = (0, 0);
    for set in &*fleet.rolesets {
        for p in &set.prefill {
            for d in &set.decode {
                all += 1;
                let open = view.is_none_or(|view| {
                    view.allows(*p) && view.allows(*d) && !view.blocked_pairs().contains(&(*p, *d))
                });
                left += usize::from(open);
            }
        }
    }
    (all, left)
}

/// Pods that serve alone, and those that a view leaves.
fn singles(fleet: &ModelFleet, view: Option<&View>) -> (usize, usize) {
    let in_set = |at: u16| {
        fleet
            .rolesets
            .iter()
            .any(|set| set.prefill.contains(&at) || set.decode.contains(&at))
    };
    let alone: Vec<u16> = (0..u16::try_from(fleet.pods.len()).unwrap())
        .filter(|at| !in_set(*at))
        .filter(|at| fleet.pods[usize::from(*at)].role != pd_wire::topology::Role::Prefill)
        .collect();
    let left = alone
        .iter()
        .filter(|at| view.is_none_or(|view| view.allows(**at)));
    (alone.len(), left.count())
}

struct World {
    store: MemoryStore,
    fleet: Rc<ModelFleet>,
    subjects: Vec<Subject>,
    rules: Rules,
    vms: Vec<Ejections>,
    caches: Vec<FleetCache>,
    now_ms: u64,
}

impl World {
    fn new(served: ModelBuilder, rules: Rules) -> Self {
        let store = MemoryStore::new();
        accept_topology(&store, &topology(1, 1).model(served).json(), 0).unwrap();
        let caches: Vec<FleetCache> = (0..VMS)
            .map(|_| {
                let mut cache = FleetCache::new();
                cache.refresh(&store);
                cache
            })
            .collect();
        let mut world = Self {
            fleet: model("m").fleet(),
            subjects: Vec::new(),
            rules,
            vms: (0..VMS).map(|_| Ejections::default()).collect(),
            caches,
            now_ms: 1_000_000,
            store,
        };
        world.fleet = world.caches[0].model("m").unwrap();
        world.subjects = subjects(&world.fleet);
        world
    }

    fn act(&mut self, vm: usize, act: &Act) -> Option<Change> {
        match *act {
            Act::Report(who, outcome, age_ms) => {
                let evidence = Evidence {
                    subject: self.subjects[who % self.subjects.len()],
                    outcome,
                    chosen_at_ms: self.now_ms - age_ms,
                };
                let (store, fleet) = (&self.store, &self.fleet);
                return self.vms[vm].report(store, fleet, &evidence, &self.rules, self.now_ms);
            }
            Act::Choose(prefill, decode) => {
                let pods = self.fleet.pods.len();
                let at = |n: usize| u16::try_from(n % pods).unwrap();
                let view = self.vms[vm].view(&self.fleet, &self.rules, self.now_ms);
                let trials = view.map(|view| view.trials(Some(at(prefill)), at(decode)));
                let trials = trials.unwrap_or_default();
                let slot = self.fleet.slot;
                let won = self.vms[vm].admit(&self.store, slot, &trials, &self.rules, self.now_ms);
                // What others brought back meanwhile needs no trial.
                if won && trials.iter().any(|subject| self.is_on_trial(*subject)) {
                    for other in 0..VMS {
                        let again = self.vms[other].admit(
                            &self.store,
                            slot,
                            &trials,
                            &self.rules,
                            self.now_ms,
                        );
                        assert!(!again, "a trial is won once");
                    }
                }
            }
            Act::Tick => {
                let cache = &mut self.caches[vm];
                self.vms[vm].tick(&self.store, cache, self.now_ms, vm == 0);
            }
            Act::Die => self.vms[vm] = Ejections::default(),
            Act::Wait(ms) => self.now_ms += ms,
        }
        None
    }

    fn is_on_trial(&mut self, subject: Subject) -> bool {
        let name = |key| {
            let pod = self.fleet.pods.iter().find(|pod| pod.key == key).unwrap();
            format!("{}/{}", pod.namespace, pod.name)
        };
        let pods: Vec<String> = subject.pods().map(name).collect();
        let list = Ejections::list(&self.store, &mut self.caches[0], self.now_ms);
        let found = list.iter().find(|ejected| ejected.pods == pods);
        found.is_some_and(|ejected| {
            assert_eq!(ejected.phase, "on_trial", "the one who won has it");
            true
        })
    }

    fn tick_all(&mut self) {
        for vm in 0..VMS {
            self.act(vm, &Act::Tick);
        }
    }

    fn stored(&self) -> Vec<u8> {
        let key = format!("pd{}.eject.{}", pd_core::FORMAT, self.fleet.slot);
        self.store.get(&key).map_or_else(Vec::new, |it| it.bytes)
    }

    /// What a view may never take.
    fn assert_enough_is_left(&self) -> Result<(), TestCaseError> {
        let percent = usize::try_from(self.rules.percent).unwrap();
        for vm in &self.vms {
            let view = vm.view(&self.fleet, &self.rules, self.now_ms);
            let (all, left) = pairs(&self.fleet, view.as_ref());
            prop_assert!((all - left) * 100 <= all * percent, "{left} of {all} pairs");
            prop_assert!(left > 0 || all == 0);
            let (alone, kept) = singles(&self.fleet, view.as_ref());
            let spare = all > 0 && alone == 1 && percent > 0;
            prop_assert!((alone - kept) * 100 <= alone * percent || spare);
            prop_assert!(left + kept > 0);
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn half_stays_records_are_bounded_and_successes_close_everything(
        served in fleet(),
        rules in rules(),
        acts in prop::collection::vec((0..VMS, act()), 0..200),
    ) {
        let mut world = World::new(served, rules);
        for (vm, act) in &acts {
            if let Some(Change::Ejected { for_ms, .. }) = world.act(*vm, act) {
                prop_assert!(for_ms <= rules.max_ms);
            }
            prop_assert!(world.stored().len() <= 4 + 46 * MAX_ENTRIES);
            world.assert_enough_is_left()?;
        }
        // From now on everything works: one round of answers and nobody is out.
        world.now_ms += rules.max_ms.max(rules.trial_ms);
        world.tick_all();
        for who in 0..world.subjects.len() {
            world.act(who % VMS, &Act::Report(who, Outcome::Works, 0));
        }
        world.tick_all();
        for vm in &world.vms {
            prop_assert!(vm.view(&world.fleet, &rules, world.now_ms).is_none());
        }
        prop_assert!(Ejections::list(&world.store, &mut world.caches[0], world.now_ms).is_empty());
        // And after a calm time nothing is remembered.
        world.now_ms += rules.max_ms.max(1000);
        world.tick_all();
        prop_assert!(world.stored().len() <= 4);
    }

    #[test]
    fn the_same_story_ends_the_same(
        served in fleet(),
        rules in rules(),
        acts in prop::collection::vec((0..VMS, act()), 0..100),
    ) {
        let run = || {
            let mut world = World::new(served.clone(), rules);
            let changes: Vec<_> = acts.iter().map(|(vm, act)| world.act(*vm, act)).collect();
            let views: Vec<_> = world
                .vms
                .iter()
                .map(|vm| vm.view(&world.fleet, &rules, world.now_ms))
                .collect();
            (changes, views, world.stored())
        };
        prop_assert_eq!(run(), run());
    }

    #[test]
    fn failures_alone_eject_after_so_many_by_whichever_vms(
        rules in rules(),
        vms in prop::collection::vec(0..VMS, 6),
    ) {
        let rules = Rules { percent: 50, ..rules };
        let mut world = World::new(model("m").pair("r0").pair("r1"), rules);
        let who = world.subjects.iter().position(|it| matches!(it, Subject::Pair(..))).unwrap();
        let fails = Act::Report(who, Outcome::Fails(Cause::HandOver), 0);
        let at = vms.iter().position(|vm| world.act(*vm, &fails).is_some());
        prop_assert_eq!(at, Some(usize::from(rules.after) - 1));
    }
}

#[test]
fn a_model_of_thousands_of_pods_keeps_a_bounded_record() {
    let mut served = model("m");
    for n in 0..400 {
        served = served.pair(&format!("r{n:03}"));
    }
    let rules = Rules {
        after: 1,
        base_ms: 10_000,
        max_ms: 300_000,
        percent: 100,
        trial_ms: 30_000,
    };
    let mut world = World::new(served, rules);
    let mut ejected = BTreeSet::new();
    for who in 0..world.subjects.len() {
        let fails = Act::Report(who, Outcome::Fails(Cause::Transport), 0);
        if world.act(who % VMS, &fails).is_some() {
            ejected.insert(who);
        }
    }
    assert!(ejected.len() > 256);
    assert_eq!(world.stored().len(), 4 + 46 * MAX_ENTRIES);
}
