//! What the filter and the control agent agree on: names, pushed messages, settings.
//!
//! Both programs depend on this crate and neither on the other. Everything here is data: no
//! clock, no socket, no policy.

pub mod control;
pub mod knobs;
pub mod names;
pub mod profile;
pub mod roleset;
pub mod samples;
pub mod spelling;
pub mod tokenizer;
pub mod topology;
