//! One bounded HTTP exchange: a deadline over all of it and a limit on the answer's size.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// Why an exchange gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// Nothing listens, or the address cannot be resolved or reached.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The connection broke before the whole answer was there.
    #[error("broken exchange: {0}")]
    Broken(String),
    /// The deadline passed first.
    #[error("no answer within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The answer is longer than the limit, in bytes.
    #[error("answer is longer than {0} bytes")]
    TooLong(usize),
}

impl ExchangeError {
    /// Label value for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Broken(_) => "broken",
            Self::Timeout(_) => "timeout",
            Self::TooLong(_) => "too_long",
        }
    }
}

/// HTTP/1.1 client with keep-alive; cloning shares its connections.
#[derive(Clone, Debug)]
pub struct Client {
    inner: legacy::Client<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// A client that keeps one idle connection per host, for at most `idle`.
    pub fn new(idle: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let inner = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(idle)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(1)
            .build(connector);
        Self { inner }
    }

    /// Sends `request` and reads the whole answer: at most `limit` bytes, within `timeout`.
    pub async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        limit: usize,
        timeout: Duration,
    ) -> Result<(StatusCode, Bytes), ExchangeError> {
        let whole = async {
            let response = self.inner.request(request).await.map_err(|error| {
                let text = chain(&error);
                if error.is_connect() {
                    ExchangeError::Connect(text)
                } else {
                    ExchangeError::Broken(text)
                }
            })?;
            let status = response.status();
            let body = Limited::new(response.into_body(), limit).collect().await;
            match body {
                Ok(body) => Ok((status, body.to_bytes())),
                Err(error) if error.is::<LengthLimitError>() => Err(ExchangeError::TooLong(limit)),
                Err(error) => Err(ExchangeError::Broken(chain(error.as_ref()))),
            }
        };
        match tokio::time::timeout(timeout, whole).await {
            Ok(answer) => answer,
            Err(_) => Err(ExchangeError::Timeout(timeout)),
        }
    }
}

/// An error with its causes: the outermost of hyper's says little by itself.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
