//! Properties of the ledger: whatever VMs do to each other, sums are those of the live charges
//! once everybody has ticked, and exactly zero when nothing is left.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// Helpers of tests, which clippy only knows by their attribute.
#![allow(clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

use pd_core::ledger::peers::STILL_TICKS;
use pd_core::ledger::{
    Amounts, ChargeId, DecodeCharge, Ledger, MODEL_SLOTS, Pick, PodKey, PrefillCharge, Vitals,
    record, slots,
};
use pd_core::port::SharedStore;
use pd_core::session::{SessionTable, growth};
use pd_core::testkit::MemoryStore;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;

const VMS: usize = 16;
const PODS: u64 = 5;
const MODELS: u16 = 2;
const VITALS: Vitals = Vitals {
    live_flows: 0,
    memory_pages: 0,
};
/// No sum of a test comes near this; what lies above was negative.
const NEGATIVE: u64 = 1 << 40;

#[derive(Clone, Debug)]
enum Op {
    Charge {
        vm: usize,
        model: u16,
        prefill: Option<u64>,
        decode: u64,
        tokens: u64,
        /// Session whose growth alone is charged to the prefill pod.
        session: Option<u64>,
    },
    Prefilled {
        vm: usize,
        nth: usize,
    },
    Sent {
        vm: usize,
        nth: usize,
    },
    Release {
        vm: usize,
        nth: usize,
    },
    Tick {
        vm: usize,
    },
    /// The VM is gone; another, perhaps of the other format, takes its place in the worker.
    Die {
        vm: usize,
        format: u8,
    },
    /// The VM does not tick while all others do, until it is fenced.
    Stall {
        vm: usize,
    },
    LoseSwaps {
        table: bool,
        format: u8,
        model: u16,
        races: u32,
    },
    /// Another VM acts between a read and the write that follows it.
    Rival {
        vm: usize,
        format: u8,
        model: u16,
        tokens: u64,
        release: bool,
    },
    Refuse(bool),
    Settle,
}

#[derive(Clone, Copy)]
struct Live {
    id: ChargeId,
    model: u16,
    pick: Pick,
    routed_at_ms: u64,
    prefilled: bool,
    sent: bool,
}

struct Vm {
    ledger: Ledger,
    live: Vec<Live>,
    dead: bool,
}

struct World {
    store: MemoryStore,
    vms: Vec<Rc<RefCell<Vm>>>,
    now_ms: u64,
    nonce: u32,
}

impl Vm {
    fn new(nonce: u32, format: u8) -> Rc<RefCell<Self>> {
        Rc::new(RefCell::new(Self {
            ledger: Ledger::of_format(nonce, format),
            live: Vec::new(),
            dead: false,
        }))
    }

    fn charge(
        &mut self,
        store: &MemoryStore,
        model: u16,
        now_ms: u64,
        mut choose: impl FnMut(&pd_core::ledger::Totals) -> Pick,
    ) {
        let charged = self.ledger.charge(store, model, now_ms, |totals| {
            for (_, amounts) in totals.sorted() {
                assert!(!negative(&amounts), "{amounts:?}");
            }
            let pick = choose(totals);
            Ok::<_, Infallible>((pick, pick))
        });
        let Ok(charged) = charged;
        self.live.push(Live {
            id: charged.id,
            model,
            pick: charged.decision,
            routed_at_ms: now_ms,
            prefilled: false,
            sent: false,
        });
    }

    fn release(&mut self, nth: usize) {
        if !self.live.is_empty() {
            let live = self.live.remove(nth % self.live.len());
            assert!(self.ledger.release(live.id));
            assert!(!self.ledger.release(live.id));
        }
    }
}

impl World {
    fn new(formats: &[u8]) -> Self {
        let vms = (0_u32..)
            .zip(formats)
            .map(|(nonce, format)| Vm::new(nonce, *format))
            .collect();
        Self {
            store: MemoryStore::new(),
            vms,
            now_ms: 1_000,
            nonce: 100,
        }
    }

