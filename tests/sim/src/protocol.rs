//! The protocols an engine may speak; one module each.

use std::sync::Arc;

use hyper::Response;

use crate::config::EngineKind;
use crate::core::Core;
use crate::engine::Exchange;
use crate::reply::Reply;
use crate::sglang::Sglang;
use crate::state::{AbortState, KvState, RoomState};
use crate::trtllm::Trtllm;
use crate::vllm::Vllm;

/// The engine behind the ports.
pub(crate) enum Protocol {
    /// vLLM with NIXL.
    Vllm(Arc<Vllm>),
    /// SGLang.
    Sglang(Arc<Sglang>),
    /// TensorRT-LLM.
    Trtllm(Arc<Trtllm>),
}

impl Protocol {
    pub(crate) fn new(core: &Arc<Core>, side_channel_port: u16) -> Self {
        match core.config.engine {
            EngineKind::Vllm => Self::Vllm(Vllm::new(core, side_channel_port)),
            EngineKind::Sglang => Self::Sglang(Sglang::new(core)),
            EngineKind::Trtllm => Self::Trtllm(Trtllm::new(core, side_channel_port)),
        }
    }

    /// Answers a request on the engine's port.
    pub(crate) async fn handle(&self, exchange: Exchange) -> Response<Reply> {
        match self {
            Self::Vllm(vllm) => vllm.handle(exchange).await,
            Self::Sglang(sglang) => sglang.handle(exchange).await,
            Self::Trtllm(trtllm) => trtllm.handle(exchange).await,
        }
    }

    /// Answers another engine.
    pub(crate) async fn side_channel(&self, path: &str, body: &[u8]) -> Response<Reply> {
        match self {
            Self::Vllm(vllm) => vllm.side_channel(path, body),
            Self::Sglang(sglang) => sglang.side_channel(path, body).await,
            Self::Trtllm(trtllm) => trtllm.side_channel(path, body).await,
        }
    }

    /// Frees held KV as its time ends, until the engine stops.
    pub(crate) fn expire_leases(&self) -> impl Future<Output = ()> + Send + 'static {
        let (vllm, trtllm) = match self {
            Self::Vllm(vllm) => (Some(Arc::clone(vllm)), None),
            // Its rooms have timeouts of their own.
            Self::Sglang(_) => (None, None),
            Self::Trtllm(trtllm) => (None, Some(Arc::clone(trtllm))),
        };
        async move {
            if let Some(vllm) = vllm {
                vllm.expire_leases().await;
            }
            if let Some(trtllm) = trtllm {
                trtllm.expire_held().await;
            }
        }
    }

    /// The KV held and moved.
    pub(crate) fn kv_state(&self) -> KvState {
        match self {
            Self::Vllm(vllm) => vllm.kv_state(),
            Self::Sglang(sglang) => sglang.kv_state(),
            Self::Trtllm(trtllm) => trtllm.kv_state(),
        }
    }

    /// The rooms, none with vLLM.
    pub(crate) fn room_state(&self) -> RoomState {
        match self {
            Self::Vllm(_) => RoomState::default(),
            Self::Sglang(sglang) => sglang.rooms.state(),
            Self::Trtllm(trtllm) => trtllm.rooms.state(),
        }
    }

    /// The aborts by call, SGLang's only.
    pub(crate) fn abort_state(&self) -> AbortState {
        match self {
            Self::Vllm(_) | Self::Trtllm(_) => AbortState::default(),
            Self::Sglang(sglang) => sglang.aborts.state(),
        }
    }

    /// A new process.
    pub(crate) fn restart(&self) {
        match self {
            Self::Vllm(vllm) => vllm.restart(),
            Self::Sglang(sglang) => sglang.restart(),
            Self::Trtllm(trtllm) => trtllm.restart(),
        }
    }

    /// Leases may be shorter from now on.
    pub(crate) fn lease_changed(&self) {
        match self {
            Self::Vllm(vllm) => vllm.lease_changed(),
            Self::Sglang(_) => {}
            Self::Trtllm(trtllm) => trtllm.lease_changed(),
        }
    }

    /// Zeroes what is counted for tests; the metrics are the process's own and stay.
    pub(crate) fn reset_counters(&self) {
        match self {
            Self::Vllm(vllm) => vllm.reset_counters(),
            Self::Sglang(sglang) => sglang.reset_counters(),
            Self::Trtllm(trtllm) => trtllm.reset_counters(),
        }
    }
}
