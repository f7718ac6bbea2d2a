//! A generation request at work: gets its prompt's KV by the engine's own means, generates,
//! answers.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use hyper::{Response, StatusCode};
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::answer::{Finish, Parts, Voice};
use super::ask::Ask;
use crate::core::{Core, unix_ms};
use crate::delivery::{Delivery, event_stream, word};
use crate::fault::{Cut, FaultKind};
use crate::identity::Identity;
use crate::kv::Allocation;
use crate::reply::{Reply, Sink};
use crate::strike::stall;

/// What an engine does itself about a request. Dropping it at any point gives everything back.
pub(crate) trait Work: Send + Sync + Sized + 'static {
    /// Gets the prompt's KV, computed or taken from elsewhere.
    fn prepare(
        &mut self,
        delivery: &mut Delivery,
    ) -> impl Future<Output = Result<Ready, Failure>> + Send;

    /// Counts a token of every choice.
    fn decoded(&self, tokens: u32);

    /// After the last token; returns more members of the answer: of the first choice, and at the
    /// end, each as a fragment that starts with a comma or is empty.
    fn settle(
        &mut self,
        ready: Ready,
        delivery: &Delivery,
        tokens: u32,
        finish: Finish,
    ) -> (String, String);

    /// The error answer.
    fn refuse(&self, failure: &Failure) -> Response<Reply>;

    /// The error in a stream that has begun; `None` when the stream just breaks.
    fn error_event(&self, failure: &Failure) -> Option<String>;
}

/// The prompt's KV is there.
pub(crate) struct Ready {
    pub(crate) allocation: Allocation,
    pub(crate) _slot: Option<OwnedSemaphorePermit>,
    /// Hash of the prompt in KV from elsewhere, and under which name; none when computed here.
    pub(crate) taken: Option<(u64, String)>,
    pub(crate) arrived: Instant,
    /// When work on the prompt began.
    pub(crate) started: Instant,
    pub(crate) first_token: Instant,
}

/// Why there is no text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

/// Tells a request that it is to end.
#[derive(Clone)]
pub(crate) struct Abort(watch::Receiver<bool>);

/// A request and all it owns.
pub(crate) struct Run<W> {
    pub(crate) core: Arc<Core>,
    pub(crate) work: W,
    pub(crate) ask: Ask,
    /// Id of the answer.
    pub(crate) id: String,
    /// Model named in the answer.
    pub(crate) model: String,
    pub(crate) voice: &'static Voice,
    pub(crate) delivery: Delivery,
    pub(crate) abort: Option<Abort>,
    /// Tokens to generate at most, over what the request allows; a prefill leg's is 1.
    pub(crate) most_tokens: u32,
    /// Whether a stream's headers go out before the first token.
    pub(crate) early_headers: bool,
}

/// How much text there is, or is to be.
struct Progress {
    tokens: u32,
    finish: Finish,
}

// === impl Progress ===

impl Progress {
    /// Ended by an abort after this many tokens.
    fn aborted(tokens: u32) -> Self {
        Self {
            tokens,
            finish: Finish::Abort,
        }
    }
}

// === impl Abort ===

impl Abort {
    pub(crate) fn new(called: watch::Receiver<bool>) -> Self {
        Self(called)
    }

