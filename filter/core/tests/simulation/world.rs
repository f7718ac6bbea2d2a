//! The event loop: requests, engines, the agent's refreshes and the VMs' ticks on one clock.

use crate::engine::{DecodePod, Job, Micros, PrefillPod, Sequence};
use crate::gateway::{Gateway, Routed};
use crate::workload::Session;
use pd_core::fleet::ModelFleet;
use pd_core::select::Settings;
use pd_wire::knobs::BucketServeMode;
use pd_wire::samples::PodSample;
use pd_wire::topology::Role;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The agent reads the engines' pages this often, and what it read arrives this much later.
const REFRESH: Micros = 200_000;
const PUSH_DELAY: Micros = 100_000;
const TICK: Micros = 100_000;
/// Time to hand the KV of a token over.
const TRANSFER_PER_TOKEN: Micros = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Tick,
    Scrape,
    Push,
    Arrive { session: usize, turn: usize },
    Prefilled { pod: usize },
    Transferred { request: usize },
    Ended { pod: usize, version: u64 },
}

enum Engine {
    Prefill(PrefillPod),
    Decode(DecodePod),
}

struct Request {
    session: usize,
    turn: usize,
    arrived: Micros,
    tokens: u64,
    routed: Routed,
}

struct World<'a> {
    now: Micros,
    events: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    order: u64,
    gateway: Gateway,
    engines: Vec<Engine>,
    sessions: &'a [Session],
    requests: Vec<Request>,
    open: usize,
    scraped: Vec<(PodSample, u64)>,
    measure_from: Micros,
    outcome: Outcome,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Times to first token of the requests that were measured, in ms.
    pub(crate) ttft_ms: Vec<f64>,
    /// Prompt tokens that prefill pods had cached, in percent.
    pub(crate) cached_percent: f64,
}

/// Plays a workload and measures the requests that arrive from `measure_from` on.
pub(crate) fn play(
    fleet: &ModelFleet,
    settings: Settings,
    bands: Option<BucketServeMode>,
    sessions: &[Session],
    measure_from: Micros,
    seed: u64,
) -> Outcome {
    let mut world = World {
        now: 0,
        events: BinaryHeap::new(),
        order: 0,
        gateway: Gateway::new(fleet.clone(), settings, bands, seed),
        engines: fleet
            .pods
            .iter()
            .map(|pod| match pod.role {
                Role::Prefill => Engine::Prefill(PrefillPod::default()),
                _ => Engine::Decode(DecodePod::default()),
            })
            .collect(),
        sessions,
        requests: Vec::new(),
        open: sessions.iter().map(|session| session.turns.len()).sum(),
        scraped: Vec::new(),
        measure_from,
        outcome: Outcome::default(),
    };
    for (session, facts) in sessions.iter().enumerate() {
        world.at(facts.at, Event::Arrive { session, turn: 0 });
    }
    world.at(0, Event::Scrape);
    world.at(0, Event::Tick);
    world.run();
    world.outcome
}

// === impl World ===

impl World<'_> {
    fn at(&mut self, time: Micros, event: Event) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, event)));
    }

    fn run(&mut self) {
        while self.open > 0 {
            let Reverse((time, _, event)) = self.events.pop().unwrap();
            self.now = time;
            match event {
                Event::Tick => {
                    self.gateway.tick(time / 1000);
                    self.at(time + TICK, Event::Tick);
                }
                Event::Scrape => self.scrape(),
                Event::Push => self.gateway.push(self.scraped.clone()),
                Event::Arrive { session, turn } => self.arrive(session, turn),
                Event::Prefilled { pod } => self.prefilled(pod),
                Event::Transferred { request } => self.transferred(request),
                Event::Ended { pod, version } => self.ended(pod, version),
            }
        }
        let quiet = self.gateway.is_quiet(self.now / 1000);
        assert!(quiet, "everything charged is given back");
        let prefill = self.engines.iter().filter_map(|engine| match engine {
            Engine::Prefill(pod) => Some(pod.tokens),
            Engine::Decode(_) => None,
        });
        let (total, cached) = prefill.fold((0, 0), |sum, pod| (sum.0 + pod.0, sum.1 + pod.1));
        self.outcome.cached_percent = 100.0 * cached as f64 / total as f64;
    }

    fn scrape(&mut self) {
        let now = self.now;
        let engines = self.engines.iter_mut();
        let samples = engines.map(|engine| match engine {
            Engine::Prefill(pod) => pod.sample(),
            Engine::Decode(pod) => pod.sample(now),
        });
        self.scraped = samples.map(|sample| (sample, now / 1000)).collect();
        self.at(now + PUSH_DELAY, Event::Push);
        self.at(now + REFRESH, Event::Scrape);
    }

    fn arrive(&mut self, session: usize, turn: usize) {
        let prompt = self.sessions[session].prompt(turn);
        let routed = self.gateway.route(&prompt, self.now / 1000);
        let request = self.requests.len();
        let pod = routed.prefill;
        self.requests.push(Request {
            session,
            turn,
            arrived: self.now,
            tokens: prompt.iter().map(|segment| segment.tokens).sum(),
            routed,
        });
        let Engine::Prefill(engine) = &mut self.engines[pod] else {
            panic!("the prefill leg went to a decode pod")
        };
        if let Some(time) = engine.push(Job { request, prompt }) {
            self.at(self.now + time, Event::Prefilled { pod });
        }
    }

    fn prefilled(&mut self, pod: usize) {
        let Engine::Prefill(engine) = &mut self.engines[pod] else {
            panic!("a decode pod has no prompts")
        };
        let (request, next) = engine.finish();
        if let Some(time) = next {
            self.at(self.now + time, Event::Prefilled { pod });
        }
        let Request { tokens, routed, .. } = &mut self.requests[request];
        let there = self.now + *tokens * TRANSFER_PER_TOKEN;
        self.gateway.hand_over(routed, self.now / 1000);
        self.at(there, Event::Transferred { request });
    }

    fn transferred(&mut self, request: usize) {
        let facts = &self.requests[request];
        let turn = &self.sessions[facts.session].turns[facts.turn];
        let sequence = Sequence {
            request,
            prompt_tokens: facts.tokens,
            output_tokens: turn.answer,
        };
        let pod = facts.routed.decode;
        let Engine::Decode(engine) = &mut self.engines[pod] else {
            panic!("the decode leg went to a prefill pod")
        };
        let first = engine.push(sequence, self.now);
        self.note(pod, first);
    }

    fn ended(&mut self, pod: usize, version: u64) {
        let Engine::Decode(engine) = &mut self.engines[pod] else {
            panic!("a prefill pod does not generate")
        };
        if engine.version != version {
            return;
        }
        let (done, first) = engine.finish(self.now);
        for request in done {
            let Request { session, turn, .. } = self.requests[request];
            self.gateway.end(&self.requests[request].routed);
            self.open -= 1;
            if let Some(next) = self.sessions[session].turns.get(turn + 1) {
                let turn = turn + 1;
                self.at(self.now + next.pause, Event::Arrive { session, turn });
            }
        }
        self.note(pod, first);
    }

    /// Notes first tokens, and when the pod's next request ends.
    fn note(&mut self, pod: usize, first: Vec<(usize, Micros)>) {
        for (request, at) in first {
            let arrived = self.requests[request].arrived;
            if arrived >= self.measure_from {
                self.outcome.ttft_ms.push((at - arrived) as f64 / 1000.0);
            }
        }
        if let Engine::Decode(engine) = &self.engines[pod]
            && let Some(end) = engine.next_end()
        {
            let version = engine.version;
            self.at(end, Event::Ended { pod, version });
        }
    }
}
