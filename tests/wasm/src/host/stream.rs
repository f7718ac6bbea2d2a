//! One HTTP stream: what the filter holds of it, and what the two sides saw of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::headers::HeaderMap;

/// The two halves of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Client to upstream (decoding).
    Request,
    /// Upstream to client (encoding).
    Response,
}

/// Where the filter chain stands on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Iteration {
    /// What arrives passes through the filter and on.
    #[default]
    Running,
    /// Paused, but body callbacks still come.
    Stopped,
    /// Paused, the host keeps what arrives and calls nobody.
    StoppedAll,
}

/// State of one side in the host.
#[derive(Debug, Default)]
pub(crate) struct Leg {
    pub(crate) iteration: Iteration,
    /// The stream's own buffer (Envoy's decoding or encoding buffer).
    pub(crate) buffer: Vec<u8>,
    /// Whether the filter reads and edits `buffer` rather than the chunk at hand.
    pub(crate) buffering: bool,
    /// The chunk at hand, during its callback.
    pub(crate) chunk: Option<Vec<u8>>,
    /// Whether the headers of this side are readable by the filter.
    pub(crate) headers_visible: bool,
    /// Whether headers went on to the other side.
    pub(crate) headers_passed: bool,
    /// The sender's end of stream was seen.
    pub(crate) ended: bool,
    /// A callback of this side, or an action after it, is running.
    pub(crate) in_callback: bool,
    /// Body bytes received so far.
    pub(crate) received: u64,
}

/// One stream in a VM.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) root: u32,
    pub(crate) request_headers: HeaderMap,
    pub(crate) response_headers: Option<HeaderMap>,
    pub(crate) request: Leg,
    pub(crate) response: Leg,
    /// The access log is being written: both header maps are readable.
    pub(crate) logging: bool,
    /// Ending: callbacks run, actions are no longer taken.
    pub(crate) finishing: bool,
    /// A local reply was started: the request goes nowhere any more.
    pub(crate) replied: bool,
    pub(crate) properties: BTreeMap<String, Vec<u8>>,
    pub(crate) connection_id: u64,
    pub(crate) seen: Rc<RefCell<Seen>>,
}

/// How a stream ended for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Not yet.
    Open,
    /// A whole response arrived.
    Complete,
    /// The proxy cut the stream.
    Reset,
    /// The client went away.
    Disconnected,
    /// The VM died under it after the response had begun.
    VmLost,
}

/// A piece of response body as it reached the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Milliseconds since the gateway started.
    pub at_ms: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The request as the upstream of the main stream received it.
#[derive(Debug, Clone, Default)]
pub struct UpstreamRequest {
    /// Headers after every edit.
    pub headers: HeaderMap,
    /// Body after every edit.
    pub body: Vec<u8>,
    /// When its headers left, milliseconds since the gateway started.
    pub at_ms: u64,
    /// The end of the request was sent.
    pub ended: bool,
    /// The proxy cut the upstream before its response ended.
    pub cut: bool,
}

/// Everything observed from outside; outlives the stream.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) headers: Option<HeaderMap>,
    pub(crate) headers_at_ms: u64,
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) ending: Ending,
    pub(crate) ended_at_ms: u64,
    pub(crate) upstream: Option<UpstreamRequest>,
    pub(crate) upstream_finished: bool,
    pub(crate) code_details: Option<String>,
    pub(crate) filter_state: BTreeMap<String, Vec<u8>>,
    pub(crate) callbacks: Vec<&'static str>,
    pub(crate) deleted: bool,
}

// === impl Leg ===

impl Leg {
    /// What the filter sees as the body.
    pub(crate) fn visible(&mut self) -> Option<&mut Vec<u8>> {
        if self.buffering {
            Some(&mut self.buffer)
        } else {
            self.chunk.as_mut()
        }
    }
}

// === impl Stream ===

impl Stream {
    pub(crate) fn new(root: u32, headers: HeaderMap, seen: Rc<RefCell<Seen>>) -> Self {
        Self {
            root,
            request_headers: headers,
            response_headers: None,
            request: Leg::default(),
            response: Leg::default(),
            logging: false,
            finishing: false,
            replied: false,
            properties: BTreeMap::new(),
            connection_id: 0,
            seen,
        }
    }

    pub(crate) fn leg(&mut self, side: Side) -> &mut Leg {
        match side {
            Side::Request => &mut self.request,
            Side::Response => &mut self.response,
        }
    }

    /// The header map of a side, if the filter may write to it now.
    pub(crate) fn headers_mut(&mut self, side: Side) -> Option<&mut HeaderMap> {
        match side {
            Side::Request if self.request.headers_visible => Some(&mut self.request_headers),
            Side::Response if self.response.headers_visible => self.response_headers.as_mut(),
            _ => None,
        }
    }

    /// The header map of a side, if the filter may read it now.
    pub(crate) fn headers(&self, side: Side) -> Option<&HeaderMap> {
        match side {
            Side::Request if self.request.headers_visible || self.logging => {
                Some(&self.request_headers)
            }
            Side::Response if self.response.headers_visible || self.logging => {
                self.response_headers.as_ref()
            }
            _ => None,
        }
    }
}

// === impl Seen ===

impl Default for Seen {
    fn default() -> Self {
        Self {
            headers: None,
            headers_at_ms: 0,
            chunks: Vec::new(),
            ending: Ending::Open,
            ended_at_ms: 0,
            upstream: None,
            upstream_finished: false,
            code_details: None,
            filter_state: BTreeMap::new(),
            callbacks: Vec::new(),
            deleted: false,
        }
    }
}