    /// Waits until it is called; for ever when the request ended otherwise.
    pub(crate) async fn called(&self) {
        if self.0.clone().wait_for(|called| *called).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

// === impl Run ===

impl<W: Work> Run<W> {
    /// Does it all.
    pub(crate) async fn respond(mut self) -> Response<Reply> {
        if !self.ask.stream {
            return match self.work.prepare(&mut self.delivery).await {
                Ok(ready) => self.whole(ready).await,
                Err(failure) => self.fail(&failure),
            };
        }
        let stalls = matches!(
            self.delivery.fault,
            Some(FaultKind::StallBeforeHeaders { .. })
        );
        if self.early_headers && !stalls {
            return event_stream(Reply::feed(|mut sink| async move {
                match self.work.prepare(&mut self.delivery).await {
                    Ok(ready) => self.stream(&mut sink, ready).await,
                    Err(failure) => self.fail_stream(&mut sink, &failure).await,
                }
            }));
        }
        match self.work.prepare(&mut self.delivery).await {
            Ok(ready) => {
                self.stall_after_work().await;
                event_stream(Reply::feed(|mut sink| async move {
                    self.stream(&mut sink, ready).await;
                }))
            }
            Err(failure) => self.fail(&failure),
        }
    }

    fn fail(mut self, failure: &Failure) -> Response<Reply> {
        self.delivery.flight.land();
        self.work.refuse(failure)
    }

    async fn fail_stream(mut self, sink: &mut Sink, failure: &Failure) {
        self.delivery.flight.land();
        match self.work.error_event(failure) {
            Some(event) => sink.send(format!("{event}data: [DONE]\n\n")).await,
            None => self.break_off().await,
        }
    }

    /// Ends the connection in the middle of the stream, as a server does whose handler failed.
    async fn break_off(&self) {
        self.delivery.link.cut(Cut::Fin);
        std::future::pending().await
    }

    fn goal(&self) -> Progress {
        let most = self.most_tokens.max(1);
        match self.ask.max_tokens {
            Some(max) if max <= most => Progress {
                tokens: max,
                finish: Finish::Length,
            },
            _ => Progress {
                tokens: most,
                finish: Finish::Stop,
            },
        }
    }

    /// Waits for token number `at`; false when the request was aborted instead.
    async fn token(&self, at: u32) -> bool {
        let gap = self.core.pace().token_interval();
        let pause = at > 0 && !gap.is_zero();
        self.unless_aborted(async {
            if pause {
                tokio::time::sleep(gap).await;
            }
        })
        .await
    }

    /// Waits; false when the request was aborted before.
    async fn unless_aborted(&self, wait: impl Future<Output = ()> + Send) -> bool {
        let Some(abort) = &self.abort else {
            wait.await;
            return true;
        };
        tokio::select! {
            biased;
            () = abort.called() => false,
            () = wait => true,
        }
    }

    /// Stands still where the fault says so, with the work done and no answer begun; true when an
    /// abort ended it.
    async fn stall_after_work(&mut self) -> bool {
        let Some(FaultKind::StallBeforeHeaders { ms, .. }) = self.delivery.fault else {
            return false;
        };
        self.delivery.fault = None;
        !self.unless_aborted(stall(ms)).await
    }

    fn identity(&self, ready: &Ready) -> String {
        let identity = Identity {
            request: self.id.clone(),
            engine: self.core.config.name.clone(),
            prompt: self.ask.prompt.hash,
            kv: ready.taken.as_ref().map(|(hash, _)| *hash),
            from: ready.taken.as_ref().map(|(_, name)| name.clone()),
        };
        identity.to_string()
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            voice: self.voice,
            ask: &self.ask,
            id: &self.id,
            model: &self.model,
            created: unix_ms() / 1000,
        }
    }

    async fn whole(mut self, ready: Ready) -> Response<Reply> {
        let mut text = String::new();
        let mut done = self.goal();
        for at in 0..done.tokens {
            if !self.token(at).await {
                done = Progress::aborted(at);
                break;
            }
            self.work.decoded(self.ask.sequences());
            if at == 0 {
                text = self.identity(&ready);
            } else {
                text.push_str(&word(at));
            }
        }
        if self.stall_after_work().await {
            done.finish = Finish::Abort;
        }
        let (choice, end) = self
            .work
            .settle(ready, &self.delivery, done.tokens, done.finish);
        let body = self
            .parts()
            .whole(&text, done.finish, done.tokens, &choice, &end);
        self.delivery.whole(body).await
    }

    async fn stream(mut self, sink: &mut Sink, ready: Ready) {
        let identity = self.identity(&ready);
        let mut done = self.goal();
        let (mut sent, mut opened) = (0u32, false);
        'tokens: for at in 0..done.tokens {
            if !self.token(at).await {
                done = Progress::aborted(at);
                break;
            }
            self.work.decoded(self.ask.sequences());
            let text = if at == 0 { identity.clone() } else { word(at) };
            let finish = (at.saturating_add(1) == done.tokens).then_some(done.finish);
            for choice in 0..self.ask.sequences() {
                if self.delivery.breaks_after(sent) {
                    if sent == 0 {
                        opened = true;
                        sink.send(self.parts().opening()).await;
                    }
                    if self.delivery.errs() {
                        let failure = Failure {
                            status: StatusCode::INTERNAL_SERVER_ERROR,
                            message: "Injected.".to_owned(),
                        };
                        return self.fail_stream(sink, &failure).await;
                    }
                    if !self.unless_aborted(self.delivery.interrupt()).await {
                        done = Progress::aborted(at);
                        break 'tokens;
                    }
                }
                let mut event = self.parts().content(&text, choice, finish);
                if sent == 0 {
                    event = self.delivery.first_chunk(event);
                    if !opened {
                        event = self.parts().opening() + &event;
                    }
                }
                sink.send(event).await;
                sent = sent.saturating_add(1);
            }
        }
        if done.finish == Finish::Abort {
            for choice in 0..self.ask.sequences() {
                sink.send(self.parts().cut_short(choice, Finish::Abort))
                    .await;
            }
        } else if self.delivery.breaks_after(sent) {
            self.delivery.interrupt().await;
        }
        self.work
            .settle(ready, &self.delivery, done.tokens, done.finish);
        sink.send(self.parts().closing(done.tokens)).await;
        self.delivery.flight.land();
    }
}
