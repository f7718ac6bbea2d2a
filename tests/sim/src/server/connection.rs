//! One client connection: HTTP/1.1 by hyper, the idle limit of uvicorn, and cuts on demand.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::Door;
use crate::core::Core;
use crate::engine::Service;
use crate::fault::Cut;

/// A connection as its requests see it.
pub(crate) struct Link {
    opened: Instant,
    cut: Notify,
    how: AtomicU8,
    busy: AtomicBool,
    /// Milliseconds from `opened` to the end of the last response.
    idle_since: AtomicU64,
}

/// Keeps a connection busy until the response it belongs to is over.
pub(crate) struct Hold(Arc<Link>);

pub(super) struct Connection {
    pub(super) service: Arc<Service>,
    pub(super) core: Arc<Core>,
    pub(super) door: Door,
    pub(super) epoch: u64,
    pub(super) peer: SocketAddr,
}

/// Counts a connection as open.
struct Open<'a>(&'a Core);

const WHOLE: u8 = 0;
const CUT_RST: u8 = 1;
const CUT_FIN: u8 = 2;

/// Far enough to mean never: connections that are kept open for ever check back daily.
const NEVER: Duration = Duration::from_secs(86_400);

// === impl Link, Hold, Open ===

impl Link {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            opened: Instant::now(),
            cut: Notify::new(),
            how: AtomicU8::new(WHOLE),
            busy: AtomicBool::new(false),
            idle_since: AtomicU64::new(u64::MAX),
        })
    }

    /// Has the connection cut; what was written before still goes out.
    pub(crate) fn cut(&self, how: Cut) {
        self.mark(how);
        self.cut.notify_one();
    }

    /// Whether the engine, not the client, ended the connection.
    pub(crate) fn is_cut(&self) -> bool {
        self.how.load(Ordering::Relaxed) != WHOLE
    }

    fn mark(&self, how: Cut) {
        let how = match how {
            Cut::Rst => CUT_RST,
            Cut::Fin => CUT_FIN,
        };
        self.how.store(how, Ordering::Relaxed);
    }

    /// Since when the connection waits for its next request; none before the first one.
    fn idle_since(&self) -> Option<Instant> {
        let millis = self.idle_since.load(Ordering::Relaxed);
        if self.busy.load(Ordering::Relaxed) || millis == u64::MAX {
            return None;
        }
        self.opened.checked_add(Duration::from_millis(millis))
    }

    fn hold(self: &Arc<Self>) -> Hold {
        self.busy.store(true, Ordering::Relaxed);
        Hold(Arc::clone(self))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let millis = self.0.opened.elapsed().as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX - 1);
        self.0.idle_since.store(millis, Ordering::Relaxed);
        self.0.busy.store(false, Ordering::Relaxed);
    }
}

impl<'a> Open<'a> {
    fn new(core: &'a Core) -> Self {
        core.counters.connections_open.up();
        core.counters.connections_total.up();
        Self(core)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.counters.connections_open.down();
    }
}

// === impl Connection ===

impl Connection {
    pub(super) async fn run(self, stream: TcpStream) {
        let core = &self.core;
        let _open = (self.door == Door::Engine).then(|| Open::new(core));
        let link = Link::new();
        let service = service_fn(|request| {
            let hold = link.hold();
            let link = Arc::clone(&link);
            let service = &self.service;
            async move {
                let mut response = service.serve(self.door, self.peer, link, request).await;
                response.body_mut().keep(hold);
                Ok::<_, Infallible>(response)
            }
        });
        let mut http = http1::Builder::new();
        // Idle connections are this task's business; a slow request head is not limited.
        http.timer(TokioTimer::new()).header_read_timeout(None);
        let mut http = http.serve_connection(TokioIo::new(stream), service);

        let mut gate = core.gate.subscribe();
        // The gate may have moved between accept and now.
        gate.mark_changed();
        let limit = core
            .config
            .keep_alive()
            .filter(|_| self.door == Door::Engine);
        let limit = limit.unwrap_or(NEVER);
        let mut idle = pin!(sleep_until(Instant::now() + limit));
        loop {
            tokio::select! {
                biased;
                _ = &mut http => return,
                () = link.cut.notified() => break,
                // Fails only when the engine is gone, and then it was stopped before.
                _ = gate.changed() => {
                    let now = *gate.borrow_and_update();
                    if now.stopped || (self.door.has_gate() && now.epoch != self.epoch) {
                        link.mark(Cut::Rst);
                        break;
                    }
                }
                () = idle.as_mut() => {
                    let now = Instant::now();
                    let due = link.idle_since().unwrap_or(now) + limit;
                    if due <= now {
                        return;
                    }
                    idle.as_mut().reset(due);
                }
            }
        }
        let stream = http.into_parts().io.into_inner();
        if link.how.load(Ordering::Relaxed) == CUT_RST {
            // Closing such a socket sends a reset.
            let _ = stream.set_zero_linger();
        }
    }
}
