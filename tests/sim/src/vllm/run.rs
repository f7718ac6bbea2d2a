//! A generation request at work: waits for room, gets its KV, generates, answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;

use super::error::{INTERNAL, Refusal};
use super::kv::Allocation;
use super::metrics::{Finish, Origin, Timings};
use super::pull::{Duty, PullError, Reason};
use super::request::{Job, Prompt, Route};
use super::shape::{self, Answer};
use super::stream::Events;
use super::transfer::{Fatal, Offer, Source, Transfer};
use super::{Vllm, stall};
use crate::config::LoadFailure;
use crate::core::{Core, unix_ms};
use crate::fault::FaultKind;
use crate::flight::Flight;
use crate::identity::Identity;
use crate::reply::{Reply, Sink, json, respond};
use crate::server::Link;

const STREAM_TYPE: &str = "text/event-stream; charset=utf-8";

/// Time a 500 gets to reach its client before the engine dies.
const LAST_WORDS: Duration = Duration::from_millis(30);

/// A request and all it owns. Dropping it at any point gives everything back.
pub(super) struct Run {
    engine: Arc<Vllm>,
    job: Job,
    flight: Flight,
    duty: Duty,
    link: Arc<Link>,
    fault: Option<FaultKind>,
    arrived: Instant,
    tokens: u32,
    finish: Finish,
}

/// The prompt's KV is there.
struct Ready {
    allocation: Allocation,
    _slot: Option<OwnedSemaphorePermit>,
    /// Hash in pulled blocks and the id they were pulled under; none when computed here.
    pulled: Option<(u64, String)>,
    started: Instant,
    first: Instant,
}

/// Why there is no text.
enum Failure {
    Internal,
    Fatal(Fatal),
}

