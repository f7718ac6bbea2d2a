//! A client that tells when each piece of an answer arrived, and can leave at any moment.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context as Task, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Bound on every answer; longer than any timer a test waits for.
const PATIENCE: Duration = Duration::from_secs(60);

type Upload = BoxBody<Bytes, Infallible>;

/// A request to be sent.
#[derive(Clone, Debug)]
pub struct Call {
    method: Method,
    path: String,
    headers: Vec<(String, String)>,
    pieces: Vec<Bytes>,
    chunked: bool,
}

/// A body of unannounced length.
struct Pieces(VecDeque<Bytes>);

/// One kept connection; requests on it follow each other.
pub struct Link {
    sender: SendRequest<Upload>,
    connection: JoinHandle<()>,
}

/// An answer whose body is still arriving. Dropping it, and the link if there is one, leaves.
pub struct Live {
    /// Status.
    pub status: u16,
    /// Response headers.
    pub headers: HeaderMap,
    /// When the headers arrived, from the start of the call.
    pub head_at: Duration,
    started: Instant,
    body: Incoming,
    /// Set when the call has a connection of its own.
    link: Option<Link>,
}

/// A piece of a body as it came from the socket.
#[derive(Clone, Debug)]
pub struct Piece {
    /// When it arrived, from the start of the call.
    pub at: Duration,
    /// The bytes.
    pub bytes: Bytes,
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Response headers.
    pub headers: HeaderMap,
    /// When the headers arrived, from the start of the call.
    pub head_at: Duration,
    /// The body.
    pub pieces: Vec<Piece>,
    /// Whether the body ended as announced; false for a stream that was cut.
    pub complete: bool,
    /// When the body ended.
    pub total: Duration,
}

// === impl Call ===

impl Call {
    /// A GET.
    pub fn get(path: &str) -> Self {
        Self::new(Method::GET, path)
    }

    /// A PUT.
    pub fn put(path: &str, body: impl Into<Bytes>) -> Self {
        Self::new(Method::PUT, path).body(body)
    }

    /// A POST of JSON.
    pub fn post(path: &str, body: impl Into<Bytes>) -> Self {
        Self::new(Method::POST, path)
            .header("content-type", "application/json")
            .body(body)
    }

    /// A request without a body.
    pub fn new(method: Method, path: &str) -> Self {
        Self {
            method,
            path: path.to_owned(),
            headers: Vec::new(),
            pieces: Vec::new(),
            chunked: false,
        }
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the body, sent with its length.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.pieces = vec![body.into()];
        self
    }

    /// Sends the body in chunks of this many bytes, without announcing its length.
    pub fn chunks_of(mut self, size: usize) -> Self {
        let body: Bytes = self.pieces.concat().into();
        self.pieces = (0..body.len())
            .step_by(size.max(1))
            .map(|at| body.slice(at..body.len().min(at + size.max(1))))
            .collect();
        self.chunked = true;
        self
    }

    /// Sends the request on a connection of its own and reads the whole answer.
    ///
    /// # Errors
    /// No answer: the connection failed before response headers came.
    pub async fn send(self, to: SocketAddr) -> Result<Answer> {
        let live = self.start(to).await?;
        bounded(live.finish()).await
    }

    /// Sends the request on a connection of its own and returns at the response headers.
    ///
    /// # Errors
    /// As [`Call::send`].
    pub async fn start(self, to: SocketAddr) -> Result<Live> {
        let started = Instant::now();
        let mut link = Link::open(to).await?;
        let mut live = link.start_at(self, started).await?;
        live.link = Some(link);
        Ok(live)
    }

    fn into_request(self, host: &str) -> Result<Request<Upload>> {
        let mut request = Request::builder().method(self.method).uri(&self.path);
        let headers = request.headers_mut().context("the path is not valid")?;
        headers.insert("host", HeaderValue::from_str(host)?);
        for (name, value) in &self.headers {
            let name = HeaderName::from_bytes(name.as_bytes())?;
            headers.append(name, HeaderValue::from_str(value)?);
        }
        let body = if self.chunked {
            Pieces(self.pieces.into()).boxed()
        } else {
            Full::new(self.pieces.concat().into()).boxed()
        };
        Ok(request.body(body)?)
    }
}

// === impl Pieces ===

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Task<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }
}

// === impl Link ===

