//! A stateful proxy-wasm host that drives a built filter module as Envoy drives it.
//!
//! One [`Gateway`] is one proxy process: several VMs (workers) over one shared store, a clock the
//! test moves, scripted engines behind it. An [`Exchange`] is one client request; its [`Outcome`]
//! is what the client, the upstream and the access log saw. Nothing here sleeps and nothing runs
//! by itself: time moves by [`Gateway::advance`], and what is due now happens in [`Gateway::pump`].
//!
//! The rules reproduced are those of Envoy's wasm extension and of proxy-wasm-cpp-host
//! (`context.cc`, `exports.cc`, `shared_data.cc`, `shared_queue.cc`), among them the awkward ones:
//! request headers vanish once iteration went on, actions happen after the callback returned, a
//! call belongs to the root, a trap takes every stream of its worker along.
//!
//! A misuse that Envoy would silently survive (a reply and a resume in one callback, a wrong
//! content-length) is recorded as a [`Fault`]; a gateway dropped with an unread fault fails the
//! test.
#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "test support: a broken expectation has to fail the test that holds it"
)]

mod config;
mod drive;
mod engines;
mod exchange;
mod gateway;
mod host;
mod iteration;
mod lifetime;
mod module;
mod observe;
mod timeline;
mod vm;

pub use config::{GatewayConfig, PluginId, StartError};
pub use engines::{Script, Sent};
pub use exchange::{Exchange, Flight, Outcome};
pub use gateway::Gateway;
pub use host::calls::{CallId, CallRecord, CallState};
pub use host::headers::HeaderMap;
pub use host::meters::Meters;
pub use host::shared::{Counts, SharedData, SharedStore};
pub use host::stream::{Chunk, Ending, UpstreamRequest};
pub use host::{Fault, LogLevel, LogLine, Status};
pub use module::{Module, filter_path};
