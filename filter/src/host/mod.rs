//! The core's ports over Envoy's host calls. Nothing else in this crate knows their quirks.

pub mod call;
pub mod clock;
pub mod headers;
pub mod memory;
pub mod meter;
pub mod raw;
pub mod store;
pub mod stream;
