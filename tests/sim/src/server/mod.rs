//! The TCP side of an engine: listening, refusing, and one task per connection.

mod connection;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, lookup_host};

use crate::core::Core;
use crate::engine::Service;

pub(crate) use connection::{Hold, Link};

/// Connections the kernel may queue: load tests open many at once.
const BACKLOG: u32 = 4096;

/// Which door a connection came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Door {
    /// The engine's port: counted, subject to refusal, death and the idle limit.
    Engine,
    /// The port engines talk to each other on: closes with the engine's.
    SideChannel,
    /// The admin port: always open.
    Admin,
}

impl Door {
    /// Whether refusal and death close it.
    fn has_gate(self) -> bool {
        self != Self::Admin
    }
}

/// Listens on the first usable address of a host.
pub(crate) async fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut failure = io::Error::other("the host has no address");
    for address in lookup_host((host, port)).await? {
        match listen(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A port that was closed to refuse connections must open again while old ones linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections until the engine is stopped.
pub(crate) async fn accept(service: Arc<Service>, door: Door, listener: TcpListener) {
    let core = Arc::clone(service.core());
    let Ok(address) = listener.local_addr() else {
        return;
    };
    let mut listener = Some(listener);
    let mut gate = core.gate.subscribe();
    loop {
        let now = *gate.borrow_and_update();
        if now.stopped {
            return;
        }
        if door.has_gate() && !now.open {
            listener = None;
        } else if listener.is_none() {
            listener = reopen(address).await;
        }
        match &listener {
            None => {
                if gate.changed().await.is_err() {
                    return;
                }
            }
            Some(listener) => {
                tokio::select! {
                    biased;
                    _ = gate.changed() => {}
                    accepted = listener.accept() => match accepted {
                        Ok((stream, peer)) => {
                            // A loopback socket always takes the option.
                            let _ = stream.set_nodelay(true);
                            spawn(&service, &core, door, stream, peer);
                        }
                        // Out of descriptors: let some connections end.
                        Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                    }
                }
            }
        }
    }
}

fn spawn(
    service: &Arc<Service>,
    core: &Arc<Core>,
    door: Door,
    stream: tokio::net::TcpStream,
    peer: SocketAddr,
) {
    let gate = *core.gate.borrow();
    if door.has_gate() && !gate.open {
        return;
    }
    let connection = connection::Connection {
        service: Arc::clone(service),
        core: Arc::clone(core),
        door,
        epoch: gate.epoch,
        peer,
    };
    tokio::spawn(connection.run(stream));
}

/// Takes a port back; another process may hold it for a moment.
async fn reopen(address: SocketAddr) -> Option<TcpListener> {
    for _ in 0..100 {
        if let Ok(listener) = listen(address) {
            return Some(listener);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    eprintln!("port {} cannot be opened again", address.port());
    None
}
