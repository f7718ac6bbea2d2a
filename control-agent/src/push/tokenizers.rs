//! Keeps one Envoy's tokenizers those of the files.
//!
//! Tokenizers are megabytes, so the filter is asked first what it holds: after a start, after
//! every topology that was pushed (an Envoy that restarted holds nothing), and when a file
//! changed. A failure here keeps nothing else from being pushed.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use pd_wire::control::TokenizerStatus;
use pd_wire::tokenizer::Message;
use pd_wire::topology::{Stamp, WIRE_VERSION};
use tokio::time::Instant;

use super::client::ControlClient;
use super::{Kind, Target};
use crate::metrics::Metrics;
use crate::tokenizers::{Receiver, Tokenizer};

/// Longest time for asking what an Envoy holds.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait after a failure.
const RETRY: Duration = Duration::from_secs(5);
/// Pushes of one tokenizer in a row that may follow 409s.
const ATTEMPTS: usize = 3;

/// What one Envoy was sent.
#[derive(Debug)]
pub(super) struct TokenizerFeed {
    agent: String,
    epoch: u64,
    sequence: u64,
    current: Receiver,
    /// The list that the Envoy is known to hold.
    settled: Option<Arc<Vec<Tokenizer>>>,
    retry_at: Option<Instant>,
    /// Last failure that was logged and still holds.
    said: Option<String>,
}

// === impl TokenizerFeed ===

impl TokenizerFeed {
    pub(super) fn new(agent: String, epoch: u64, current: Receiver) -> Self {
        Self {
            agent,
            epoch: epoch.max(1),
            sequence: 0,
            current,
            settled: None,
            retry_at: None,
            said: None,
        }
    }

    /// What the Envoy holds is unknown.
    pub(super) fn unsettle(&mut self) {
        self.settled = None;
    }

    /// Pushes what the Envoy lacks, if anything.
    pub(super) async fn round(&mut self, target: &Target, metrics: &Metrics) {
        let current = self.current.borrow().clone();
        let is_settled = |settled: &Arc<_>| Arc::ptr_eq(settled, &current);
        if self.settled.as_ref().is_some_and(is_settled) || current.is_empty() {
            return;
        }
        let now = Instant::now();
        if self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        match self.push_missing(&current, target, metrics).await {
            Ok(()) => {
                self.settled = Some(current);
                self.retry_at = None;
                self.said = None;
            }
            Err(error) => {
                self.retry_at = Some(now + RETRY);
                if self.said.as_ref() != Some(&error) {
                    tracing::warn!(envoy = target.name(), error, "tokenizers not pushed");
                    self.said = Some(error);
                }
            }
        }
    }

    async fn push_missing(
        &mut self,
        current: &[Tokenizer],
        target: &Target,
        metrics: &Metrics,
    ) -> Result<(), String> {
        let held = held(&target.client).await?;
        for tokenizer in current {
            let is_same =
                |it: &TokenizerStatus| it.model == tokenizer.model && it.digest == tokenizer.digest;
            if !held.iter().any(is_same) {
                self.push(tokenizer, target, metrics).await?;
            }
        }
        Ok(())
    }

    /// A refusal that another try would only repeat is logged and counts as done.
    async fn push(
        &mut self,
        tokenizer: &Tokenizer,
        target: &Target,
        metrics: &Metrics,
    ) -> Result<(), String> {
        for _ in 0..ATTEMPTS {
            let begun = Instant::now();
            let body = self.message(tokenizer)?;
            let answer = target.client.put(Kind::Tokenizer, body).await;
            let result = match &answer {
                Ok(answer) => answer.status.as_str().to_owned(),
                Err(error) => error.kind().to_owned(),
            };
            let label = Kind::Tokenizer.label();
            metrics.pushed(target.name(), label, result, begun.elapsed());
            let answer = answer.map_err(|error| error.to_string())?;
            let reply = answer.reply.unwrap_or_default();
            let (envoy, model) = (target.name(), &tokenizer.model);
            match answer.status {
                StatusCode::OK => {
                    let bytes = tokenizer.file.len();
                    tracing::info!(envoy, model, bytes, "tokenizer acknowledged");
                    return Ok(());
                }
                // Another agent, or an earlier life of this one, pushed the one that is held.
                StatusCode::CONFLICT if reply.agent != self.agent || reply.epoch > self.epoch => {
                    self.epoch = self.epoch.max(reply.epoch).saturating_add(1);
                }
                StatusCode::CONFLICT => self.sequence = self.sequence.max(reply.sequence),
                status @ (StatusCode::BAD_REQUEST
                | StatusCode::NOT_FOUND
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UPGRADE_REQUIRED) => {
                    let error = reply.error;
                    tracing::warn!(envoy, model, %status, error, "tokenizer refused");
                    return Ok(());
                }
                status => return Err(format!("status {status}: {}", reply.error)),
            }
        }
        Err("refused again and again because of what the Envoy holds".to_owned())
    }

    fn message(&mut self, tokenizer: &Tokenizer) -> Result<Vec<u8>, String> {
        self.sequence = self.sequence.saturating_add(1);
        let message = Message {
            stamp: Stamp {
                version: WIRE_VERSION,
                agent: self.agent.clone(),
                epoch: self.epoch,
                sequence: self.sequence,
            },
            model: tokenizer.model.clone(),
            file: Cow::Borrowed(&tokenizer.file),
        };
        message.encode().map_err(|error| error.to_string())
    }
}

/// Tokenizers that an Envoy holds; none when its filter knows of none.
async fn held(client: &ControlClient) -> Result<Vec<TokenizerStatus>, String> {
    match client.status(READ_TIMEOUT).await {
        Ok(Some(status)) => Ok(status.tokenizers),
        Ok(None) => Err("the status page cannot be read".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
