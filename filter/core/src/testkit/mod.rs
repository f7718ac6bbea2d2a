//! Builders and an in-memory store for tests.

mod fleet;
mod store;

pub use fleet::{ModelBuilder, PodBuilder, TopologyBuilder, model, pod, topology};
pub use store::MemoryStore;
