//! Prints the cost of reading, editing and hashing bodies, in ns per body and per KB.
//!
//! `cargo run --release -p pd-core --example bench_bodies`

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "not on a request path"
)]

use pd_core::engine::vllm::prefill_edits;
use pd_core::request::patch::{build, prefix};
use pd_core::request::{Endpoint, scan};
use pd_wire::knobs::KvConnector;
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
            measure(|| prefix(black_box(body), &scanned, b"\"a\":{}")),
        );
    }
}
