//! A running engine: its ports, its handle for tests, and the split of paths between the protocol
//! and the admin endpoint.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode};
use tokio::task::JoinHandle;

use crate::admin;
use crate::config::{ConfigError, EngineConfig, PaceChange};
use crate::core::Core;
use crate::fault::{Fault, FaultKind};
use crate::journal::{Journal, Record};
use crate::protocol::Protocol;
use crate::reply::{Reply, json, not_found};
use crate::server::{self, Door, Link};
use crate::state::State;

/// What answers an engine's connections.
pub(crate) struct Service {
    core: Arc<Core>,
    protocol: Protocol,
}

/// A request whose body has arrived.
pub(crate) struct Exchange {
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
    pub(crate) peer: SocketAddr,
    pub(crate) link: Arc<Link>,
}

/// A running engine. Dropping it stops it.
pub struct Engine {
    service: Arc<Service>,
    address: SocketAddr,
    admin_address: SocketAddr,
    side_channel_port: u16,
    tasks: Vec<JoinHandle<()>>,
}

/// Starts an engine on the current tokio runtime.
///
/// # Errors
/// The configuration is invalid ([`ConfigError`] inside), a port or the log file cannot be opened.
pub async fn start(config: EngineConfig) -> io::Result<Engine> {
    let invalid = |error: ConfigError| io::Error::new(io::ErrorKind::InvalidInput, error);
    config.validate().map_err(invalid)?;
    let listener = server::bind(&config.host, config.port).await?;
    let admin_listener = server::bind(&config.host, config.admin_port).await?;
    let side_channel = server::bind(&config.host, config.side_channel_port).await?;
    let address = listener.local_addr()?;
    let side_channel_port = side_channel.local_addr()?.port();
    let admin_address = admin_listener.local_addr()?;
    let journal = Journal::open(&config)?;
    let core = Core::new(config, journal);
    let protocol = Protocol::new(&core, side_channel_port);
    let tasks = vec![tokio::spawn(protocol.expire_leases())];
    let service = Arc::new(Service { core, protocol });
    let doors = [
        (Door::Engine, listener),
        (Door::SideChannel, side_channel),
        (Door::Admin, admin_listener),
    ];
    let doors = doors
        .map(|(door, listener)| tokio::spawn(server::accept(Arc::clone(&service), door, listener)));
    Ok(Engine {
        service,
        address,
        admin_address,
        side_channel_port,
        tasks: tasks.into_iter().chain(doors).collect(),
    })
}

// === impl Service ===

impl Service {
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Answers one request.
    pub(crate) async fn serve(
        &self,
        door: Door,
        peer: SocketAddr,
        link: Arc<Link>,
        request: Request<Incoming>,
    ) -> Response<Reply> {
        let (parts, body) = request.into_parts();
        let body = match Limited::new(body, self.core.config.body_limit)
            .collect()
            .await
        {
            Ok(body) => body.to_bytes(),
            Err(error) => return unreadable(error.as_ref()),
        };
        let path = parts.uri.path();
        if let Some(path) = path.strip_prefix("/sim/admin") {
            return admin::handle(self, &parts, path, &body);
        }
        match door {
            Door::Engine => {}
            Door::SideChannel => return self.protocol.side_channel(path, &body).await,
            Door::Admin => return not_found(),
        }
        let exchange = Exchange {
            parts,
            body,
            peer,
            link,
        };
        self.protocol.handle(exchange).await
    }

    /// See [`Engine::state`].
    pub(crate) fn state(&self) -> State {
        let (config, counters) = (&self.core.config, &self.core.counters);
        let deaths = self.core.deaths();
        State {
            name: config.name.clone(),
            role: config.role,
            listening: self.core.gate.borrow().open,
            requests_total: counters.requests_total.get(),
            running: counters.running.get(),
            waiting: counters.waiting.get(),
            aborted: counters.aborted.get(),
            connections_open: counters.connections_open.get(),
            connections_total: counters.connections_total.get(),
            deaths: deaths.len() as u64,
            death_causes: deaths,
            kv: self.protocol.kv_state(),
            rooms: self.protocol.room_state(),
            aborts: self.protocol.abort_state(),
            faults: self.core.faults.list(),
        }
    }

