//! Prints the cost of reading, editing and hashing bodies, in ns per body and per KB.
//!
//! `cargo run --release -p pd-core --example bench_bodies`

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "not on a request path"
)]

use pd_core::engine::vllm::prefill_edits;
use pd_core::ledger::PodKey;
use pd_core::port::{Cas, SharedStore, StoreError, Stored};
use pd_core::prefix::{Chain, PrefixIndex, chain};
use pd_core::request::patch::{Lead, build};
use pd_core::request::{Endpoint, scan};
use pd_wire::knobs::KvConnector;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Median of many runs, in ns.
fn measure<T>(mut run: impl FnMut() -> T) -> f64 {
    let mut times = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        for _ in 0..8 {
            black_box(run());
        }
        times.push(start.elapsed().as_nanos() as f64 / 8.0);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A store without the cost of a host, which is counted instead: what is measured is the index
/// alone.
#[derive(Default)]
struct Store {
    values: RefCell<BTreeMap<String, Vec<u8>>>,
    reads: Cell<u64>,
    writes: Cell<u64>,
}

impl SharedStore for Store {
    fn get(&self, key: &str) -> Option<Stored> {
        self.reads.set(self.reads.get() + 1);
        Some(Stored {
            bytes: self.values.borrow().get(key)?.clone(),
            cas: Cas(1),
        })
    }
    fn create(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.swap(key, bytes, Cas(1))
    }
    fn swap(&self, key: &str, bytes: &[u8], _: Cas) -> Result<(), StoreError> {
        self.writes.set(self.writes.get() + 1);
        let mut values = self.values.borrow_mut();
        match values.get_mut(key) {
            Some(value) => bytes.clone_into(value),
            None => drop(values.insert(key.to_owned(), bytes.to_vec())),
        }
        Ok(())
    }
}

fn chat(bytes: usize, turn: usize, escapes: bool) -> Vec<u8> {
    let text = if escapes {
        "let x = \\\"a\\\";\\n    foo(x);\\n"
    } else {
        "the quick brown fox jumps "
    };
    let mut body = String::from(r#"{"model":"llama","stream":true,"max_tokens":64,"messages":["#);
    while body.len() < bytes.saturating_sub(turn / 2).max(80) {
        let content = text.repeat(turn.div_ceil(text.len()));
        body.push_str(&format!(r#"{{"role":"user","content":"{content}"}},"#));
    }
    body.pop();
    body.push_str("]}");
    body.into_bytes()
}

fn tokens(bytes: usize) -> Vec<u8> {
    let ids: Vec<_> = (0..bytes / 7)
        .map(|n| (1000 + n * 7919 % 99_000).to_string())
        .collect();
    format!(r#"{{"model":"llama","prompt":[{}]}}"#, ids.join(", ")).into_bytes()
}

fn main() {
    let bodies = [
        ("200 B chat", Endpoint::Chat, chat(200, 60, false)),
        (
            "8 KB chat, turns of 500 B",
            Endpoint::Chat,
            chat(8 << 10, 500, false),
        ),
        ("8 KB chat, code", Endpoint::Chat, chat(8 << 10, 500, true)),
        (
            "1 MB chat, one message",
            Endpoint::Chat,
            chat(1 << 20, 1 << 20, false),
        ),
        (
            "1 MB chat, turns of 500 B",
            Endpoint::Chat,
            chat(1 << 20, 500, false),
        ),
        ("1 MB chat, code", Endpoint::Chat, chat(1 << 20, 5000, true)),
        ("1 MB token ids", Endpoint::Completions, tokens(1 << 20)),
    ];
    for (name, endpoint, body) in &bodies {
        let kb = body.len() as f64 / 1024.0;
        let print = |what: &str, ns: f64| {
            println!("{name:28} {what:10} {ns:10.0} ns {:8.1} ns/KB", ns / kb);
        };
        let scanned = scan(*endpoint, body).expect("valid");
        let edits = prefill_edits(*endpoint, &scanned, KvConnector::Shfs).expect("supported");
        print("scan", measure(|| scan(*endpoint, black_box(body))));
        print(
            "build",
            measure(|| build(black_box(body), &scanned, &edits)),
        );
        print(
            "prefix",
            measure(|| Lead::of(black_box(body), &scanned).with(b"\"a\":{}")),
        );
        print(
            "hash",
            measure(|| chain(scanned.identity(black_box(body)), 128, 0)),
        );
    }
    println!();
    for (name, blocks) in [("1 KB", 8), ("8 KB", 64), ("64 KB", 512), ("1 MB", 8192)] {
        unique(name, blocks);
        turns(name, blocks);
    }
}

/// Bytes that do not compress, `blocks` blocks of 128.
fn noise(blocks: u64) -> Vec<u8> {
    (0..blocks * 16)
        .flat_map(|n| mixed(n).to_le_bytes())
        .collect()
}

fn mixed(n: u64) -> u64 {
    let n = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (n ^ n >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// An index of the default size.
struct Bench {
    index: PrefixIndex,
    store: Store,
    now: u64,
    requests: u64,
}

impl Bench {
    fn new() -> Self {
        Self {
            index: PrefixIndex::new(200_000, 1_200_000),
            store: Store::default(),
            now: 0,
            requests: 0,
        }
    }

    /// One request for a prompt no other model has.
    fn request(&mut self, model: u64, prompt: &Chain) {
        let pods: Vec<_> = (1..9).map(PodKey).collect();
        let mut percents = [0; 8];
        self.requests += 1;
        self.now += 1;
        let mut prompt = prompt.clone();
        self.index.lookup(
            &self.store,
            model,
            &mut prompt,
            &pods,
            self.now,
            &mut percents,
        );
        let best = percents
            .iter()
            .enumerate()
            .max_by_key(|(_, percent)| **percent);
        let pod = match best {
            Some((nth, percent)) if *percent > 0 => pods[nth],
            _ => pods[mixed(self.requests) as usize % 8],
        };
        self.index
            .learn(&self.store, model, &mut prompt, pod, self.now);
    }

    fn print(&mut self, name: &str, what: &str, ns: f64) {
        let share = |count: &Cell<u64>| count.get() as f64 / self.requests as f64;
        println!(
            "{name:8} {what:28} {ns:10.0} ns {:6.1} reads {:6.1} writes per request",
            share(&self.store.reads),
            share(&self.store.writes)
        );
    }
}

/// Prompts that have nothing in common, in an index that is full.
fn unique(name: &str, blocks: u64) {
    let prompt = chain([noise(blocks).as_slice()], 128, 0);
    let mut bench = Bench::new();
    let mut model = 0;
    for _ in 0..40_000 / blocks.min(64) {
        model += 1;
        bench.request(mixed(model), &prompt);
    }
    let ns = measure(|| {
        model += 1;
        bench.request(mixed(model), &prompt);
    });
    bench.print(name, "unique prompts", ns);
}

/// Conversations of 16 turns that begin with the same third.
fn turns(name: &str, blocks: u64) {
    let text = noise(blocks);
    let shared = text.len() / 3;
    let mut conversations = Vec::new();
    for user in 0..64_u8 {
        let mut text = text.clone();
        for byte in &mut text[shared..] {
            *byte ^= user;
        }
        let turns = (1..=16).map(|turn| {
            let end = shared + (text.len() - shared) * turn / 16;
            chain([&text[..end]], 128, 0)
        });
        conversations.push(turns.collect::<Vec<_>>());
    }
    let mut bench = Bench::new();
    let mut nth = 0;
    let ns = measure(|| {
        let (round, turn, user) = (nth / 1024, nth / 64 % 16, nth % 64);
        bench.request(mixed(round as u64), &conversations[user][turn]);
        nth += 1;
    });
    bench.print(name, "turns of conversations", ns);
}
