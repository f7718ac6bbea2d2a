//! The side channel: a decode engine asks the prefill engine for the KV a request names.

use std::sync::Arc;

use bytes::Bytes;
use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};

use super::Vllm;
use super::transfer::Source;
use crate::channel::CallError;
use crate::kv::{Claim, Content};
use crate::reply::{Reply, json_of};

const TAKE: &str = "/sim/side-channel/take";
const RENEW: &str = "/sim/side-channel/renew";

/// Why KV is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Reason {
    /// To generate from it.
    Pull,
    /// The request that named it was refused by the serving layer.
    Refused,
    /// Its client left first.
    Aborted,
}

/// Why a pull failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullError {
    /// Nobody listens at the named address.
    Unreachable,
    /// The other engine refused: another engine id, or blocks it does not have.
    Refused,
    /// The connection broke.
    Broken,
}

#[derive(Serialize, Deserialize)]
struct Take {
    engine_id: String,
    request_id: String,
    blocks: Vec<u32>,
    reason: Reason,
}

#[derive(Serialize, Deserialize)]
struct Taken {
    content: Content,
}

/// Remote KV that has to be freed if the request ends before pulling it.
pub(super) struct Duty {
    engine: Arc<Vllm>,
    source: Option<Source>,
}

impl From<CallError> for PullError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unreachable => Self::Unreachable,
            CallError::Broken => Self::Broken,
        }
    }
}

impl Vllm {
    /// Claims the KV of a source at the engine that holds it.
    pub(super) async fn claim(
        &self,
        source: &Source,
        reason: Reason,
    ) -> Result<Content, PullError> {
        let (status, body) = self.call(source, TAKE, reason).await?;
        if status != StatusCode::OK {
            return Err(PullError::Refused);
        }
        let taken = serde_json::from_slice::<Taken>(&body);
        taken.map(|t| t.content).map_err(|_| PullError::Broken)
    }

    /// Renews the lease of a source's KV while its request waits here.
    pub(super) async fn heartbeat(&self, source: &Source) {
        // A lost heartbeat shows as an expired lease; there is nobody to tell.
        let _ = self.call(source, RENEW, Reason::Pull).await;
    }

    async fn call(
        &self,
        source: &Source,
        path: &str,
        reason: Reason,
    ) -> Result<(StatusCode, Bytes), PullError> {
        let take = Take {
            engine_id: source.engine_id.clone(),
            request_id: source.request_id.clone(),
            blocks: source.blocks.clone(),
            reason,
        };
        let answer = self.channel.call(&source.host, source.port, path, &take);
        Ok(answer.await?)
    }

    /// Answers the side channel.
    pub(crate) fn side_channel(&self, path: &str, body: &[u8]) -> Response<Reply> {
        let refuse = |status| json_of(status, &());
        let Ok(take) = serde_json::from_slice::<Take>(body) else {
            return refuse(StatusCode::BAD_REQUEST);
        };
        if take.engine_id != *self.engine_id() {
            self.tallies.pulls_refused.up();
            return refuse(StatusCode::CONFLICT);
        }
        if path == RENEW {
            self.kv.renew(&take.request_id, self.core.pace().lease());
            return json_of(StatusCode::OK, &());
        }
        let content = match self.kv.claim(&take.request_id, &take.blocks) {
            Claim::OutOfRange => {
                self.tallies.pulls_refused.up();
                return refuse(StatusCode::UNPROCESSABLE_ENTITY);
            }
            Claim::Freed(content) => {
                let tally = match take.reason {
                    Reason::Pull => &self.tallies.taken,
                    Reason::Refused => &self.tallies.freed_by_refusal,
                    Reason::Aborted => &self.tallies.freed_by_abort,
                };
                tally.up();
                content
            }
            Claim::Unknown(content) => {
                self.tallies.after_expiry.up();
                self.meters.after_expiry.up();
                if take.reason == Reason::Pull {
                    self.tallies.stale_pulls.up();
                }
                content
            }
        };
        json_of(StatusCode::OK, &Taken { content })
    }
}

// === impl Duty ===

impl Duty {
    pub(super) fn new(engine: &Arc<Vllm>, source: Option<Source>) -> Self {
        Self {
            engine: Arc::clone(engine),
            source,
        }
    }

    /// The KV that is owed a claim.
    pub(super) fn source(&self) -> Option<&Source> {
        self.source.as_ref()
    }

    /// The KV, to be claimed by the caller, who takes the duty over.
    pub(super) fn take(&mut self) -> Option<Source> {
        self.source.take()
    }

    /// Nobody will free the KV before its lease ends.
    pub(super) fn forget(&mut self) {
        self.source = None;
    }

    /// Claims the KV in the background, to free it.
    pub(super) fn discharge(&mut self, reason: Reason) {
        let Some(source) = self.source.take() else {
            return;
        };
        let engine = Arc::clone(&self.engine);
        // None while the runtime shuts down, when nobody is left to notice.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                // The lease frees what could not be freed early.
                let _ = engine.claim(&source, reason).await;
            });
        }
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        self.discharge(Reason::Aborted);
    }
}
