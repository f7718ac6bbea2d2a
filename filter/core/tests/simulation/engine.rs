//! Models of the two kinds of engines: simple enough to check by hand, queueing where real ones do.
//!
//! A prefill pod serves one prompt after the other, first come first served, as an engine with
//! chunked prefill does under load: `20 ms + 0.1 ms per token that its cache lacks`. It keeps the
//! prefixes of the last 400,000 tokens it computed, the least recently used go first.
//!
//! A decode pod serves all its requests at once: `8 ms + 0.2 ms per request` between two tokens of
//! each. A request holds the KV of its prompt and its answer until it ends, and waits while the
//! 500,000 tokens of the cache are taken.

use crate::workload::Segment;
use pd_wire::samples::PodSample;
use std::collections::{BTreeMap, VecDeque};

/// Time of the simulation, in µs.
pub(crate) type Micros = u64;

const PREFILL_OVERHEAD: f64 = 20_000.0;
const PREFILL_PER_TOKEN: f64 = 100.0;
const PREFIX_CAPACITY: u64 = 400_000;
const STEP: f64 = 8_000.0;
const STEP_PER_REQUEST: f64 = 200.0;
const KV_CAPACITY: u64 = 500_000;
/// Rates are measured over these times, as the agent does.
const THROUGHPUT_WINDOW: Micros = 1_000_000;
const DRAIN_WINDOW: Micros = 60_000_000;

/// A prompt in the queue of a prefill pod.
pub(crate) struct Job {
    pub(crate) request: usize,
    pub(crate) prompt: Vec<Segment>,
}

/// A pod that computes prompts.
#[derive(Default)]
pub(crate) struct PrefillPod {
    queue: VecDeque<Job>,
    held: BTreeMap<u64, (u64, u64)>,
    held_tokens: u64,
    clock: u64,
    busy_us: f64,
    served: u32,
    /// Tokens of all prompts served, and those that were cached.
    pub(crate) tokens: (u64, u64),
}

/// A pod that generates.
#[derive(Default)]
pub(crate) struct DecodePod {
    /// Requests in the batch, and where the pod's progress must be for each to end.
    batch: Vec<(f64, Sequence)>,
    waiting: VecDeque<Sequence>,
    /// Tokens a request would have got that was there from the beginning.
    progress: f64,
    at: Micros,
    kv_tokens: u64,
    generated: f64,
    finished: u32,
    /// Time, tokens generated and requests finished at past samples.
    history: VecDeque<(Micros, f64, u32)>,
    /// Raised whenever the batch changes: what was foretold before is void.
    pub(crate) version: u64,
}

/// A request at a decode pod.
#[derive(Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) request: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
}

// === impl PrefillPod ===

impl PrefillPod {
    /// Queues a prompt; when the pod was idle, returns how long it takes.
    pub(crate) fn push(&mut self, job: Job) -> Option<Micros> {
        self.queue.push_back(job);
        (self.queue.len() == 1).then(|| self.begin())
    }

    /// Ends the prompt being served: the request, and how long the next one takes.
    pub(crate) fn finish(&mut self) -> (usize, Option<Micros>) {
        let job = self.queue.pop_front().unwrap();
        for segment in &job.prompt {
            self.keep(segment);
        }
        let next = (!self.queue.is_empty()).then(|| self.begin());
        (job.request, next)
    }

    fn begin(&mut self) -> Micros {
        let prompt = &self.queue[0].prompt;
        let (mut total, mut cached, mut whole) = (0, 0, true);
        for segment in prompt {
            total += segment.tokens;
            let held = self.held.get(&segment.id).map_or(0, |(tokens, _)| *tokens);
            if whole {
                cached += held.min(segment.tokens);
                whole = held >= segment.tokens;
            }
        }
        self.tokens.0 += total;
        self.tokens.1 += cached;
        self.served += 1;
        let time = PREFILL_OVERHEAD + PREFILL_PER_TOKEN * (total - cached) as f64;
        self.busy_us += time;
        time as Micros
    }

