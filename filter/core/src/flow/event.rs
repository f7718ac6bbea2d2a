//! What can happen to a request.

/// How a call failed that does not speak against its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// It never left: the proxy had no room for it.
    Unsent,
    /// Its connection ended before the answer began. Engines close idle connections, and it may
    /// have been on one.
    Cut,
}

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
    /// A dispatched call failed in a way that does not speak against its pod.
    CallLost(Lost),
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
        /// `content-type` is `text/event-stream`; told when the flow asked for it
        /// ([`super::Flow::awaits_events`]).
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

impl Event<'_> {
    /// What became of a call that the proxy itself answered, by the text of that answer.
    #[must_use]
    pub fn of_proxy(body: &[u8]) -> Event<'static> {
        let says = |words: &str| memchr::memmem::find(body, words.as_bytes()).is_some();
        if says("reset reason: overflow") {
            Event::CallLost(Lost::Unsent)
        } else if says("reset reason: connection termination") {
            Event::CallLost(Lost::Cut)
        } else {
            Event::CallFailed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxys_words_tell_what_became_of_a_call() {
        let after = |reason: &str| {
            let body = format!(
                "upstream connect error or disconnect/reset before headers. reset reason: {reason}"
            );
            match Event::of_proxy(body.as_bytes()) {
                Event::CallFailed => None,
                Event::CallLost(lost) => Some(lost),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(after("overflow"), Some(Lost::Unsent));
        assert_eq!(after("connection termination"), Some(Lost::Cut));
        let refused = "remote connection failure, transport failure reason: delayed connect error";
        assert_eq!(after(refused), None);
        assert_eq!(after("connection timeout"), None);
        assert!(matches!(Event::of_proxy(b""), Event::CallFailed));
    }
}
