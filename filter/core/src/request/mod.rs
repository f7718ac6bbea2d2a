//! What a request body means and how it is edited.
//!
//! A body is read once, as bytes: [`scan()`] validates it and notes where the members stand that
//! the gateway reads or writes, [`patch`] edits exactly those and leaves every other byte as the
//! client sent it. A document tree was rejected: it costs several times the time and memory,
//! and writing it back changes key order, number forms and duplicate keys.

pub(crate) mod cursor;
mod error;
mod member;
pub mod patch;
pub mod prompt;
mod scan;
pub(crate) mod text;

pub use cursor::{JsonError, MAX_DEPTH};
pub use error::BodyError;
pub use member::Member;
pub use scan::{MAX_PIECES, Scan, scan};

/// Which API a request speaks; decides where the prompt stands and how output is capped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`: `messages`.
    Chat,
    /// `/v1/completions`: `prompt`.
    Completions,
    /// `/v1/responses`: `input`.
    Responses,
    /// `/v1/messages`: `system` and `messages`.
    Messages,
    /// Any other inference path: served in one leg, has no prompt the gateway reads.
    Other,
}

impl Endpoint {
    /// The endpoint of a request path; a query string is ignored.
    pub fn of_path(path: &str) -> Self {
        match path.split_once('?').map_or(path, |(path, _)| path) {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests;
