use super::super::catalog::accept_tokenizer;
use super::super::lease::DEAD_AFTER;
use super::*;
use crate::port::Counted;
use crate::testkit::MemoryStore;
use pd_wire::tokenizer::Message;
use pd_wire::topology::{Stamp, WIRE_VERSION};
use std::borrow::Cow;
use std::cell::Cell;
use std::rc::Rc;

/// Counts words, at a speed that can be changed.
#[derive(Debug)]
struct Words {
    bytes_per_ms: Rc<Cell<usize>>,
}

impl TokenCounter for Words {
    fn count(&self, text: &str) -> Option<Counted> {
        let tokens = text.split_whitespace().count() as u64;
        let micros = (text.len() * 1000 / self.bytes_per_ms.get()) as u64;
        (!text.contains('\0')).then_some(Counted { tokens, micros })
    }
}

/// Loads what was pushed as a word counter; a file that names itself "bad" fails.
struct Loads {
    done: Cell<u32>,
    bytes_per_ms: Rc<Cell<usize>>,
}

impl TokenizerLoader for Loads {
    fn load(&self, file: &[u8]) -> Result<LoadedTokenizer, String> {
        self.done.set(self.done.get() + 1);
        if file.windows(3).any(|part| part == b"bad") {
            return Err("model: bad".to_owned());
        }
        Ok(LoadedTokenizer {
            counter: Box::new(Words {
                bytes_per_ms: Rc::clone(&self.bytes_per_ms),
            }),
            micros: 420_000,
            pages: (50, 900),
        })
    }
}

