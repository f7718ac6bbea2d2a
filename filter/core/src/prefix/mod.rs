//! Which pods have seen the beginning of a prompt: block hashes of the prompt, and a bounded
//! index of who computed which of them.

mod hash;
mod index;
mod marks;
mod record;

pub use hash::{Chain, MAX_BLOCKS, chain, model_hash};
pub use index::PrefixIndex;
