//! Two thousand requests through everything that goes wrong leave nothing behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use pd_e2e::{Answer, Call, Outcomes, Pod, Stand, chat_body};
use pd_engine_sim::{Cut, EngineKind, Fault, FaultKind, On};
use pd_wire::control::Status;
use serde_json::{Value, json};

const CLIENTS: u64 = 64;
/// Longest time KV may stay on an engine that nobody told.
const LEASE: Duration = Duration::from_secs(3);

/// A small generator: the run repeats as far as the machine lets it.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

fn arm(stand: &Stand) {
    let status = |code| FaultKind::Status {
        code,
        body: None,
        headers: Default::default(),
    };
    let reset = |after_work| FaultKind::ResetBeforeHeaders {
        how: Cut::Rst,
        after_ms: 0,
        after_work,
    };
    let stall = |ms| FaultKind::StallBeforeHeaders {
        ms: Some(ms),
        after_work: false,
    };
    let kinds = [
        (On::Prefill, status(500), 0.03),
        (On::Prefill, status(503), 0.02),
        (On::Prefill, reset(false), 0.03),
        (On::Prefill, reset(true), 0.02),
        (On::Prefill, stall(150), 0.03),
        (On::Prefill, stall(1500), 0.01),
        (On::Prefill, FaultKind::BadJson, 0.01),
        (On::Prefill, FaultKind::NoKvParams, 0.01),
        (On::Decode, status(500), 0.03),
        (On::Decode, reset(false), 0.03),
        (On::Decode, stall(150), 0.03),
        (
            On::Decode,
            FaultKind::StallMidStream {
                after_chunks: 2,
                ms: Some(200),
            },
            0.03,
        ),
        (
            On::Decode,
            FaultKind::StallMidStream {
                after_chunks: 1,
                ms: Some(3000),
            },
            0.01,
        ),
        (
            On::Decode,
            FaultKind::ResetMidStream {
                after_chunks: 2,
                how: Cut::Rst,
            },
            0.03,
        ),
        (
            On::Decode,
            FaultKind::ResetMidStream {
                after_chunks: 1,
                how: Cut::Fin,
            },
            0.02,
        ),
        (
            On::Decode,
            FaultKind::ErrorMidStream { after_chunks: 0 },
            0.02,
        ),
    ];
    for (seed, (_, engine)) in (1..).zip(stand.engines()) {
        for (on, kind, probability) in &kinds {
            let mut fault = Fault::every(*on, kind.clone());
            (fault.probability, fault.seed) = (*probability, seed);
            assert!(engine.inject(fault));
        }
    }
}

/// Sends one request and now and then leaves early; `None` when it left.
async fn one(stand: &Stand, dice: &mut Dice, n: u64) -> Option<Result<Answer>> {
    let prompt = format!("request {n} {}", "x".repeat(dice.below(4000) as usize));
    let call = Call::post(
        "/v1/chat/completions",
        chat_body(&prompt, !n.is_multiple_of(3)),
    );
    let patience = Duration::from_millis(dice.below(120));
    if dice.below(100) < 20 {
        let sent = call.send(stand.envoy.data());
        return tokio::time::timeout(patience, sent).await.ok();
    }
    Some(call.send(stand.envoy.data()).await)
}

/// Sends requests from all clients at once until `next` reaches `last`.
async fn run(stand: &Arc<Stand>, next: &Arc<AtomicU64>, last: u64) -> (Outcomes, u64) {
    let client = |client: u64| {
        let (stand, next) = (Arc::clone(stand), Arc::clone(next));
        tokio::spawn(async move {
            let mut dice = Dice(client * 7919 + last);
            let (mut outcomes, mut left) = (Outcomes::default(), 0);
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= last {
                    return (outcomes, left);
                }
                match one(&stand, &mut dice, n).await {
                    Some(result) => outcomes.note(&result),
                    None => left += 1,
                }
            }
        })
    };
    let clients: Vec<_> = (1..=CLIENTS).map(client).collect();
    let (mut all, mut left) = (Outcomes::default(), 0);
    for client in clients {
        let (outcomes, leavers) = client.await.unwrap();
        all.add(outcomes);
        left += leavers;
    }
    next.store(last, Ordering::Relaxed);
    (all, left)
}