fn push(store: &MemoryStore, sequence: u64, model: &str, token: &str) {
    let file = format!(r#"{{"model":{{"vocab":{{"{token}":0}},"merges":[]}}}}"#);
    let stamp = Stamp {
        version: WIRE_VERSION,
        agent: "a".to_owned(),
        epoch: 1,
        sequence,
    };
    let message = Message {
        stamp,
        model: model.to_owned(),
        file: Cow::Borrowed(file.as_bytes()),
    };
    accept_tokenizer(store, &message.encode().unwrap(), 0).unwrap();
}

/// One VM, its clock and its loader.
struct Vm {
    tokenizers: Tokenizers,
    loads: Loads,
    own: u32,
    now_ms: u64,
}

impl Vm {
    fn new(own: u32) -> Self {
        Self {
            tokenizers: Tokenizers::default(),
            loads: Loads {
                done: Cell::new(0),
                bytes_per_ms: Rc::new(Cell::new(1000)),
            },
            own,
            now_ms: 0,
        }
    }

    fn tick(&mut self, store: &MemoryStore) -> Option<LoadReport> {
        self.now_ms += LOOK_MS;
        self.tokenizers
            .tick(store, &self.loads, self.own, self.now_ms)
    }

    fn count(&mut self, text: &str) -> Option<u64> {
        let bytes = text.len() as u64;
        self.tokenizers.count("m", bytes, || Some(text.to_owned()))
    }

    fn status(&self) -> TokenizerStatus {
        self.tokenizers.status(1500)[0].clone()
    }
}

#[test]
fn a_tokenizer_is_loaded_once_a_request_wants_it_and_counts_from_then_on() {
    let (store, mut vm) = (MemoryStore::new(), Vm::new(1));
    assert_eq!((vm.tick(&store), vm.count("a b")), (None, None));
    push(&store, 1, "m", "x");
    for _ in 0..3 {
        assert_eq!(vm.tick(&store), None);
    }
    assert!(vm.tokenizers.holds("m") && !vm.tokenizers.holds("n"));
    assert_eq!(
        (vm.status().state, vm.loads.done.get()),
        (TokenizerState::Idle, 0)
    );
    assert_eq!(vm.count("a b"), None);
    assert_eq!(vm.status().state, TokenizerState::Wanted);
    let report = vm.tick(&store).unwrap();
    assert_eq!((report.model.as_str(), report.result), ("m", Ok(420)));
    assert_eq!(vm.count("a b"), Some(2));
    assert_eq!(vm.count("a \0"), None);
    let status = vm.status();
    assert_eq!(
        (status.state, status.load_ms, status.counted),
        (TokenizerState::Loaded, 420, 1)
    );
    assert_eq!((status.pages_before, status.pages_after), (50, 900));
    assert_eq!(
        (status.agent.as_str(), status.sequence, status.age_ms),
        ("a", 1, 1500)
    );
    assert!(status.tokens_per_ms > 0 && status.digest.len() == 16);
    // Nothing more to do, nothing done.
    let before = store.calls();
    vm.tokenizers.tick(&store, &vm.loads, 1, vm.now_ms + 100);
    assert_eq!(store.calls(), before);
}

#[test]
fn a_text_that_takes_longer_than_the_budget_is_not_even_read() {
    let (store, mut vm) = (MemoryStore::new(), Vm::new(1));
    push(&store, 1, "m", "x");
    vm.tick(&store);
    vm.count("a");
    vm.tick(&store);
    // 1000 bytes a ms: 5000 bytes at most.
    assert_eq!(vm.count(&"a ".repeat(2500)), Some(2500));
    let unread = vm.tokenizers.count("m", 5001, || panic!("read"));
    assert_eq!(unread, None);
    // One that turns out longer than was said is not counted either.
    let longer = || Some("a ".repeat(3000));
    assert_eq!(vm.tokenizers.count("m", 100, longer), None);
}

#[test]
fn a_vm_that_became_faster_finds_out_without_a_request_that_waits_for_it() {
    let (store, mut vm) = (MemoryStore::new(), Vm::new(1));
    push(&store, 1, "m", "x");
    vm.tick(&store);
    vm.count("a");
    vm.loads.bytes_per_ms.set(500);
    vm.tick(&store);
    vm.loads.bytes_per_ms.set(2000);
    let text = "a ".repeat(2500);
    let mut ticks = 0;
    while vm.count(&text).is_none() {
        assert!(ticks < 20, "never counted");
        vm.tick(&store);
        ticks += 1;
    }
    // (3·500 + 2000) / 4 = 875, then 1156 bytes a ms.
    assert_eq!(ticks, 2);
}

#[test]
fn vms_load_one_after_the_other() {
    let store = MemoryStore::new();
    push(&store, 1, "m", "x");
    let mut vms = [Vm::new(1), Vm::new(2)];
    for vm in &mut vms {
        vm.tick(&store);
        vm.count("a");
    }
    // The first is in the middle of it.
    let mut lease = Lease::default();
    assert_eq!(lease.take(&store, 1, 0), Grant::Taken);
    assert_eq!(vms[1].tick(&store), None);
    assert!(vms[0].tick(&store).is_some());
    assert!(vms[1].tick(&store).is_some());
    assert_eq!(vms.map(|vm| vm.loads.done.get()), [1, 1]);
}

#[test]
fn a_file_that_cannot_be_loaded_is_reported_and_replaced_by_a_good_one() {
    let (store, mut vm) = (MemoryStore::new(), Vm::new(1));
    push(&store, 1, "m", "bad");
    vm.tick(&store);
    vm.count("a");
    let report = vm.tick(&store).unwrap();
    assert_eq!(report.result, Err("model: bad".to_owned()));
    // Not tried again, whatever is asked.
    for _ in 0..3 {
        assert_eq!((vm.count("a"), vm.tick(&store)), (None, None));
    }
    let status = vm.status();
    assert_eq!(
        (status.state, status.error.as_str()),
        (TokenizerState::Failed, "model: bad")
    );
    push(&store, 2, "m", "good");
    vm.tick(&store);
    vm.count("a");
    vm.tick(&store);
    assert_eq!(vm.count("a"), Some(1));
}

#[test]
fn a_loaded_tokenizer_is_replaced_without_being_asked_for_again() {
    let (store, mut vm) = (MemoryStore::new(), Vm::new(1));
    push(&store, 1, "m", "x");
    vm.tick(&store);
    vm.count("a");
    vm.tick(&store);
    push(&store, 2, "m", "y");
    // Index and file are two writes: between them, the file of before is not taken for the new.
    let slot = catalog::key(0);
    let new = store.get(&slot).unwrap().bytes;
    store.put(&slot, b"something else");
    assert_eq!((vm.tick(&store), vm.count("a")), (None, None));
    store.put(&slot, &new);
    assert!(vm.tick(&store).is_some());
    assert_eq!((vm.count("a"), vm.status().sequence), (Some(1), 2));
}

#[test]
fn a_file_that_killed_a_vm_is_left_alone() {
    let store = MemoryStore::new();
    push(&store, 1, "m", "x");
    let mut vm = Vm::new(1);
    vm.tick(&store);
    vm.count("a");
    let entry = catalog::read(store.get(KEY_INDEX).as_ref());
    assert_eq!(
        Lease::default().take(&store, 9, entry[0].digest),
        Grant::Taken
    );
    let mut reports = (0..=DEAD_AFTER + 2).filter_map(|_| vm.tick(&store));
    let problem = reports.next().unwrap().result.unwrap_err();
    assert!(problem.contains("died"), "{problem}");
    assert_eq!(vm.loads.done.get(), 0);
}
