//! Random schedules of many requests on several workers, reproducible by their seed.

use crate::stand::{
    DONE, ERROR, ROLE, TOKEN, assert_quiet, chat, endings, engine_error, good, last_pending,
    pairs_of, pod, push, stream_headers, topology, two_pairs, variant, with_combined,
};
use pd_wasm_tests::{CallRecord, Ending, Exchange, Flight, Gateway, Module, PluginId, Script};
use serde_json::{Value, json};

const WORKERS: usize = 2;
const REQUESTS: usize = 30;
/// Short timers, so that they fire within a schedule.
const PLUGIN: &str = r#"{"prefillRequestTimeout":2,"streamIdleBackstop":8,"maxOrphans":3,"prefillRetries":2,
    "decodeFirstResponseTimeout":3,"decodeResponseTimeout":4,"decodeStreamIdleTimeout":5}"#;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        (!from.is_empty()).then(|| &from[self.below(from.len())])
    }
}

struct Schedule {
    gateway: Gateway,
    random: Random,
    flights: Vec<Flight>,
    /// What the engine of a flight sent last: nothing, headers, all.
    stages: Vec<u8>,
    plugin: &'static str,
    /// Requests whose VM was killed: nobody is left to count them.
    killed: bool,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        Self::of_engine("vllm", PLUGIN, seed)
    }

    fn of_engine(engine: &str, plugin: &'static str, seed: u64) -> Self {
        Self {
            gateway: pairs_of(WORKERS, engine, plugin),
            plugin,
            random: Random(seed),
            flights: Vec::new(),
            stages: Vec::new(),
            killed: false,
        }
    }

    fn open(&self) -> Vec<usize> {
        let open = |at: &usize| self.gateway.outcome(self.flights[*at]).ending == Ending::Open;
        (0..self.flights.len()).filter(open).collect()
    }

    fn reply(&mut self, call: &CallRecord) -> Script {
        match self.random.below(8) {
            0 => engine_error(503),
            1 => engine_error(400),
            2 => Script::reset(),
            3 => Script::answer(200, "{}"),
            4 => Script::answer(200, "no"),
            _ => good(call),
        }
    }

    fn step(&mut self) {
        let worker = self.random.below(WORKERS);
        match self.random.below(20) {
            0..=3 if self.flights.len() < REQUESTS && !self.gateway.is_lost(worker) => {
                let stream = self.random.below(4) > 0;
                let exchange = chat(stream).worker(worker);
                self.flights.push(self.gateway.send(exchange));
                self.stages.push(0);
            }
            4..=8 => {
                let calls = self.gateway.pending_calls();
                if let Some(call) = self.random.pick(&calls) {
                    let script = self.reply(call);
                    self.gateway.answer(call.id, script);
                }
            }
            9..=13 => self.respond(),
            14 | 15 => {
                let open = self.open();
                if let Some(at) = self.random.pick(&open) {
                    self.gateway.disconnect(self.flights[*at]);
                }
            }
            16 | 17 => {
                let ms = [1, 50, 100, 700, 2100][self.random.below(5)];
                self.gateway.advance(ms);
            }
            18 => {
                let races = self.random.below(20) as u32;
                self.gateway.shared().race_next_writes(races);
            }
            _ => {
                if self.random.below(3) == 0 {
                    let plugin = PluginId::default();
                    let settings = self.plugin.as_bytes();
                    self.gateway.reconfigure(plugin, settings).unwrap();
                }
                self.gateway.drain_old_roots();
            }
        }
    }

    /// The engine of some decode leg does something.
    fn respond(&mut self) {
        let open = self.open();
        let legs: Vec<usize> = open
            .into_iter()
            .filter(|at| self.stages[*at] < 2)
            .filter(|at| self.gateway.outcome(self.flights[*at]).upstream.is_some())
            .collect();
        let Some(at) = self.random.pick(&legs).copied() else {
            return;
        };
        let flight = self.flights[at];
        if self.random.below(8) == 0 {
            self.stages[at] = 2;
            return self.gateway.respond_reset(flight);
        }
        if self.stages[at] == 0 {
            self.stages[at] = 1;
            return stream_headers(&mut self.gateway, flight);
        }
        let piece = [ROLE, TOKEN, TOKEN, ERROR, DONE, ""][self.random.below(6)];
        let end = piece.is_empty() || piece == DONE;
        if end {
            self.stages[at] = 2;
        }
        self.gateway.respond_data(flight, piece.as_bytes(), end);
    }

    /// The fleet changes: pods and models come and go.
    fn change_fleet(&mut self, sequence: u64) {
        let other = json!({"name": "n", "configs": [], "pods": [
            pod("n-d", "decode", Some("r"), "10.0.7.2:8000"),
            pod("n-p", "prefill", Some("r"), "10.0.7.1:8000"),
        ]});
        let mut next: Value = match self.random.below(4) {
            0 => with_combined(sequence),
            1 => topology(sequence, &two_pairs()[..2]),
            _ => topology(sequence, &two_pairs()),
        };
        let models = next["models"].as_array_mut().unwrap();
        match self.random.below(5) {
            0 => models.clear(),
            1 => models[0] = other,
            _ => models.push(other),
        }
        self.gateway.shared().race_next_writes(0);
        push(&mut self.gateway, &next).expect(200);
    }

    /// A request of any kind, for a model that may be there.
    fn send_any(&mut self) {
        let worker = self.random.below(WORKERS);
        let model = ["m", "n", "m", "x"][self.random.below(4)];
        let body = match self.random.below(4) {
            0 => format!(r#"{{"model":"{model}","prompt":["a","b"]}}"#),
            1 => "{".to_owned(),
            _ => format!(r#"{{"model":"{model}","prompt":"a","stream":true}}"#),
        };
        let exchange = Exchange::post("/v1/completions", body.clone()).worker(worker);
        let flight = if self.random.below(3) == 0 {
            let flight = self.gateway.begin(exchange);
            self.gateway.body(flight, &body.as_bytes()[..1], false);
            if self.random.below(3) > 0 {
                self.gateway.body(flight, &body.as_bytes()[1..], true);
            }
            flight
        } else {
            self.gateway.send(exchange.chunked(7))
        };
        self.flights.push(flight);
        self.stages.push(0);
    }

    /// Lets everything end and checks what is left.
    fn finish(mut self, seed: u64) {
        self.gateway.shared().race_next_writes(0);
        for at in self.open() {
            self.gateway.disconnect(self.flights[at]);
        }
        for _ in 0..4 * REQUESTS {
            if self.gateway.pending_calls().is_empty() {
                break;
            }
            let call = last_pending(&self.gateway);
            self.gateway.answer(call.id, engine_error(400));
        }
        // Calls of roots that are gone end by their deadlines.
        self.gateway.advance(20_000);
        assert_eq!(self.gateway.drain_old_roots(), 0, "seed {seed}");
        assert_eq!(self.gateway.drain_old_vms(), 0, "seed {seed}");
        self.gateway.advance(5000);
        let faults = self.gateway.take_faults();
        assert!(faults.is_empty(), "seed {seed}: {faults:?}");
        for worker in 0..WORKERS {
            let left = crate::stand::ledgers_at(&mut self.gateway, worker);
            assert_eq!(left, Default::default(), "seed {seed}");
            assert_eq!(self.gateway.live_streams(worker), 0, "seed {seed}");
        }
        let (sent, ended) = (self.flights.len() as u64, endings(&mut self.gateway));
        if self.killed {
            assert!(
                ended <= sent,
                "seed {seed}: {ended} endings of {sent} requests"
            );
        } else {
            assert_eq!(ended, sent, "seed {seed}");
        }
        assert_quiet(&mut self.gateway, WORKERS);
    }
}

#[test]
fn every_request_ends_once_and_the_ledger_at_zero() {
    for seed in 0..150 {
        let mut schedule = Schedule::new(seed);
        for _ in 0..200 {
            schedule.step();
        }
        schedule.finish(seed);
    }
}

#[test]
fn every_engine_ends_every_request_once_and_the_ledger_at_zero() {
    const GENERATION_FIRST: &str = r#"{"prefillRequestTimeout":2,"streamIdleBackstop":8,"maxOrphans":3,
        "trtScheduleStyle":"generation_first"}"#;
    for (engine, plugin) in [
        ("sglang", PLUGIN),
        ("trtllm", PLUGIN),
        ("trtllm", GENERATION_FIRST),
    ] {
        for seed in 3000..3050 {
            let mut schedule = Schedule::of_engine(engine, plugin, seed);
            for _ in 0..200 {
                schedule.step();
            }
            schedule.finish(seed);
        }
    }
}

