//! What can happen to a request.

/// One occurrence, as the host saw it.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The whole body: at its end, again when a snapshot arrived, again for a retry.
    Body(&'a [u8]),
    /// A dispatched call was answered.
    CallReply {
        /// HTTP status.
        status: u16,
        /// Whole body.
        body: &'a [u8],
    },
    /// A dispatched call was refused or reset.
    CallFailed,
    /// The time [`super::Flow::deadline`] asked for has come.
    Due,
    /// The answer of the probe [`super::Effect::ProbeBody`] asked for.
    Probed {
        /// Body bytes arrived although no body callback came.
        hidden_body: bool,
    },
    /// Response headers of the decode leg, or of a local answer of the proxy itself.
    ResponseHeaders {
        /// HTTP status.
        status: u16,
        /// What the proxy says about an answer of its own; `None` when the engine answered.
        proxy_details: Option<&'a str>,
        /// `content-type` is `text/event-stream`.
        event_stream: bool,
        /// No body follows.
        end: bool,
    },
    /// Part of the response body.
    ResponseChunk {
        /// The bytes; empty unless the flow asked to see them ([`super::Flow::reads_response`]).
        bytes: &'a [u8],
        /// No more follows.
        end: bool,
    },
    /// The client's stream is over.
    Gone {
        /// The engine cut its answer, not the client.
        engine_cut: bool,
        /// The request was never put on a connection to its pod.
        unsent: bool,
    },
}
