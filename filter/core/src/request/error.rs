//! Why a body cannot be served. Every message says which field and what to do; none quotes it.

use super::cursor::{JsonError, MAX_DEPTH};

/// A request body that is answered with 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Nothing but white space.
    #[error("the request body is empty: send a JSON object")]
    Empty,
    /// Not UTF-8.
    #[error("the request body is not UTF-8 at byte {at}: send JSON encoded as UTF-8")]
    NotUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// Not JSON, or nested deeper than [`MAX_DEPTH`].
    #[error("the request body is not valid JSON (nested at most {MAX_DEPTH} deep): {0}")]
    Json(#[from] JsonError),
    /// An array, a string, a number.
    #[error("the request body must be a JSON object: wrap it in '{{' and '}}'")]
    NotAnObject,
    /// A member that the gateway reads or writes occurs twice.
    #[error("`{0}` occurs twice in the request body: send it once")]
    Duplicate(&'static str),
    /// A member that only the gateway may set.
    #[error("`{0}` is reserved for the gateway: remove it from the request body")]
    Reserved(&'static str),
    /// No `model`.
    #[error("`model` is missing: name one of the models listed by GET /v1/models")]
    ModelMissing,
    /// `model` is no string, or an empty one.
    #[error("`model` must be a non-empty string: name one of those listed by GET /v1/models")]
    ModelNotAName,
    /// `stream` is neither true, false nor null.
    #[error("`stream` must be true or false: send it without quotes, or leave it out")]
    StreamNotBoolean,
}

impl BodyError {
    /// The member at fault, for `param` of an error reply.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::Duplicate(name) | Self::Reserved(name) => Some(name),
            Self::ModelMissing | Self::ModelNotAName => Some("model"),
            Self::StreamNotBoolean => Some("stream"),
            Self::Empty | Self::NotUtf8 { .. } | Self::Json(_) | Self::NotAnObject => None,
        }
    }
}
