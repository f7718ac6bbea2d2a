//! What is pushed: a [`Fleet`] of models and pods, and the engines' samples by its order.

pub mod fleet;
pub mod message;
mod pairs;

pub use fleet::{Fleet, Member, MemberKey};
