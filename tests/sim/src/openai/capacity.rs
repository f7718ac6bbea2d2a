//! What bounds the requests of an engine: KV blocks and slots of the batch.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ask::Ask;
use crate::config::EngineConfig;
use crate::kv::{Allocation, KvCache};

/// Blocks and slots.
pub(crate) struct Capacity {
    pub(crate) kv: Arc<KvCache>,
    slots: Option<Arc<Semaphore>>,
}

impl Capacity {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let slots = config.max_num_seqs as usize;
        Self {
            kv: KvCache::new(config.num_blocks, config.block_size),
            slots: (slots > 0).then(|| Arc::new(Semaphore::new(slots))),
        }
    }

    /// Whether a request fits in at all.
    pub(crate) fn fits(&self, ask: &Ask, config: &EngineConfig) -> bool {
        ask.prompt.tokens <= config.max_model_len && self.blocks(ask) <= self.kv.capacity()
    }

    /// Blocks for a request, when there is room.
    pub(crate) async fn allocate(&self, ask: &Ask) -> Allocation {
        let (blocks, hash) = (self.blocks(ask), ask.prompt.hash);
        match self.kv.try_allocate(blocks, hash) {
            Some(allocation) => allocation,
            None => self.kv.allocate(blocks, hash).await,
        }
    }

    /// A slot, when one is free; none where they are not limited.
    pub(crate) async fn slot(&self) -> Option<OwnedSemaphorePermit> {
        let slots = Arc::clone(self.slots.as_ref()?);
        // The semaphore is never closed.
        slots.acquire_owned().await.ok()
    }

    fn blocks(&self, ask: &Ask) -> u32 {
        let one = self.kv.blocks(ask.prompt.tokens);
        one.saturating_mul(ask.sequences())
    }
}
