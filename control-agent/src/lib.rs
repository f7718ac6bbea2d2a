//! Control agent: tells the filters of its Envoys which pods exist and how loaded they are.
//!
//! Data flows one way: [`pods`] turns Kubernetes pods into records, [`snapshot`] builds a
//! [`Fleet`](snapshot::Fleet) from them, [`scrape`] reads the engines' metric pages into a
//! [`Board`](scrape::Board), and [`push`] sends both to every Envoy. No request ever passes
//! through the agent, and a filter that lost its agent goes on with what it has.

pub mod admin;
pub mod args;
pub mod backoff;
pub mod bands;
pub mod check;
pub mod http;
pub mod metrics;
pub mod pods;
pub mod push;
pub mod runtime;
pub mod scrape;
pub mod snapshot;
pub mod token_load;
pub mod tokenizers;

pub use args::Config;
pub use runtime::{Agent, run};