    fn vm(&self, at: usize) -> Rc<RefCell<Vm>> {
        Rc::clone(&self.vms[at % self.vms.len()])
    }

    fn tick(&self, at: usize) {
        self.vm(at).borrow_mut().ledger.tick(&self.store, VITALS);
    }

    fn apply(&mut self, op: Op) {
        self.now_ms += 7;
        let store = self.store.clone();
        match op {
            Op::Charge {
                vm,
                model,
                prefill,
                decode,
                tokens,
                session,
            } => {
                // Small, so that sessions also push each other out.
                let table = SessionTable::new(3, 1_000);
                let turn = session.map(|key| table.recall(&store, "m", key, self.now_ms));
                let before = turn
                    .as_ref()
                    .and_then(pd_core::session::Turn::tokens_before);
                let mut pick = pick(prefill, decode, tokens);
                if let Some(charge) = &mut pick.prefill {
                    charge.tokens = 3_500 + growth(tokens, before).unwrap_or(tokens);
                }
                self.vm(vm)
                    .borrow_mut()
                    .charge(&store, model, self.now_ms, |_| pick);
                if let Some(turn) = turn {
                    table.remember(&store, turn, tokens, self.now_ms);
                }
            }
            Op::Prefilled { vm, nth } | Op::Sent { vm, nth } => {
                let vm = self.vm(vm);
                let Vm { ledger, live, .. } = &mut *vm.borrow_mut();
                if live.is_empty() {
                    return;
                }
                let at = nth % live.len();
                if matches!(op, Op::Prefilled { .. }) {
                    assert_eq!(ledger.prefill_done(live[at].id), !live[at].prefilled);
                    live[at].prefilled = true;
                } else {
                    assert_eq!(ledger.decode_sent(live[at].id), !live[at].sent);
                    live[at].sent = true;
                }
            }
            Op::Release { vm, nth } => self.vm(vm).borrow_mut().release(nth),
            Op::Tick { vm } => self.tick(vm),
            Op::Die { vm, format } => {
                self.nonce += 1;
                let at = vm % self.vms.len();
                self.vms[at].borrow_mut().dead = true;
                self.vms[at] = Vm::new(self.nonce, format);
            }
            Op::Stall { vm } => {
                let stalled = vm % self.vms.len();
                for _ in 0..=STILL_TICKS {
                    (0..self.vms.len())
                        .filter(|at| *at != stalled)
                        .for_each(|at| self.tick(at));
                }
            }
            Op::LoseSwaps {
                table,
                format,
                model,
                races,
            } => {
                let key = if table {
                    slots::key(format)
                } else {
                    record::key(format, model)
                };
                store.lose_swaps(&key, races);
            }
            Op::Rival {
                vm,
                format,
                model,
                tokens,
                release,
            } => {
                let (vm, now_ms) = (self.vm(vm), self.now_ms);
                store.interpose(&record::key(format, model), move |store| {
                    // The VM whose write is interrupted cannot act meanwhile.
                    let Ok(mut vm) = vm.try_borrow_mut() else {
                        return;
                    };
                    if vm.dead {
                        return;
                    }
                    if release {
                        vm.release(0);
                    } else {
                        vm.charge(store, model, now_ms, |_| pick(Some(0), 1, tokens));
                    }
                });
            }
            Op::Refuse(refuse) => store.refuse(refuse),
            Op::Settle => self.settle(),
        }
    }

    /// Once every VM has ticked often enough, all see exactly the live charges.
    fn settle(&mut self) {
        self.store.refuse(false);
        for format in [1, 2] {
            self.store.lose_swaps(&slots::key(format), 0);
            (0..MODELS).for_each(|model| self.store.lose_swaps(&record::key(format, model), 0));
        }
        for _ in 0..=2 * STILL_TICKS {
            (0..self.vms.len()).for_each(|at| self.tick(at));
        }
        for model in 0..MODELS {
            let expected = self.expected(model);
            for vm in &self.vms {
                let seen = vm.borrow_mut().ledger.totals(&self.store, model).sorted();
                assert_eq!(seen, expected, "model {model}");
            }
        }
    }