    fn keep(&mut self, segment: &Segment) {
        self.clock += 1;
        let entry = self.held.entry(segment.id).or_default();
        self.held_tokens += segment.tokens.saturating_sub(entry.0);
        *entry = (entry.0.max(segment.tokens), self.clock);
        while self.held_tokens > PREFIX_CAPACITY {
            let oldest = *self
                .held
                .iter()
                .min_by_key(|(_, (_, used))| *used)
                .unwrap()
                .0;
            self.held_tokens -= self.held.remove(&oldest).unwrap().0;
        }
    }

    pub(crate) fn sample(&self) -> PodSample {
        let mean = self.busy_us / f64::from(self.served.max(1)) / 1000.0;
        PodSample {
            running: Some(f64::from(u8::from(!self.queue.is_empty()))),
            waiting: Some(self.queue.len().saturating_sub(1) as f64),
            prefill_ms: (self.served > 0).then_some(mean),
            ..PodSample::default()
        }
    }
}

// === impl DecodePod ===

impl DecodePod {
    /// Takes a request. Returns those that got their first token, and when.
    pub(crate) fn push(&mut self, sequence: Sequence, now: Micros) -> Vec<(usize, Micros)> {
        self.advance(now);
        self.waiting.push_back(sequence);
        self.admit()
    }

    /// Ends what is complete. Returns that, and the requests that got their first token.
    pub(crate) fn finish(&mut self, now: Micros) -> (Vec<usize>, Vec<(usize, Micros)>) {
        self.advance(now);
        let (done, rest) = std::mem::take(&mut self.batch)
            .into_iter()
            .partition(|(end, _)| *end <= self.progress + 1e-3);
        self.batch = rest;
        let done: Vec<(f64, Sequence)> = done;
        for (_, sequence) in &done {
            self.kv_tokens -= sequence.tokens();
            self.finished += 1;
        }
        let done = done.into_iter().map(|(_, sequence)| sequence.request);
        (done.collect(), self.admit())
    }

    /// When the next request ends, unless the batch changes before.
    pub(crate) fn next_end(&self) -> Option<Micros> {
        let end = self.batch.iter().map(|(end, _)| *end).reduce(f64::min)?;
        let wait = (end - self.progress).max(0.0) * self.step();
        Some(self.at + wait.ceil() as Micros)
    }

    fn admit(&mut self) -> Vec<(usize, Micros)> {
        self.version += 1;
        let before = self.batch.len();
        while let Some(next) = self.waiting.front() {
            if self.kv_tokens + next.tokens() > KV_CAPACITY {
                break;
            }
            self.kv_tokens += next.tokens();
            self.batch
                .push((self.progress + next.output_tokens as f64, *next));
            self.waiting.pop_front();
        }
        let first = self.at + self.step() as Micros;
        let new = self.batch[before..].iter();
        new.map(|(_, sequence)| (sequence.request, first)).collect()
    }

    fn step(&self) -> f64 {
        STEP + STEP_PER_REQUEST * self.batch.len() as f64
    }

    fn advance(&mut self, now: Micros) {
        let steps = (now - self.at) as f64 / self.step();
        self.at = now;
        self.progress += steps;
        self.generated += steps * self.batch.len() as f64;
    }

    /// What the engine reports at its metrics page.
    pub(crate) fn sample(&mut self, now: Micros) -> PodSample {
        self.advance(now);
        self.history.push_back((now, self.generated, self.finished));
        while self.history[0].0 + DRAIN_WINDOW < now {
            self.history.pop_front();
        }
        let since = |window| {
            let past = self.history.iter().find(|(at, ..)| at + window >= now);
            past.filter(|(at, ..)| *at < now).copied()
        };
        let seconds = |at: Micros| (now - at) as f64 / 1e6;
        PodSample {
            running: Some(self.batch.len() as f64),
            waiting: Some(self.waiting.len() as f64),
            kv_usage: Some(self.kv_tokens as f64 / KV_CAPACITY as f64),
            generation_throughput: since(THROUGHPUT_WINDOW)
                .map(|(at, generated, _)| (self.generated - generated) / seconds(at)),
            drain_rate: since(DRAIN_WINDOW)
                .map(|(at, _, finished)| f64::from(self.finished - finished) / seconds(at)),
            ..PodSample::default()
        }
    }
}

// === impl Sequence ===

impl Sequence {
    fn tokens(&self) -> u64 {
        self.prompt_tokens + self.output_tokens
    }
}
