//! The routing core: what a request means, which pods serve it, what is charged, which legs are
//! sent and how every one of them ends.
//!
//! Pure: no host, no clock and no randomness except by argument or through [`port`].

pub mod engine;
pub mod fleet;
pub mod ledger;
pub mod port;
pub mod prefix;
pub mod request;
