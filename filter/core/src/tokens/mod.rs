//! How long a prompt is, in tokens.
//!
//! Every prompt is estimated from its bytes, with a ratio learned per model ([`estimate`]). Where
//! a model's tokenizer was pushed ([`catalog`]) and the estimate lies near a number that decides
//! ([`boundary`]), the text is counted instead, if that is quick enough ([`pace`]). A VM loads a
//! tokenizer when a request first wants it, on a tick, one VM at a time ([`lease`]), because
//! loading stalls its worker and takes memory for good ([`tokenizers`]).

pub mod boundary;
pub mod catalog;
pub mod estimate;
mod lease;
mod pace;
pub mod tokenizers;

pub use catalog::accept_tokenizer;
pub use estimate::Estimates;
pub use tokenizers::Tokenizers;
