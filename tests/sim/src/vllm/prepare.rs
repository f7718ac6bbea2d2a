//! Before the first token: a slot, blocks, and the prompt's KV, pulled or computed.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;

use super::Vllm;
use super::pull::{PullError, Reason};
use super::run::Run;
use super::transfer::{Fatal, Source, Transfer};
use crate::config::LoadFailure;
use crate::kv::{Allocation, Content};
use crate::strike::stall;

/// The prompt's KV is there.
pub(super) struct Ready {
    pub(super) allocation: Allocation,
    _slot: Option<OwnedSemaphorePermit>,
    /// Hash in pulled blocks and the id they were pulled under; none when computed here.
    pub(super) pulled: Option<(u64, String)>,
    pub(super) started: Instant,
    pub(super) first: Instant,
}

/// Why there is no text.
pub(super) enum Failure {
    Internal,
    Fatal(Fatal),
}

impl From<PullError> for Failure {
    fn from(_: PullError) -> Self {
        Self::Internal
    }
}

// === impl Run ===

impl Run {
    /// Waits for a slot and blocks, then gets the prompt's KV by pulling or computing.
    pub(super) async fn prepare(&mut self) -> Result<Ready, Failure> {
        let engine = Arc::clone(&self.engine);
        let slot = self.slot().await;
        let each = engine.kv.blocks(self.job.prompt.tokens);
        let all = each.saturating_mul(self.job.sequences());
        let hash = self.job.prompt.hash;
        let allocation = match engine.kv.try_allocate(all, hash) {
            Some(allocation) => allocation,
            None => {
                self.delivery.flight.wait(true);
                let allocation = engine.kv.allocate(all, hash).await;
                self.delivery.flight.wait(false);
                allocation
            }
        };
        let started = Instant::now();
        let pulled = match &self.job.transfer {
            Transfer::Consume(remote) => {
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
            engine.core.compute(self.job.prompt.bytes).await;
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
        self.delivery.flight.wait(true);
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
        self.delivery.flight.wait(false);
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
}

/// Claims the KV once per sequence, as vLLM pulls it.
async fn claim_all(
    engine: Arc<Vllm>,
    source: Source,
    sequences: u32,
) -> Result<Content, PullError> {
    let content = engine.claim(&source, Reason::Pull).await?;
    for _ in 1..sequences {
        engine.claim(&source, Reason::Pull).await?;
    }
    Ok(content)
}
