//! What is measured: where its requests go, and the Envoy process that carries them.

use std::net::SocketAddr;

use crate::process::Process;

/// One of the two sides of a comparison.
pub(crate) struct Target {
    /// Name in tables.
    pub(crate) name: &'static str,
    /// How a request reaches the engines.
    pub(crate) route: Route,
    /// The Envoy process.
    pub(crate) process: Process,
}

/// How a request reaches the engines.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// One request; the gateway makes the two legs.
    Gateway(SocketAddr),
    /// The client sends the prefill leg, reads its answer, then sends the decode leg.
    ByHand {
        /// Listener in front of the prefill engines.
        prefill: SocketAddr,
        /// Listener in front of the decode engines.
        decode: SocketAddr,
    },
}