    /// The sums of the live charges, worked out one by one.
    fn expected(&self, model: u16) -> Vec<(PodKey, Amounts)> {
        let mut sums: BTreeMap<PodKey, Amounts> = BTreeMap::new();
        for vm in &self.vms {
            for live in vm.borrow().live.iter().filter(|live| live.model == model) {
                if let Some(charge) = live.pick.prefill {
                    let sum = sums.entry(charge.pod).or_default();
                    sum.kv_tokens += charge.tokens;
                    if !live.prefilled {
                        sum.active_tokens += charge.tokens;
                        sum.prefill_requests += 1;
                    }
                }
                if let Some(charge) = live.pick.decode {
                    let sum = sums.entry(charge.pod).or_default();
                    sum.decode_running += u32::from(live.sent);
                    sum.decode_pending += u32::from(!live.sent);
                    sum.decode_tokens += charge.tokens;
                    sum.routed_at_sum_ms += live.routed_at_ms;
                }
            }
        }
        sums.into_iter().filter(|(_, sum)| !sum.is_zero()).collect()
    }

    /// Ticks until every record was looked at: a fenced VM that did not know yet may have written
    /// after its cells were dropped, and such cells count nowhere but stay until then.
    fn sweep(&mut self) {
        for _ in 0..MODEL_SLOTS {
            (0..self.vms.len()).for_each(|at| self.tick(at));
        }
    }

    fn release_all(&mut self) {
        for vm in &self.vms {
            loop {
                let mut vm = vm.borrow_mut();
                if vm.live.is_empty() {
                    break;
                }
                vm.release(0);
            }
        }
    }

    /// Releases until nobody holds anything: a rival still waiting may charge meanwhile.
    fn empty(&mut self) {
        for _ in 0..100 {
            self.release_all();
            self.settle();
            if self.vms.iter().all(|vm| vm.borrow().live.is_empty()) {
                return;
            }
        }
        panic!("charges never end");
    }
}

fn pick(prefill: Option<u64>, decode: u64, tokens: u64) -> Pick {
    Pick {
        prefill: prefill.map(|pod| PrefillCharge {
            pod: PodKey(pod),
            tokens: tokens + 3_500,
        }),
        decode: Some(DecodeCharge {
            pod: PodKey(decode),
            tokens,
        }),
        ttl_ms: 0,
    }
}

fn negative(amounts: &Amounts) -> bool {
    let a = amounts;
    let counts = [a.prefill_requests, a.decode_pending, a.decode_running];
    let sums = [
        a.active_tokens,
        a.kv_tokens,
        a.decode_tokens,
        a.routed_at_sum_ms,
    ];
    counts.into_iter().any(|count| count > 1 << 20) || sums.into_iter().any(|sum| sum > NEGATIVE)
}

