//! The routing core: what a request means, which pods serve it, what is charged, which legs are
//! sent and how every one of them ends.
//!
//! Pure: no host, no clock and no randomness except by argument or through [`port`].

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(test, target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

pub mod config;
pub mod eject;
pub mod engine;
pub mod fleet;
pub mod flow;
pub mod ids;
pub mod ledger;
pub mod meters;
pub mod models;
pub mod port;
pub mod prefix;
pub mod rate;
pub mod reply;
pub mod request;
pub mod score;
pub mod select;
pub mod serve;
pub mod session;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod token;
pub mod tokens;
pub mod worker;

/// Version of the records in shared data. During an upgrade the old and the new filter share one
/// store: each writes only records of its own version and reads the other's.
#[cfg(not(feature = "format-2"))]
pub const FORMAT: u8 = 1;
/// Version of the records in shared data, played by a build of the next release in tests.
#[cfg(feature = "format-2")]
pub const FORMAT: u8 = 2;

/// The version whose records are read beside [`FORMAT`]'s.
pub const OTHER_FORMAT: u8 = other_format(FORMAT);

const fn other_format(format: u8) -> u8 {
    if format == 1 { 2 } else { 1 }
}
