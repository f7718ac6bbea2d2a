//! Response bodies: one piece, or a feed written by a future.
//!
//! A feed's future is polled by the connection that sends the body, so a client that leaves drops
//! the future and everything it owns at once; no task or channel outlives the connection.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

use crate::server::Hold;

/// Frames a feed may be ahead of the connection.
const FEED_LIMIT: usize = 32;

/// A response body.
pub(crate) struct Reply {
    content: Content,
    // Tells the connection that the response is over, when dropped.
    hold: Option<Hold>,
}

enum Content {
    Full(Option<Bytes>),
    Feed {
        queue: Queue,
        writer: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    },
}

#[derive(Clone, Default)]
struct Queue(Arc<Mutex<VecDeque<Bytes>>>);

/// The writing end of a feed, for its own future only.
pub(crate) struct Sink(Queue);

// === impl Reply ===

impl Reply {
    /// A body in one piece.
    pub(crate) fn full(bytes: impl Into<Bytes>) -> Self {
        Self {
            content: Content::Full(Some(bytes.into())),
            hold: None,
        }
    }

    /// A body written piece by piece; it ends when the future does.
    pub(crate) fn feed<F>(write: impl FnOnce(Sink) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let queue = Queue::default();
        let writer = write(Sink(queue.clone()));
        Self {
            content: Content::Feed {
                queue,
                writer: Some(Box::pin(writer)),
            },
            hold: None,
        }
    }

    /// Keeps `hold` until the body was sent or given up.
    pub(crate) fn keep(&mut self, hold: Hold) {
        self.hold = Some(hold);
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply").finish_non_exhaustive()
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.get_mut().content {
            Content::Full(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Content::Feed { queue, writer } => {
                if let Some(bytes) = queue.pop() {
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                if let Some(future) = writer
                    && future.as_mut().poll(cx).is_ready()
                {
                    *writer = None;
                }
                match (queue.pop(), writer) {
                    (Some(bytes), _) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                    (None, None) => Poll::Ready(None),
                    (None, Some(_)) => Poll::Pending,
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Full(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Content::Feed { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Full(Some(bytes)) => SizeHint::with_exact(bytes.len() as u64),
            Content::Full(None) => SizeHint::with_exact(0),
            Content::Feed { .. } => SizeHint::default(),
        }
    }
}

// === impl Queue, Sink ===

impl Queue {
    fn pop(&self) -> Option<Bytes> {
        self.lock().pop_front()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sink {
    /// Appends a piece; waits while the connection is too far behind.
    pub(crate) async fn send(&mut self, bytes: impl Into<Bytes>) {
        let mut bytes = Some(bytes.into());
        // No waker is kept: a full queue means the body has a frame to give, after which the
        // connection polls it, and so this future, again.
        std::future::poll_fn(|_| {
            let mut queue = self.0.lock();
            if queue.len() >= FEED_LIMIT {
                return Poll::Pending;
            }
            queue.extend(bytes.take());
            Poll::Ready(())
        })
        .await;
    }
}

/// A response of `content_type` in one piece.
pub(crate) fn respond(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Reply> {
    let body = body.into();
    let mut response = Response::new(Reply::full(body.clone()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// A JSON response.
pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Response<Reply> {
    respond(status, "application/json", body)
}

/// A path that exists for another method.
pub(crate) fn wrong_method(allowed: &'static str) -> Response<Reply> {
    let status = StatusCode::METHOD_NOT_ALLOWED;
    let mut response = json(status, r#"{"detail":"Method Not Allowed"}"#);
    let headers = response.headers_mut();
    headers.insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

/// A path that does not exist.
pub(crate) fn not_found() -> Response<Reply> {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#)
}

/// A JSON response of a serializable value.
pub(crate) fn json_of(status: StatusCode, value: &impl serde::Serialize) -> Response<Reply> {
    match serde_json::to_vec(value) {
        Ok(body) => json(status, body),
        Err(error) => respond(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            error.to_string(),
        ),
    }
}
