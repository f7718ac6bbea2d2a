//! HTTP calls dispatched by guests. A call belongs to the root of the context it was made from,
//! survives the stream, and dies silently with its root (`exports.cc`, `Context::~Context`).

use super::headers::HeaderMap;
use super::{Status, VmKey};

/// Names one call of a gateway, in the order of dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub usize);

/// Where a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    /// Sent, no answer yet.
    Pending,
    /// Answered with headers.
    Answered,
    /// Reset: the guest saw a callback without headers.
    Failed,
    /// Its own timeout passed: the guest saw Envoy's 504.
    TimedOut,
    /// Its root or VM went away; the guest never hears of it.
    Abandoned,
}

/// One dispatched call as its upstream saw it.
#[derive(Debug, Clone)]
pub struct CallRecord {
    /// Its name.
    pub id: CallId,
    /// Index of the VM that sent it.
    pub vm: VmKey,
    /// Root context that owns it.
    pub root: u32,
    /// The guest's token.
    pub token: u32,
    /// Upstream cluster.
    pub cluster: String,
    /// Request headers, `content-length` as Envoy sets it.
    pub headers: HeaderMap,
    /// Request body.
    pub body: Vec<u8>,
    /// Timeout in milliseconds; 0 is none.
    pub timeout_ms: u32,
    /// When it was sent, milliseconds since the gateway started.
    pub at_ms: u64,
    /// Where it stands.
    pub state: CallState,
}

/// An answer on its way to the guest; without headers it is the failure shape.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Response headers with `:status`; empty for a reset.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Vec<u8>,
    /// Response trailers.
    pub trailers: HeaderMap,
}

/// All calls of a gateway.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) all: Vec<CallRecord>,
    /// Calls no engine was asked about yet.
    pub(crate) unrouted: Vec<CallId>,
}

// === impl Reply ===

impl Reply {
    /// A reply with a status and a body.
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let mut headers = HeaderMap::of(&[(":status", &status.to_string())]);
        headers.set("content-length", body.len().to_string().as_bytes());
        Self {
            headers,
            body,
            trailers: HeaderMap::default(),
        }
    }

    /// The failure shape: the connection was reset, or the reply was over the limit.
    pub(crate) fn failure() -> Self {
        Self::default()
    }

    /// Adds a header.
    #[must_use]
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.add(name, value.as_bytes());
        self
    }
}

// === impl Calls ===

impl Calls {
    /// Takes a call after Envoy's checks.
    ///
    /// # Errors
    /// `BadArgument` without `:path`, `:method` or `:authority`.
    pub(crate) fn dispatch(&mut self, mut call: CallRecord) -> Result<(), Status> {
        if [":path", ":method", ":authority"]
            .iter()
            .any(|name| call.headers.get(name).is_none())
        {
            return Err(Status::BadArgument);
        }
        if !call.body.is_empty() {
            call.headers
                .set("content-length", call.body.len().to_string().as_bytes());
        }
        call.id = CallId(self.all.len());
        self.unrouted.push(call.id);
        self.all.push(call);
        Ok(())
    }

    pub(crate) fn pending(&mut self, id: CallId) -> Option<&mut CallRecord> {
        self.all
            .get_mut(id.0)
            .filter(|call| call.state == CallState::Pending)
    }

    /// Forgets the pending calls of a VM, or of one of its roots.
    pub(crate) fn abandon(&mut self, vm: VmKey, root: Option<u32>) {
        for call in &mut self.all {
            if call.state == CallState::Pending
                && call.vm == vm
                && root.is_none_or(|root| call.root == root)
            {
                call.state = CallState::Abandoned;
            }
        }
    }
}
