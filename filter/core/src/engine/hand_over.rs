//! What a prefill reply gives the decode leg, or why it gives nothing.

use crate::request::cursor::Cursor;

/// What a prefill reply gives the decode leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandOver {
    /// Text of the member to put first in the decode body, such as `"kv_transfer_params":{…}`.
    Members(Vec<u8>),
    /// Nothing that can be used: the decode engine computes the prompt itself.
    Unusable(Unusable),
    /// Nothing, and nothing is needed: the engines pass it between them.
    Nothing,
    /// The reply is no JSON object.
    NotAnObject,
}

/// Why a hand-over is not passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// Absent or null.
    #[error("the prefill reply has no `kv_transfer_params`: is a KV connector configured?")]
    Missing,
    /// TensorRT-LLM's `disaggregated_params` are absent or null.
    #[error("the context reply has no `disaggregated_params`")]
    NoContext,
    /// Not an object.
    #[error("what the prefill reply hands over is not an object")]
    NotAnObject,
    /// A field occurs twice.
    #[error("what the prefill reply hands over names a field twice")]
    Repeated,
    /// `do_remote_prefill` is not true.
    #[error("`do_remote_prefill` of the prefill reply is not true")]
    NotRemote,
    /// `remote_block_ids` names no blocks, or in a form that the engine cannot mean.
    #[error("`remote_block_ids` of the prefill reply does not name blocks")]
    BlockIds,
    /// `remote_engine_id` is no name.
    #[error("`remote_engine_id` of the prefill reply is not a non-empty string")]
    EngineId,
    /// `remote_request_id` is there but no name.
    #[error("`remote_request_id` of the prefill reply is not a non-empty string")]
    RequestId,
    /// `remote_host` is no string.
    #[error("`remote_host` of the prefill reply is not a string")]
    Host,
    /// `remote_port` is no port.
    #[error("`remote_port` of the prefill reply is not a port")]
    Port,
    /// `ctx_request_id` is no id of a context.
    #[error("`ctx_request_id` of the context reply is not a 63-bit whole number")]
    ContextId,
    /// `first_gen_tokens` is no list.
    #[error("`first_gen_tokens` of the context reply is not a list")]
    FirstTokens,
}

impl Unusable {
    /// Short name for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Missing | Self::NoContext => "missing",
            Self::NotAnObject => "not_an_object",
            Self::Repeated => "repeated",
            Self::NotRemote => "do_remote_prefill",
            Self::BlockIds => "remote_block_ids",
            Self::EngineId => "remote_engine_id",
            Self::RequestId => "remote_request_id",
            Self::Host => "remote_host",
            Self::Port => "remote_port",
            Self::ContextId => "ctx_request_id",
            Self::FirstTokens => "first_gen_tokens",
        }
    }
}

/// Reads a reply of which nothing is handed over.
pub(super) fn none(reply: &[u8]) -> HandOver {
    let is_object = || {
        simdutf8::basic::from_utf8(reply).ok()?;
        let mut cursor = Cursor::new(reply);
        if cursor.peek() != Some(b'{') {
            return None;
        }
        cursor.value(0).ok()?;
        cursor.end().ok()
    };
    match is_object() {
        Some(()) => HandOver::Nothing,
        None => HandOver::NotAnObject,
    }
}
