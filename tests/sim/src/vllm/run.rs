//! A generation request at work: waits for room, gets its KV, generates, answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::Response;

use super::Vllm;
use super::error::{INTERNAL, Refusal};
use super::metrics::Finish;
use super::prepare::{Failure, Ready};
use super::pull::Duty;
use super::request::Job;
use super::shape::{self, Answer};
use super::stream::Events;
use super::transfer::{Fatal, Transfer};
use crate::core::{Core, unix_ms};
use crate::delivery::{Delivery, event_stream, word};
use crate::identity::Identity;
use crate::reply::{Reply, Sink};
use crate::strike::stall;

/// Time a 500 gets to reach its client before the engine dies.
const LAST_WORDS: Duration = Duration::from_millis(30);

/// A request and all it owns. Dropping it at any point gives everything back.
pub(super) struct Run {
    pub(super) engine: Arc<Vllm>,
    pub(super) job: Job,
    pub(super) delivery: Delivery,
    pub(super) duty: Duty,
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
    pub(super) fn new(engine: &Arc<Vllm>, job: Job, delivery: Delivery, duty: Duty) -> Self {
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
            delivery,
            duty,
            arrived: Instant::now(),
            tokens: tokens.max(1),
            finish,
        }
    }

    /// Does it all.
    pub(super) async fn respond(self) -> Response<Reply> {
        if self.job.stream {
            let events = Events::new(&self.job, self.engine.core.config.model.clone());
            event_stream(Reply::feed(|sink| self.stream(sink, events)))
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
        self.delivery.whole(body).await
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
        self.delivery.flight.land();
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
                self.delivery.flight.land();
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
                if self.delivery.breaks_after(sent) {
                    if self.delivery.errs() {
                        sink.send(format!("data: {INTERNAL}\n\ndata: [DONE]\n\n"))
                            .await;
                        self.engine.meters.failed();
                        self.delivery.flight.land();
                        return;
                    }
                    self.delivery.interrupt().await;
                }
                let mut event = events.content(&text, choice, finish);
                if sent == 0 {
                    event = self.delivery.first_chunk(event);
                }
                sink.send(event).await;
                sent = sent.saturating_add(1);
            }
        }
        if self.delivery.breaks_after(sent) {
            self.delivery.interrupt().await;
        }
        let cached = self.cached_tokens();
        let completion = self.tokens.saturating_mul(self.job.sequences());
        let prompt = self.prompt_tokens();
        // KV parameters are in no chunk: KV held for a decode engine leaks until its lease ends.
        self.settle(ready);
        sink.send(events.closing(&self.job, prompt, completion, cached, self.finish))
            .await;
        self.delivery.flight.land();
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
        let kv = self.delivery.distort(kv);
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
