//! Which pods there are: from a file now, from the Kubernetes API by the same two steps.
//!
//! [`settings`] turns one Kubernetes pod into a [`Record`](settings::Record); [`index`] holds
//! the records under pure `apply`/`delete`/`reset`, which is what a watch delivers as well;
//! [`document`] reads pod lists and [`file`] follows one on disk.

pub mod document;
pub mod file;
pub mod index;
mod keys;
pub mod settings;
