//! How long a prompt is, in tokens: estimated from its bytes, with a ratio learned per model
//! ([`estimate`]).

pub mod estimate;

pub use estimate::Estimates;