#[test]
fn dead_and_frozen_vms_leave_nothing_either() {
    for seed in 1000..1050 {
        let mut schedule = Schedule::new(seed);
        for round in 0..8 {
            for _ in 0..25 {
                schedule.step();
            }
            let worker = schedule.random.below(WORKERS);
            if round % 2 == 0 {
                schedule.killed = true;
                schedule.gateway.reload_vm(worker).unwrap();
            } else {
                schedule.gateway.freeze_vm(worker);
                let ms = [500, 2500, 4000][schedule.random.below(3)];
                schedule.gateway.advance(ms);
                schedule.gateway.unfreeze_vm(worker);
            }
        }
        schedule.finish(seed);
    }
}

#[test]
fn fleets_come_and_go_and_releases_change_under_load() {
    let modules = [Module::load(&variant("next")), Module::filter()];
    for seed in 2000..2050 {
        let mut schedule = Schedule::new(seed);
        for round in 0..16 {
            for _ in 0..10 {
                schedule.step();
                if schedule.flights.len() < 2 * REQUESTS {
                    schedule.send_any();
                }
            }
            schedule.change_fleet(round + 2);
            match round % 8 {
                3 => {
                    schedule.gateway.freeze_all(true);
                    schedule.gateway.advance(10_000);
                    schedule.gateway.freeze_all(false);
                }
                5 => {
                    let module = &modules[(round / 8) as usize];
                    schedule.gateway.upgrade(module.clone()).unwrap();
                    schedule.gateway.advance(300);
                }
                _ => {}
            }
            schedule.gateway.drain_old_vms();
        }
        schedule.finish(seed);
    }
}
