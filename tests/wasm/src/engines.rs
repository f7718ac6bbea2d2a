//! Scripted upstreams: what an engine (or any other endpoint) answers to a dispatched call or to
//! the main stream, and when.

use crate::host::headers::HeaderMap;

/// A request as an upstream receives it.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Cluster of a dispatched call; `None` for the main stream.
    pub cluster: Option<String>,
    /// Request headers.
    pub headers: HeaderMap,
    /// Request body.
    pub body: Vec<u8>,
}

/// How a script ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    End,
    Stall,
    Reset,
}

/// One answer as a plan in time; every delay counts from the step before it.
#[derive(Debug, Clone)]
pub struct Script {
    pub(crate) after_ms: u64,
    /// `None`: no headers ever come.
    pub(crate) headers: Option<HeaderMap>,
    pub(crate) trailers: HeaderMap,
    pub(crate) chunks: Vec<(u64, Vec<u8>)>,
    pub(crate) finish: Finish,
    /// Delay of the end of stream after the last chunk; `None`: the last chunk carries it.
    pub(crate) end_after_ms: Option<u64>,
    pub(crate) details: &'static str,
}

type Endpoint = Box<dyn FnMut(&Sent) -> Script>;

/// The upstreams of a gateway, by the value of its target header.
#[derive(Default)]
pub(crate) struct Engines {
    by_address: Vec<(String, Endpoint)>,
    fallback: Option<Endpoint>,
}

// === impl Sent ===

impl Sent {
    /// Request path.
    pub fn path(&self) -> &str {
        self.headers.text(":path").unwrap_or_default()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.text(name)
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self) -> serde_json::Value {
        parse_json(&self.body)
    }
}

pub(crate) fn parse_json(body: &[u8]) -> serde_json::Value {
    serde_json::from_slice(body)
        .unwrap_or_else(|error| panic!("no JSON ({error}): {}", String::from_utf8_lossy(body)))
}

// === impl Script ===

impl Script {
    /// A whole response at once, with its content-length.
    pub fn answer(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let mut headers = HeaderMap::of(&[(":status", &status.to_string())]);
        headers.set("content-length", body.len().to_string().as_bytes());
        let script = Self {
            headers: Some(headers),
            ..Self::stall()
        }
        .ends();
        if body.is_empty() {
            return script;
        }
        Self {
            chunks: vec![(0, body)],
            end_after_ms: Some(0),
            ..script
        }
    }

    /// A JSON response.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        Self::answer(status, body.to_string()).header("content-type", "application/json")
    }

    /// A 200 event stream: headers now, then one chunk every `gap_ms`, then a separate end.
    pub fn stream(gap_ms: u64, chunks: &[&str]) -> Self {
        let headers = HeaderMap::of(&[(":status", "200"), ("content-type", "text/event-stream")]);
        let chunks = chunks
            .iter()
            .map(|c| (gap_ms, c.as_bytes().to_vec()))
            .collect();
        Self {
            headers: Some(headers),
            chunks,
            end_after_ms: Some(0),
            ..Self::stall()
        }
        .ends()
    }

    /// Accepts the request and never answers.
    pub fn stall() -> Self {
        Self {
            after_ms: 0,
            headers: None,
            trailers: HeaderMap::default(),
            chunks: Vec::new(),
            finish: Finish::Stall,
            end_after_ms: None,
            details: "via_upstream",
        }
    }

    /// The connection breaks. A call sees a callback without headers; on the main stream Envoy
    /// answers 503 before response headers and cuts after them.
    pub fn reset() -> Self {
        Self {
            finish: Finish::Reset,
            ..Self::stall()
        }
    }

    /// Nobody listens: Envoy's own 503, in both legs an ordinary response.
    pub fn refuse() -> Self {
        let body = "upstream connect error or disconnect/reset before headers. \
                    reset reason: remote connection failure";
        let details = "upstream_reset_before_response_started{remote_connection_failure}";
        Self {
            details,
            ..Self::answer(503, body)
        }
        .header("content-type", "text/plain")
    }

    /// Delays the first step.
    #[must_use]
    pub fn after(mut self, ms: u64) -> Self {
        self.after_ms = ms;
        self
    }

    /// Adds a response header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        if let Some(headers) = &mut self.headers {
            headers.add(name, value.as_bytes());
        }
        self
    }

    /// Replaces the content type of the response.
    #[must_use]
    pub fn typed(mut self, content_type: &str) -> Self {
        if let Some(headers) = &mut self.headers {
            headers.set("content-type", content_type.as_bytes());
        }
        self
    }

    /// Adds a response trailer; only calls deliver it.
    #[must_use]
    pub fn trailer(mut self, name: &str, value: &str) -> Self {
        self.trailers.add(name, value.as_bytes());
        self
    }

    /// Replaces the status of the response.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        if let Some(headers) = &mut self.headers {
            headers.set(":status", status.to_string().as_bytes());
        }
        self
    }

    /// Never ends after its last chunk.
    #[must_use]
    pub fn then_stall(mut self) -> Self {
        self.finish = Finish::Stall;
        self
    }

    /// Breaks after its last chunk.
    #[must_use]
    pub fn then_reset(mut self) -> Self {
        self.finish = Finish::Reset;
        self
    }

    /// The last chunk carries the end of the stream, as HTTP/2 upstreams send it; by default an
    /// empty piece follows, as Envoy's HTTP/1 codec delivers it.
    #[must_use]
    pub fn end_with_last_chunk(mut self) -> Self {
        self.end_after_ms = None;
        self
    }

    fn ends(mut self) -> Self {
        self.finish = Finish::End;
        self
    }

    /// When the whole answer is complete, milliseconds after the request.
    pub(crate) fn total_ms(&self) -> u64 {
        let chunks: u64 = self.chunks.iter().map(|(gap, _)| gap).sum();
        self.after_ms + chunks + self.end_after_ms.unwrap_or_default()
    }
}

// === impl Engines ===

impl Engines {
    pub(crate) fn insert(&mut self, address: &str, endpoint: Endpoint) {
        self.by_address.retain(|(known, _)| known != address);
        self.by_address.push((address.to_owned(), endpoint));
    }

    pub(crate) fn fall_back(&mut self, endpoint: Endpoint) {
        self.fallback = Some(endpoint);
    }

    /// What the upstream at `address` answers; `None` when the test has to answer itself.
    pub(crate) fn ask(&mut self, address: Option<&str>, sent: &Sent) -> Option<Script> {
        let named = self
            .by_address
            .iter_mut()
            .find(|(known, _)| Some(known.as_str()) == address)
            .map(|(_, endpoint)| endpoint);
        named
            .or(self.fallback.as_mut())
            .map(|endpoint| endpoint(sent))
    }
}
