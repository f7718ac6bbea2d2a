//! The client side of the channel engines talk to each other on.
//!
//! Between real engines it is ZMQ plus RDMA and no business of a router; here it is small HTTP
//! calls to the other engine's side-channel port.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Serialize;

/// vLLM gives a handshake this long.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Largest answer.
const MOST_ANSWER: usize = 64 << 10;

/// The client of an engine.
pub(crate) struct Channel(Client<HttpConnector, Full<Bytes>>);

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    /// Nobody listens at the address, or it is none.
    Unreachable,
    /// The connection broke.
    Broken,
}

impl Channel {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_LIMIT));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self(client)
    }

    /// Sends a message and waits for the answer, however long it takes. Dropped before, it closes
    /// its connection, by which the other engine notices.
    pub(crate) async fn call(
        &self,
        host: &str,
        port: u16,
        path: &str,
        message: &impl Serialize,
    ) -> Result<(StatusCode, Bytes), CallError> {
        let body = serde_json::to_vec(message).map_err(|_| CallError::Broken)?;
        let colon = host.contains(':') && !host.starts_with('[');
        let authority = if colon {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{authority}:{port}{path}"))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            // Not a host name at all.
            .map_err(|_| CallError::Unreachable)?;
        let response = self.0.request(request).await.map_err(|error| {
            if error.is_connect() {
                CallError::Unreachable
            } else {
                CallError::Broken
            }
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MOST_ANSWER);
        let body = body.collect().await.map_err(|_| CallError::Broken)?;
        Ok((status, body.to_bytes()))
    }
}