    /// See [`Engine::inject`].
    pub(crate) fn inject(&self, fault: Fault) -> bool {
        match fault.kind {
            FaultKind::RefuseConnections { keep_open } => self.core.refuse(keep_open),
            FaultKind::ResumeConnections => self.core.resume(),
            _ => return self.core.faults.arm(fault),
        }
        true
    }

    /// See [`Engine::set_pace`].
    pub(crate) fn set_pace(&self, change: PaceChange) -> Result<(), ConfigError> {
        self.core.set_pace(self.core.pace().changed(change)?);
        self.protocol.lease_changed();
        Ok(())
    }

    /// See [`Engine::restart`].
    pub(crate) fn restart(&self) {
        self.core.refuse(false);
        self.protocol.restart();
        self.core.resume();
    }

    /// See [`Engine::reset_counters`].
    pub(crate) fn reset_counters(&self) {
        self.core.reset_counters();
        self.core.journal.clear();
        self.protocol.reset_counters();
    }
}

fn unreadable(error: &(dyn std::error::Error + Send + Sync + 'static)) -> Response<Reply> {
    let status = if error.is::<LengthLimitError>() {
        StatusCode::PAYLOAD_TOO_LARGE
    } else {
        StatusCode::BAD_REQUEST
    };
    json(
        status,
        r#"{"detail":"There was an error parsing the body"}"#,
    )
}

// === impl Engine ===

impl Engine {
    /// Where the engine serves; the same port for its whole life.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where other engines meet it or take its KV: see [`EngineConfig::side_channel_port`].
    pub fn side_channel_port(&self) -> u16 {
        self.side_channel_port
    }

    /// Where the admin endpoint stays reachable when the engine's own port is closed.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Name of the engine.
    pub fn name(&self) -> &str {
        &self.service.core.config.name
    }

    /// What the engine holds and counted.
    pub fn state(&self) -> State {
        self.service.state()
    }

    /// The last requests that arrived, oldest first, at most the configured ring.
    pub fn log(&self) -> Vec<Record> {
        self.service.core.journal.last(usize::MAX)
    }

    /// Arms a fault, or does it at once if it is about listening. False when 64 are armed already.
    pub fn inject(&self, fault: Fault) -> bool {
        self.service.inject(fault)
    }

    /// Disarms all faults. Does not reopen a closed port.
    pub fn clear_faults(&self) {
        self.service.core.faults.clear();
    }

    /// Changes delays.
    ///
    /// # Errors
    /// A value out of range; nothing is changed then.
    pub fn set_pace(&self, change: PaceChange) -> Result<(), ConfigError> {
        self.service.set_pace(change)
    }

    /// Closes the port and resets its connections, as a process that was killed.
    pub fn kill(&self, cause: &str) {
        self.service.core.die(cause);
    }

    /// Closes the port; open connections are reset unless `keep_open`.
    pub fn refuse(&self, keep_open: bool) {
        self.service.core.refuse(keep_open);
    }

    /// Opens a closed port again with all state kept.
    pub fn resume(&self) {
        self.service.core.resume();
    }

    /// A new process on the same port: connections reset, KV gone, new engine id, metrics at zero.
    pub fn restart(&self) {
        self.service.restart();
    }

    /// Zeroes event counts, deaths and the log ring.
    pub fn reset_counters(&self) {
        self.service.reset_counters();
    }

    /// Stops the engine and waits until its ports are closed and its log file is written.
    pub async fn stop(mut self) {
        self.service.core.stop();
        for task in std::mem::take(&mut self.tasks) {
            // A task that panicked is as stopped as one that returned.
            let _ = task.await;
        }
        let core = Arc::clone(&self.service.core);
        let flushed = tokio::task::spawn_blocking(move || core.journal.flush());
        // Cancelled only when the runtime goes away itself.
        let _ = flushed.await;
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.service.core.stop();
    }
}
