//! Builders and an in-memory store for tests.

mod store;

pub use store::MemoryStore;
