//! One client request and what came of it.

use std::collections::BTreeMap;

use crate::config::PluginId;
use crate::engines::parse_json;
use crate::host::calls::CallRecord;
use crate::host::headers::HeaderMap;
use crate::host::stream::{Chunk, Ending, UpstreamRequest};

/// A client request, built by chained modifiers.
#[derive(Debug, Clone)]
pub struct Exchange {
    pub(crate) headers: HeaderMap,
    pub(crate) chunks: Vec<Vec<u8>>,
    pub(crate) end_with_last_chunk: bool,
    pub(crate) worker: usize,
    pub(crate) plugin: PluginId,
    pub(crate) properties: BTreeMap<String, Vec<u8>>,
}

/// A request under way (or over); names it to its gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flight(pub(crate) usize);

/// What was seen of a request from outside so far.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Status the client got; `None` while no response headers reached it.
    pub status: Option<u16>,
    /// Response headers the client got.
    pub headers: HeaderMap,
    /// When they reached it, milliseconds since the gateway started.
    pub headers_at_ms: u64,
    /// Response body as it arrived.
    pub chunks: Vec<Chunk>,
    /// How it ended.
    pub ending: Ending,
    /// When it ended, milliseconds since the gateway started.
    pub ended_at_ms: u64,
    /// The request as the upstream saw it; `None` when nothing was forwarded.
    pub upstream: Option<UpstreamRequest>,
    /// Calls the guests dispatched since this request began (of all requests: a call has no owner).
    pub calls: Vec<CallRecord>,
    /// `response.code_details`.
    pub code_details: Option<String>,
    /// Filter state the guest set.
    pub filter_state: BTreeMap<String, Vec<u8>>,
    /// Callbacks that ran, in order: `request_headers`, `request_body`, `response_headers`,
    /// `response_body`, `log`, `done`, `delete`.
    pub callbacks: Vec<&'static str>,
    /// `on_delete` ran.
    pub deleted: bool,
}

// === impl Exchange ===

impl Exchange {
    /// A request without a body.
    pub fn new(method: &str, path: &str) -> Self {
        Self {
            headers: HeaderMap::of(&[
                (":method", method),
                (":path", path),
                (":authority", "gateway.test"),
                (":scheme", "http"),
            ]),
            chunks: Vec::new(),
            end_with_last_chunk: false,
            worker: 0,
            plugin: PluginId::default(),
            properties: BTreeMap::new(),
        }
    }

    /// A GET.
    pub fn get(path: &str) -> Self {
        Self::new("GET", path)
    }

    /// A POST with a body in one piece and its content-length.
    pub fn post(path: &str, body: impl Into<Vec<u8>>) -> Self {
        Self::new("POST", path).body(body)
    }

    /// A POST with a JSON body.
    pub fn json(path: &str, body: &serde_json::Value) -> Self {
        Self::post(path, body.to_string()).header("content-type", "application/json")
    }

    /// Sets the body, in one piece, with its content-length.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        self.headers
            .set("content-length", body.len().to_string().as_bytes());
        self.chunks = if body.is_empty() {
            Vec::new()
        } else {
            vec![body]
        };
        self
    }

    /// Sends the body in pieces of at most `size` bytes.
    #[must_use]
    pub fn chunked(mut self, size: usize) -> Self {
        let body = self.chunks.concat();
        self.chunks = body.chunks(size.max(1)).map(<[u8]>::to_vec).collect();
        self
    }

    /// The last piece of the body carries the end of the stream, as HTTP/2 clients send it; by
    /// default an empty piece follows, as Envoy's HTTP/1 codec delivers it.
    #[must_use]
    pub fn end_with_last_chunk(mut self) -> Self {
        self.end_with_last_chunk = true;
        self
    }

    /// Sets a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.set(name, value.as_bytes());
        self
    }

    /// Removes a header.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers.remove(name);
        self
    }

    /// Sends it to another worker than the first.
    #[must_use]
    pub fn worker(mut self, worker: usize) -> Self {
        self.worker = worker;
        self
    }

    /// Sends it through another plugin than the first.
    #[must_use]
    pub fn plugin(mut self, plugin: PluginId) -> Self {
        self.plugin = plugin;
        self
    }

    /// Sets a property of this request, such as `xds.filter_chain_name`.
    #[must_use]
    pub fn property(mut self, path: &str, value: impl Into<Vec<u8>>) -> Self {
        self.properties.insert(path.to_owned(), value.into());
        self
    }
}

// === impl Outcome ===

impl Outcome {
    /// A response header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.text(name)
    }

    /// The response body so far.
    pub fn body(&self) -> Vec<u8> {
        self.chunks
            .iter()
            .flat_map(|chunk| chunk.bytes.iter().copied())
            .collect()
    }

    /// The response body so far as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body()).into_owned()
    }

    /// The response body as JSON.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self) -> serde_json::Value {
        parse_json(&self.body())
    }

    /// The request as the upstream saw it.
    ///
    /// # Panics
    /// When nothing was forwarded.
    pub fn upstream(&self) -> &UpstreamRequest {
        self.upstream
            .as_ref()
            .unwrap_or_else(|| panic!("nothing was forwarded: {self:#?}"))
    }

    /// Asserts a whole response with this status.
    ///
    /// # Panics
    /// When it is another, or incomplete.
    pub fn expect(&self, status: u16) -> &Self {
        assert_eq!(
            (self.status, self.ending),
            (Some(status), Ending::Complete),
            "{self:#?}"
        );
        self
    }
}

// === impl UpstreamRequest ===

impl UpstreamRequest {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self) -> serde_json::Value {
        parse_json(&self.body)
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.text(name)
    }
}

// === impl CallRecord ===

impl CallRecord {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self) -> serde_json::Value {
        parse_json(&self.body)
    }

    /// Request path.
    pub fn path(&self) -> &str {
        self.headers.text(":path").unwrap_or_default()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.text(name)
    }
}
