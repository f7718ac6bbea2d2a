//! A generation request at work: waits for room, gets its KV, generates, answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Response, StatusCode};

use super::Vllm;
use super::error::{INTERNAL, Refusal};
use super::metrics::Finish;
use super::prepare::{Failure, Ready};
use super::pull::Duty;
use super::request::Job;
use super::shape::{self, Answer};
use super::stream::Events;
use super::strike::stall;
use super::transfer::{Fatal, Transfer};
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
    pub(super) engine: Arc<Vllm>,
    pub(super) job: Job,
    pub(super) flight: Flight,
    pub(super) duty: Duty,
    link: Arc<Link>,
    pub(super) fault: Option<FaultKind>,
    pub(super) arrived: Instant,
    pub(super) tokens: u32,
    pub(super) finish: Finish,
}

/// The engine dies when this is dropped, be it that the client left or the wait is over.
struct DoomedBy(Arc<Core>, &'static str);

impl Drop for DoomedBy {
    fn drop(&mut self) {
        self.0.die(self.1);
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

    pub(super) fn prompt_tokens(&self) -> u32 {
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