impl Link {
    /// Connects.
    ///
    /// # Errors
    /// Nothing listens there.
    pub async fn open(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to)
            .await
            .with_context(|| format!("cannot connect to {to}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(async move {
            // How it ended shows in the body of the answer.
            let _ = connection.await;
        });
        Ok(Self { sender, connection })
    }

    /// Sends a request and returns at the response headers.
    ///
    /// # Errors
    /// The connection ended before response headers came.
    pub async fn start(&mut self, call: Call) -> Result<Live> {
        self.start_at(call, Instant::now()).await
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// As [`Link::start`].
    pub async fn send(&mut self, call: Call) -> Result<Answer> {
        let live = self.start(call).await?;
        bounded(live.finish()).await
    }

    async fn start_at(&mut self, call: Call, started: Instant) -> Result<Live> {
        let request = call.into_request("gateway.test")?;
        let answer = async {
            self.sender.ready().await?;
            Ok(self.sender.send_request(request).await?)
        };
        let (head, body) = bounded(answer).await?.into_parts();
        Ok(Live {
            status: head.status.as_u16(),
            headers: head.headers,
            head_at: started.elapsed(),
            started,
            body,
            link: None,
        })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Closes the socket at once, as a client that goes away does.
        self.connection.abort();
    }
}

// === impl Live ===

impl Live {
    /// The next piece; none at the end.
    ///
    /// # Errors
    /// The stream was cut.
    pub async fn next(&mut self) -> Result<Option<Piece>> {
        loop {
            let frame = bounded(async { Ok(self.body.frame().await) }).await?;
            let Some(frame) = frame else { return Ok(None) };
            if let Ok(bytes) = frame?.into_data() {
                let at = self.started.elapsed();
                return Ok(Some(Piece { at, bytes }));
            }
        }
    }

    /// Reads to the end, or to where the stream was cut.
    ///
    /// # Errors
    /// None; the result is for use in chains.
    pub async fn finish(mut self) -> Result<Answer> {
        let mut pieces = Vec::new();
        let complete = loop {
            match self.next().await {
                Ok(Some(piece)) => pieces.push(piece),
                Ok(None) => break true,
                Err(_) => break false,
            }
        };
        Ok(Answer {
            status: self.status,
            headers: self.headers,
            head_at: self.head_at,
            pieces,
            complete,
            total: self.started.elapsed(),
        })
    }
}

// === impl Answer ===

impl Answer {
    /// The whole body.
    pub fn bytes(&self) -> Bytes {
        let pieces: Vec<&[u8]> = self.pieces.iter().map(|p| p.bytes.as_ref()).collect();
        pieces.concat().into()
    }

    /// The whole body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// The body as JSON; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes()).unwrap_or(Value::Null)
    }

    /// A header, empty when absent.
    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name);
        value.and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    /// The `data:` events of a stream, each with the time its end arrived; `[DONE]` included.
    pub fn events(&self) -> Vec<(Duration, String)> {
        let mut events = Vec::new();
        let mut pending = String::new();
        for piece in &self.pieces {
            pending.push_str(&String::from_utf8_lossy(&piece.bytes));
            while let Some((event, rest)) = pending.split_once("\n\n") {
                let data = event.strip_prefix("data: ").unwrap_or(event).to_owned();
                events.push((piece.at, data));
                pending = rest.to_owned();
            }
        }
        events
    }

    /// The generated text, of a stream or of a whole answer, chat or completions.
    pub fn generated(&self) -> String {
        let texts = |value: &Value| -> String {
            let choice = &value["choices"][0];
            let places = [
                &choice["delta"]["content"],
                &choice["message"]["content"],
                &choice["text"],
            ];
            places.iter().filter_map(|v| v.as_str()).collect()
        };
        if self.header("content-type").starts_with("text/event-stream") {
            let events = self.events();
            let values = events.iter().map(|(_, data)| serde_json::from_str(data));
            values.flatten().map(|value| texts(&value)).collect()
        } else {
            texts(&self.json())
        }
    }

    /// Panics with the whole answer unless it has this status and, if it is an error, OpenAI's
    /// shape.
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.shown());
        if status >= 400 {
            let error = &self.json()["error"];
            // A body wrapped into another error would show its own braces in the message.
            let message = error["message"].as_str().unwrap_or("{\"error\"");
            let shaped = !message.contains("{\"error\"") && error["type"].is_string();
            assert!(shaped, "not an OpenAI error: {}", self.shown());
            let kind = self.header("content-type");
            assert!(kind.starts_with("application/json"), "{}", self.shown());
        }
        self
    }

    /// Everything, for messages.
    pub fn shown(&self) -> String {
        let text: String = self.text().chars().take(800).collect();
        format!("{} {:?}\n{text}", self.status, self.headers)
    }
}

async fn bounded<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(result) => result,
        Err(_) => bail!("no answer within {PATIENCE:?}"),
    }
}