/// Slot and generation of every VM: a trap would start another generation.
fn lives(status: &Status) -> Vec<(u32, u32)> {
    let mut lives: Vec<_> = status
        .vms
        .iter()
        .map(|vm| (vm.slot, vm.generation))
        .collect();
    lives.sort_unstable();
    lives
}

/// Sends two thousand requests to pods of an engine, with all of [`arm`] and clients that leave,
/// and asserts that nothing is left of them.
async fn storm(name: &str, engine: EngineKind, mut plugin: Value) {
    let pods = Pod::pairs(3).into_iter().map(|pod| {
        pod.of_engine(engine).engine(|engine| {
            engine.prefill_delay_ms = 8.0;
            engine.token_interval_ms = 4.0;
            engine.lease_ms = LEASE.as_millis() as u64;
        })
    });
    plugin["prefillRequestTimeout"] = json!(1.0);
    plugin["decodeStreamIdleTimeout"] = json!(2.0);
    let stand = Stand::builder(name)
        .pods(pods)
        .plugin(&plugin)
        .alone()
        .start()
        .await;
    let stand = Arc::new(stand);
    arm(&stand);

    let next = Arc::new(AtomicU64::new(0));
    let mut seen: Vec<Status> = Vec::new();
    for last in [500, 2000] {
        let start = std::time::Instant::now();
        let (outcomes, left) = run(&stand, &next, last).await;
        println!(
            "to request {last} in {:?}: {left} left early, {outcomes:?}",
            start.elapsed()
        );
        // The worst of the faults is a small part; most requests are answered in full.
        let good = outcomes.complete.get(&200).copied().unwrap_or_default();
        assert!(good * 2 > outcomes.total(), "{outcomes:#?}");
        assert!(
            outcomes.lost.is_empty(),
            "requests without any answer: {outcomes:#?}"
        );
        let took = stand.envoy.settled(Duration::from_secs(15)).await;
        println!("ledger zero and no live flow after {took:?}");
        seen.push(stand.envoy.status().await.unwrap());
    }

    assert_eq!(lives(&seen[0]), lives(&seen[1]), "a VM was replaced");
    for (before, after) in seen[0].vms.iter().zip(&seen[1].vms) {
        println!(
            "slot {}: {} pages, then {}",
            before.slot, before.memory_pages, after.memory_pages
        );
        assert_eq!(
            before.memory_pages, after.memory_pages,
            "slot {} grew",
            before.slot
        );
        assert_eq!((before.live_flows, after.live_flows), (0, 0));
    }
    let log = stand.envoy.log();
    for trace in [
        "panicked at",
        "Proxy-Wasm plugin in-VM backtrace",
        "RuntimeError",
    ] {
        assert!(!log.contains(trace), "a VM trapped: {trace}");
    }
    pd_e2e::within(
        LEASE + Duration::from_secs(5),
        "no engine holds KV",
        || async {
            let held = stand.total(|state| state.kv.kv_held);
            if held == 0 { Ok(()) } else { Err(held) }
        },
    )
    .await;
    assert_eq!(
        stand.total(|state| state.deaths),
        0,
        "an engine died of what it was sent"
    );
    assert_eq!(
        stand.total(|state| state.kv.stale_pulls),
        0,
        "stale KV was read"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_requests_with_disconnects_errors_resets_and_stalls_leave_nothing() {
    storm("chaos", EngineKind::Vllm, json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_requests_leave_nothing_at_engines_that_meet_in_rooms() {
    let aborts = json!({ "decodeAbortTimeout": 0.5, "decodeAbortRetryDelay": 0.3 });
    storm("chaos-rooms", EngineKind::Sglang, aborts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_requests_leave_nothing_with_the_context_first() {
    storm("chaos-context", EngineKind::Trtllm, json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_requests_leave_nothing_with_the_generation_first() {
    let style = json!({ "trtScheduleStyle": "generation_first" });
    storm("chaos-generation", EngineKind::Trtllm, style).await;
}