fn op() -> impl Strategy<Value = Op> {
    let vm = 0..VMS;
    let model = 0..MODELS;
    let format = 1_u8..=2;
    let (pod, nth, tokens) = (0..PODS, 0_usize..8, 0_u64..100_000);
    let charge = (
        vm.clone(),
        model.clone(),
        prop::option::of(pod.clone()),
        pod,
        tokens.clone(),
        prop::option::of(0_u64..6),
    )
        .prop_map(|(vm, model, prefill, decode, tokens, session)| Op::Charge {
            vm,
            model,
            prefill,
            decode,
            tokens,
            session,
        });
    let lose = (any::<bool>(), format.clone(), model.clone(), 1_u32..20).prop_map(
        |(table, format, model, races)| Op::LoseSwaps {
            table,
            format,
            model,
            races,
        },
    );
    let rival = (vm.clone(), format.clone(), model, tokens, any::<bool>()).prop_map(
        |(vm, format, model, tokens, release)| Op::Rival {
            vm,
            format,
            model,
            tokens,
            release,
        },
    );
    prop_oneof![
        8 => charge,
        3 => (vm.clone(), nth.clone()).prop_map(|(vm, nth)| Op::Prefilled { vm, nth }),
        3 => (vm.clone(), nth.clone()).prop_map(|(vm, nth)| Op::Sent { vm, nth }),
        5 => (vm.clone(), nth).prop_map(|(vm, nth)| Op::Release { vm, nth }),
        4 => vm.clone().prop_map(|vm| Op::Tick { vm }),
        1 => (vm.clone(), format).prop_map(|(vm, format)| Op::Die { vm, format }),
        1 => vm.prop_map(|vm| Op::Stall { vm }),
        2 => lose,
        3 => rival,
        1 => any::<bool>().prop_map(Op::Refuse),
        1 => Just(Op::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_ends_at_the_live_charges_and_then_at_zero(
        formats in prop::collection::vec(1_u8..=2, 1..=VMS),
        ops in prop::collection::vec(op(), 0..120),
    ) {
        let mut world = World::new(&formats);
        ops.into_iter().for_each(|op| world.apply(op));
        world.settle();
        world.empty();
        world.settle();
        world.sweep();
        for model in 0..MODELS {
            prop_assert_eq!(world.expected(model), []);
            for format in [1, 2] {
                // A record whose last VM died with its format stays as it is and counts nowhere.
                let served = world.vms.iter().any(|vm| vm.borrow().ledger.format() == format);
                let stored = world.store.get(&record::key(format, model));
                if let Some(stored) = stored.filter(|_| served) {
                    prop_assert!(record::Record::parse(&stored.bytes).unwrap().is_empty());
                }
            }
        }
    }

    #[test]
    fn vms_that_choose_at_once_spread_over_the_pods(vms in 2_usize..=8, rounds in 1_u64..6) {
        // Each VM reads, and all VMs after it charge before it writes.
        fn choose(vms: &[Rc<RefCell<Vm>>], store: &MemoryStore, now_ms: u64) {
            let Some((first, rest)) = vms.split_first() else { return };
            let rest = rest.to_vec();
            store.interpose(&record::key(1, 0), move |store| choose(&rest, store, now_ms));
            first.borrow_mut().charge(store, 0, now_ms, |totals| {
                let load = |pod: &u64| totals.get(PodKey(*pod)).decode_requests();
                pick(None, (0..PODS).min_by_key(load).unwrap(), 10)
            });
        }
        let world = World::new(&vec![1; vms]);
        (0..rounds).for_each(|round| choose(&world.vms, &world.store, round));
        let totals = world.vm(0).borrow_mut().ledger.totals(&world.store, 0);
        let loads: Vec<u64> =
            (0..PODS).map(|pod| totals.get(PodKey(pod)).decode_requests().into()).collect();
        prop_assert_eq!(loads.iter().sum::<u64>(), vms as u64 * rounds);
        let (low, high) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        prop_assert!(high - low <= 1, "{:?}", loads);
    }

    #[test]
    fn garbage_in_the_store_is_never_a_panic(
        table in prop::collection::vec(any::<u8>(), 0..200),
        cells in prop::collection::vec(any::<u8>(), 0..200),
        versioned in any::<bool>(),
    ) {
        let with_version = |mut bytes: Vec<u8>| {
            if let Some(first) = bytes.first_mut().filter(|_| versioned) {
                *first = 1;
            }
            bytes
        };
        let mut world = World::new(&[1, 1]);
        world.store.put(&slots::key(1), &with_version(table));
        world.store.put(&record::key(1, 0), &with_version(cells));
        world.tick(0);
        let charge = Op::Charge { vm: 0, model: 0, prefill: Some(1), decode: 2, tokens: 3, session: None };
        world.apply(charge);
        world.settle();
        world.empty();
        world.settle();
    }
}
