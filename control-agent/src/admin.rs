//! The agent's own HTTP server: `/metrics`, `/healthz`, `/readyz`.
//!
//! Ready means that pods were loaded and that some Envoy acknowledged them once. Gauges that
//! mirror state are read when `/metrics` is: the filters' ledgers and bands by asking every
//! Envoy, within a short deadline; one that does not answer is left out and counted.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use pd_wire::control::{Ledgers, Status};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::http::ExchangeError;
use crate::metrics::Metrics;
use crate::push::Target;
use crate::runtime::Stop;
use crate::scrape::Board;
use crate::snapshot::Fleet;

/// Most connections at the same time; more wait.
const MAX_CONNECTIONS: usize = 64;
/// Longest wait for the filters' ledgers and state.
const READ_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for a request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Wait after a failed accept: out of descriptors, mostly.
const ACCEPT_WAIT: Duration = Duration::from_millis(100);
/// What Prometheus asks for.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the server shows.
#[derive(Debug)]
pub struct Admin {
    metrics: Arc<Metrics>,
    board: Arc<Board>,
    targets: Vec<Arc<Target>>,
    fleet: watch::Receiver<Option<Arc<Fleet>>>,
}

impl Admin {
    /// Shows these.
    pub fn new(
        metrics: Arc<Metrics>,
        board: Arc<Board>,
        targets: Vec<Arc<Target>>,
        fleet: watch::Receiver<Option<Arc<Fleet>>>,
    ) -> Self {
        Self {
            metrics,
            board,
            targets,
            fleet,
        }
    }

    async fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if !matches!(*method, Method::GET | Method::HEAD) {
            return plain(StatusCode::METHOD_NOT_ALLOWED, "only GET");
        }
        match path {
            "/healthz" => plain(StatusCode::OK, "ok"),
            "/readyz" => self.readiness(),
            "/metrics" => self.page().await,
            _ => plain(
                StatusCode::NOT_FOUND,
                "not found: /metrics, /healthz, /readyz",
            ),
        }
    }

    fn readiness(&self) -> Response<Full<Bytes>> {
        if self.fleet.borrow().is_none() {
            plain(StatusCode::SERVICE_UNAVAILABLE, "no pods loaded yet")
        } else if !self.targets.iter().any(|target| target.fed()) {
            plain(
                StatusCode::SERVICE_UNAVAILABLE,
                "no Envoy has acknowledged a push yet",
            )
        } else {
            plain(StatusCode::OK, "ok")
        }
    }

    async fn page(&self) -> Response<Full<Bytes>> {
        let (ledgers, statuses) = self.filters().await;
        let now = Instant::now();
        let acks: Vec<_> = self
            .targets
            .iter()
            .flat_map(|target| target.ages(now))
            .collect();
        let extent = self.board.extent(now);
        match self.metrics.render(extent, &acks, &ledgers, &statuses, now) {
            Ok(page) => {
                let mut response = Response::new(Full::new(Bytes::from(page)));
                let content_type = HeaderValue::from_static(OPEN_METRICS);
                response.headers_mut().insert(CONTENT_TYPE, content_type);
                response
            }
            Err(_) => plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics cannot be written",
            ),
        }
    }

    /// The ledgers and the state of every Envoy's filter, each by its Envoy's name, as far as
    /// they answer in time.
    async fn filters(&self) -> (Vec<Ledgers>, Vec<(String, Status)>) {
        let mut reads = JoinSet::new();
        for target in &self.targets {
            let target = target.clone();
            reads.spawn(async move {
                let client = &target.client;
                let (ledgers, status) =
                    tokio::join!(client.ledgers(READ_TIMEOUT), client.status(READ_TIMEOUT));
                (client.name().to_owned(), ledgers, status)
            });
        }
        let (mut ledgers, mut statuses) = (Vec::new(), Vec::new());
        while let Some(read) = reads.join_next().await {
            let Ok((name, read, status)) = read else {
                self.metrics.ledger_read("broken");
                self.metrics.status_read("broken");
                continue;
            };
            let (read, result) = outcome(read);
            self.metrics.ledger_read(result);
            ledgers.extend(read);
            let (status, result) = outcome(status);
            self.metrics.status_read(result);
            statuses.extend(status.map(|status| (name, status)));
        }
        (ledgers, statuses)
    }
}

/// What was read, and the word for how that went.
fn outcome<T>(read: Result<Option<T>, ExchangeError>) -> (Option<T>, &'static str) {
    match read {
        Ok(Some(read)) => (Some(read), "ok"),
        Ok(None) => (None, "refused"),
        Err(error) => (None, error.kind()),
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// Serves until `stop`; requests under way are answered.
pub async fn serve(listener: TcpListener, admin: Arc<Admin>, mut stop: Stop) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let place = places.clone().acquire_owned();
        let accept = async { (place.await, listener.accept().await) };
        let (place, accepted) = tokio::select! {
            () = stop.requested() => break,
            accepted = accept => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = serve_connection(stream, admin.clone(), stop.clone());
                connections.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_WAIT).await;
            }
        }
    }
    while connections.join_next().await.is_some() {}
    Ok(())
}

async fn serve_connection(stream: TcpStream, admin: Arc<Admin>, mut stop: Stop) {
    let service = service_fn(move |request: Request<Incoming>| {
        let admin = admin.clone();
        async move {
            let answer = admin.answer(request.method(), request.uri().path()).await;
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    // A broken connection is the client's affair.
    let _closed = tokio::select! {
        closed = connection.as_mut() => closed,
        () = stop.requested() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
}