/// The engine dies when this is dropped, be it that the client left or the wait is over.
struct DoomedBy(Arc<Core>, &'static str);

impl Drop for DoomedBy {
    fn drop(&mut self) {
        self.0.die(self.1);
    }
}

impl From<PullError> for Failure {
    fn from(_: PullError) -> Self {
        Self::Internal
    }
}

// === impl Run ===

impl Run {
    pub(super) fn new(
        engine: &Arc<Vllm>,
        job: Job,
        flight: Flight,
        duty: Duty,
        link: Arc<Link>,
        fault: Option<FaultKind>,
    ) -> Self {
        let pace = engine.core.pace();
        let tokens = job
            .max_tokens
            .map_or(pace.tokens, |max| max.min(pace.tokens));
        let finish = if job.max_tokens.is_some_and(|max| max <= pace.tokens) {
            Finish::Length
        } else {
            Finish::Stop
        };
        Self {
            engine: Arc::clone(engine),
            job,
            flight,
            duty,
            link,
            fault,
            arrived: Instant::now(),
            tokens: tokens.max(1),
            finish,
        }
    }

    /// Does it all.
    pub(super) async fn respond(self) -> Response<Reply> {
        if self.job.stream {
            let events = Events::new(&self.job, self.engine.core.config.model.clone());
            let mut response = respond(StatusCode::OK, STREAM_TYPE, "");
            response.headers_mut().remove(CONTENT_LENGTH);
            *response.body_mut() = Reply::feed(|sink| self.stream(sink, events));
            response
        } else {
            self.whole().await
        }
    }

    async fn whole(mut self) -> Response<Reply> {
        let ready = match self.prepare().await {
            Ok(ready) => ready,
            Err(failure) => return self.fail(failure).await,
        };
        let rest = self.tokens.saturating_sub(1);
        let gap = self.engine.core.pace().token_interval();
        if !gap.is_zero() && rest > 0 {
            tokio::time::sleep(gap.saturating_mul(rest)).await;
        }
        let text = self.text(&ready);
        let body = self.conclude(ready, &text);
        self.deliver(body).await
    }

    /// Answers in one piece, with what a fault makes of it.
    async fn deliver(mut self, mut body: String) -> Response<Reply> {
        match &self.fault {
            Some(FaultKind::ResetBeforeHeaders { how, after_ms, .. }) => {
                stall(Some(*after_ms)).await;
                self.link.cut(*how);
                return std::future::pending().await;
            }
            Some(FaultKind::StallBeforeHeaders { ms, .. }) => stall(*ms).await,
            Some(FaultKind::BadJson) => body.truncate(half(&body)),
            Some(
                FaultKind::StallMidStream { .. }
                | FaultKind::ResetMidStream { .. }
                | FaultKind::ErrorMidStream { .. },
            ) => return self.deliver_half(body),
            _ => {}
        }
        self.flight.land();
        json(StatusCode::OK, body)
    }

    fn deliver_half(mut self, body: String) -> Response<Reply> {
        let mut response = json(StatusCode::OK, "");
        response
            .headers_mut()
            .insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        let mut first = Bytes::from(body);
        let second = first.split_off(first.len() / 2);
        *response.body_mut() = Reply::feed(|mut sink| async move {
            sink.send(first).await;
            self.interrupt().await;
            sink.send(second).await;
            self.flight.land();
        });
        response
    }

    /// The mid-stream part of a fault. Returns when the body goes on.
    async fn interrupt(&self) {
        match &self.fault {
            Some(FaultKind::ResetMidStream { how, .. }) => {
                self.link.cut(*how);
                std::future::pending().await
            }
            Some(FaultKind::StallMidStream { ms, .. }) => stall(*ms).await,
            _ => {}
        }
    }

    async fn fail(mut self, failure: Failure) -> Response<Reply> {
        self.engine.meters.failed();
        let response = Refusal::internal().respond(Some(self.job.route));
        match failure {
            Failure::Internal => {}
            Failure::Fatal(Fatal::AtOnce(cause)) => {
                let doomed = DoomedBy(Arc::clone(&self.engine.core), cause);
                tokio::spawn(async move {
                    tokio::time::sleep(LAST_WORDS).await;
                    drop(doomed);
                });
            }
            Failure::Fatal(Fatal::Hang(cause)) => self.hang(cause).await,
        }
        self.flight.land();
        response
    }

    /// Waits, then the engine dies; it dies as well if the client leaves.
    async fn hang(&self, cause: &'static str) {
        let doomed = DoomedBy(Arc::clone(&self.engine.core), cause);
        stall(Some(self.engine.core.config.hang_ms)).await;
        drop(doomed);
        std::future::pending::<()>().await;
    }

    async fn stream(mut self, mut sink: Sink, events: Events) {
        sink.send(events.opening(self.job.prompt.tokens)).await;
        let ready = match self.prepare().await {
            Ok(ready) => ready,
            Err(failure) => {
                self.engine.meters.failed();
                if let Failure::Fatal(Fatal::Hang(cause)) = failure {
                    self.hang(cause).await;
                }
                sink.send(format!("data: {INTERNAL}\n\ndata: [DONE]\n\n"))
                    .await;
                if let Failure::Fatal(Fatal::AtOnce(cause)) = failure {
                    tokio::time::sleep(LAST_WORDS).await;
                    drop(DoomedBy(Arc::clone(&self.engine.core), cause));
                }
                self.flight.land();
                return;
            }
        };
        let gap = self.engine.core.pace().token_interval();
        let identity = self.identity(&ready).to_string();
        let mut sent = 0u32;
        for at in 0..self.tokens {
            if at > 0 && !gap.is_zero() {
                tokio::time::sleep(gap).await;
            }
            let text = if at == 0 { identity.clone() } else { word(at) };
            let finish = (at.saturating_add(1) == self.tokens).then_some(self.finish);
            for choice in 0..self.job.sequences() {
                if self.breaks_after(sent) {
                    if matches!(self.fault, Some(FaultKind::ErrorMidStream { .. })) {
                        sink.send(format!("data: {INTERNAL}\n\ndata: [DONE]\n\n"))
                            .await;
                        self.engine.meters.failed();
                        self.flight.land();
                        return;
                    }
                    self.interrupt().await;
                }
                let mut event = events.content(&text, choice, finish);
                if sent == 0 && matches!(self.fault, Some(FaultKind::BadJson)) {
                    event.truncate(half(&event));
                    event.push_str("\n\n");
                }
                sink.send(event).await;
                sent = sent.saturating_add(1);
            }
        }
        if self.breaks_after(sent) {
            self.interrupt().await;
        }
        let cached = self.cached_tokens();
        let completion = self.tokens.saturating_mul(self.job.sequences());
        let prompt = self.prompt_tokens();
        // KV parameters are in no chunk: KV held for a decode engine leaks until its lease ends.
        self.settle(ready);
        sink.send(events.closing(&self.job, prompt, completion, cached, self.finish))
            .await;
        self.flight.land();
    }

    fn breaks_after(&self, chunks: u32) -> bool {
        matches!(
            self.fault,
            Some(
                FaultKind::StallMidStream { after_chunks, .. }
                | FaultKind::ResetMidStream { after_chunks, .. }
                | FaultKind::ErrorMidStream { after_chunks }
            ) if after_chunks == chunks
        )
    }

    /// Waits for a slot and blocks, then gets the prompt's KV by pulling or computing.
    async fn prepare(&mut self) -> Result<Ready, Failure> {
        let engine = Arc::clone(&self.engine);
        let slot = self.slot().await;
        let each = engine.kv.blocks(self.job.prompt.tokens);
        let all = each.saturating_mul(self.job.sequences());
        let hash = self.job.prompt.hash;
        let allocation = match engine.kv.try_allocate(all, hash) {
            Some(allocation) => allocation,
            None => {
                self.flight.wait(true);
                let allocation = engine.kv.allocate(all, hash).await;
                self.flight.wait(false);
                allocation
            }
        };
        let started = Instant::now();
        let pulled = match &self.job.transfer {
            Transfer::Consume(remote) => {
                if let Some(ids) = &remote.prompt_token_ids {
                    self.job.prompt = Prompt::from_token_ids(ids);
                }
                let needed = engine.kv.blocks(self.job.prompt.tokens);
                remote.source(needed).map_err(|fatal| {
                    self.duty.forget();
                    Failure::Fatal(fatal)
                })?;
                self.pull().await?
            }
            _ => None,
        };
        if pulled.is_none() {
            let time = engine.core.pace().prefill(self.job.prompt.bytes);
            if !time.is_zero() {
                tokio::time::sleep(time).await;
            }
        }
        Ok(Ready {
            allocation,
            _slot: slot,
            pulled,
            started,
            first: Instant::now(),
        })
    }

    async fn slot(&mut self) -> Option<OwnedSemaphorePermit> {
        let slots = self.engine.slots.clone()?;
        if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
            return Some(slot);
        }
        self.flight.wait(true);
        let mut turn = std::pin::pin!(slots.acquire_owned());
        // vLLM renews six times per lease.
        let beat = self.engine.core.pace().lease() / 6;
        let slot = loop {
            match tokio::time::timeout(beat, turn.as_mut()).await {
                // The semaphore is never closed.
                Ok(slot) => break slot.ok(),
                Err(_) => {
                    if let Some(source) = self.duty.source() {
                        self.engine.heartbeat(source).await;
                    }
                }
            }
        };
        self.flight.wait(false);
        slot
    }

    async fn pull(&mut self) -> Result<Option<(u64, String)>, Failure> {
        let engine = Arc::clone(&self.engine);
        let pace = engine.core.pace();
        if !pace.transfer().is_zero() {
            tokio::time::sleep(pace.transfer()).await;
        }
        let Some(source) = self.duty.take() else {
            return Err(Failure::Internal);
        };
        let begun = Instant::now();
        let id = source.request_id.clone();
        let blocks = source.blocks.len();
        // A task of its own: once begun, a pull is finished though the client leaves.
        let claims = tokio::spawn(claim_all(Arc::clone(&engine), source, self.job.sequences()));
        match claims.await.unwrap_or(Err(PullError::Broken)) {
            Ok(content) => {
                engine.tallies.pulled.up();
                engine
                    .meters
                    .pulled(blocks, begun.elapsed() + pace.transfer());
                // No prompt hashes to 0 but by chance: it stands for a mixture of prompts.
                Ok(Some((content.unwrap_or(0), id)))
            }
            Err(error) => {
                engine.tallies.pulls_failed.up();
                engine.meters.pull_failed();
                if error == PullError::Unreachable {
                    stall(Some(engine.core.config.closed_port_delay_ms)).await;
                }
                match engine.core.config.load_failure {
                    LoadFailure::Fail => Err(error.into()),
                    LoadFailure::Recompute => Ok(None),
                }
            }
        }
    }

    fn identity(&self, ready: &Ready) -> Identity {
        Identity {
            request: self.job.id.clone(),
            engine: self.engine.core.config.name.clone(),
            prompt: self.job.prompt.hash,
            kv: ready.pulled.as_ref().map(|(hash, _)| *hash),
            from: ready.pulled.as_ref().map(|(_, id)| id.clone()),
        }
    }

    fn text(&self, ready: &Ready) -> String {
        let mut text = self.identity(ready).to_string();
        for at in 1..self.tokens {
            text.push_str(&word(at));
        }
        text
    }

    fn prompt_tokens(&self) -> u32 {
        let prompt = &self.job.prompt;
        prompt.tokens.saturating_mul(prompt.count)
    }

    fn cached_tokens(&self) -> u32 {
        match &self.job.transfer {
            Transfer::Consume(remote) => remote.cached_tokens,
            _ => 0,
        }
    }

    /// Counts a finished request and writes its answer.
    fn conclude(&mut self, ready: Ready, text: &str) -> String {
        let produced = self.job.transfer == Transfer::Produce;
        let computed = ready.pulled.is_none();
        let kv = self.settle(ready);
        let kv = self.distort(kv);
        let prompt = self.prompt_tokens();
        let completion = self.tokens.saturating_mul(self.job.sequences());
        let block = self.engine.core.config.block_size;
        let created_cache = if computed { prompt / block * block } else { 0 };
        let ids = self
            .job
            .return_token_ids
            .then(|| self.job.prompt.token_ids());
        shape::write(&Answer {
            route: self.job.route,
            id: &self.job.id,
            created: unix_ms() / 1000,
            model: &self.engine.core.config.model,
            text,
            length: self.finish == Finish::Length,
            choices: self.job.sequences(),
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: self.cached_tokens(),
            created_cache_tokens: created_cache,
            prompt_token_ids: ids.as_deref(),
            kv: if produced { kv.as_deref() } else { None },
        })
    }

    /// Counts a finished request; KV for a decode engine is put under lease. Returns the
    /// hand-over parameters of that.
    fn settle(&mut self, ready: Ready) -> Option<String> {
        let engine = &self.engine;
        let origin = if ready.pulled.is_some() {
            Origin::Transferred
        } else {
            Origin::Computed
        };
        let timings = Timings {
            queue: ready.started.saturating_duration_since(self.arrived),
            prefill: ready.first.saturating_duration_since(ready.started),
            first_token: ready.first.saturating_duration_since(self.arrived),
            whole: self.arrived.elapsed(),
        };
        let generated = self.tokens.saturating_mul(self.job.sequences());
        let prompt = self.prompt_tokens();
        engine
            .meters
            .answered(origin, prompt, generated, self.finish, timings);
        if self.job.transfer != Transfer::Produce {
            if origin == Origin::Computed {
                engine.tallies.computed_locally.up();
            }
            return None;
        }
        engine.tallies.computed_for_others.up();
        Some(self.hold(ready.allocation))
    }

    /// Puts each sequence's KV under lease; the parameters offered are those of one sequence.
    fn hold(&self, mut allocation: Allocation) -> String {
        let engine = &self.engine;
        let (job, pace) = (&self.job, engine.core.pace());
        let each = engine.kv.blocks(job.prompt.tokens);
        let engine_id = engine.engine_id();
        let mut offered = String::new();
        for sequence in 0..job.sequences() {
            let (prompt, choice) = (sequence / job.n, sequence % job.n);
            let suffix = engine.core.words.next() as u32;
            // With n choices vLLM numbers the children and answers with the second of two.
            let child = if job.n > 1 {
                format!("{choice}_")
            } else {
                String::new()
            };
            let index = match job.route {
                Route::Chat | Route::Messages => String::new(),
                Route::Completions => format!("-{prompt}"),
                Route::Responses => "_0".to_owned(),
            };
            let id = format!("{child}{}{index}-{suffix:08x}", job.id);
            let part = allocation.split(each);
            if prompt == 0 && choice == job.n.saturating_sub(1) {
                offered = Offer {
                    blocks: part.blocks(),
                    engine_id: &engine_id,
                    request_id: &id,
                    host: &engine.advertised_host,
                    port: engine.side_channel_port,
                    tokens: job
                        .prompt
                        .tokens
                        .saturating_add(self.tokens)
                        .saturating_sub(1),
                    one_step: self.tokens == 1,
                }
                .write();
            }
            engine.kv.hold(&id, part, pace.lease());
        }
        offered
    }

    /// The hand-over parameters as a fault has them.
    fn distort(&self, kv: Option<String>) -> Option<String> {
        match &self.fault {
            Some(FaultKind::NoKvParams) => None,
            Some(FaultKind::KvParams { merge, remove }) => {
                let mut value: Value = serde_json::from_str(&kv?).unwrap_or_default();
                if let Some(members) = value.as_object_mut() {
                    for (name, new) in merge {
                        members.insert(name.clone(), new.clone());
                    }
                    for name in remove {
                        members.remove(name);
                    }
                }
                Some(value.to_string())
            }
            _ => kv,
        }
    }
}

/// Claims the KV once per sequence, as vLLM pulls it.
async fn claim_all(
    engine: Arc<Vllm>,
    source: Source,
    sequences: u32,
) -> Result<Option<u64>, PullError> {
    let content = engine.claim(&source, Reason::Pull).await?;
    for _ in 1..sequences {
        engine.claim(&source, Reason::Pull).await?;
    }
    Ok(content)
}

/// The text of a token after the first.
fn word(at: u32) -> String {
    format!(" t{}", at.saturating_add(1))
}

/// A cut in the middle that is no character's.
fn half(text: &str) -> usize {
    let mut at = text.len() / 2;
    while !text.is_char_boundary(at) {
        at = at.saturating_sub(1);
    }
    at
}
