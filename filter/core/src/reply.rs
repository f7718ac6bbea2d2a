//! The one table that turns a fault into what the client sees: status, marker header, body.
//!
//! Bodies are OpenAI-shaped: `{"error":{"message","type","code","param"}}`. Every message says
//! what to do next and never quotes the request's text.

use crate::request::BodyError;
use crate::request::cursor::{Cursor, JsonError};
use crate::select::SelectorError;
use pd_wire::names;
use std::borrow::Cow;

/// Most characters quoted of an engine's message.
const MESSAGE_CHARS: usize = 256;

/// A local answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Headers beside `content-type`.
    pub headers: Vec<(&'static str, String)>,
    /// Body; JSON.
    pub body: Vec<u8>,
}

/// Why a prefill leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefillFailure {
    /// Refused, reset, or cut.
    Transport,
    /// No answer within the timeout.
    Timeout,
    /// The engine answered with this status.
    Status(u16),
    /// 200 with a body that is no JSON object.
    BadResponse,
    /// What is to be known before the leg can be sent could not be learnt.
    Setup,
}

impl PrefillFailure {
    /// Label value of the failure class.
    #[must_use]
    pub fn class(self) -> &'static str {
        match self {
            Self::Transport => "transport",
            Self::Timeout => "timeout",
            Self::Status(_) => "http_status",
            Self::BadResponse => "bad_response",
            Self::Setup => "request_setup",
        }
    }

    /// True when another pair may be tried: the failure says nothing about the request itself.
    #[must_use]
    pub fn is_retriable(self) -> bool {
        matches!(
            self,
            Self::Transport | Self::Timeout | Self::Setup | Self::Status(429 | 502 | 503)
        )
    }
}

/// Why a request ends without an engine's answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The body is no acceptable request.
    #[error("{0}")]
    Body(#[from] BodyError),
    /// No body at all.
    #[error("the request has no body; send a JSON object with a model field")]
    NoBody,
    /// Encoded body.
    #[error("content-encoding {0} is not supported; send the body without content-encoding")]
    Encoding(String),
    /// Nothing is served there.
    #[error(
        "no such path; inference paths are POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings and the like, and GET /v1/models"
    )]
    Path,
    /// The model is not in the snapshot.
    #[error("the model {0} does not exist; GET /v1/models lists the models served here")]
    Model(String),
    /// No snapshot arrived in time.
    #[error("the gateway has not received its pods yet; retry in a moment")]
    NoSnapshot,
    /// The model has no pod that can take the request.
    #[error("no pod of model {model} can take this request: {detail}")]
    NoPod {
        /// Model name.
        model: String,
        /// What is missing.
        detail: String,
    },
    /// Every pod is at its configured capacity.
    #[error("all pods of model {0} are at capacity; retry after the time in retry-after")]
    Capacity(String),
    /// More requests per second than the profile allows.
    #[error(
        "model {model} takes {per_second} requests per second under this profile; retry after the time in retry-after"
    )]
    Rate {
        /// Model name.
        model: String,
        /// Limit of the profile.
        per_second: u32,
        /// When the next one may be taken, in seconds.
        retry_after_s: u64,
    },
    /// Bad value in a routing header or profile.
    #[error("{0}")]
    Strategy(String),
    /// `external-filter` is no label selector.
    #[error("external-filter is no label selector: {0}")]
    Filter(SelectorError),
    /// A profile names a policy that does not exist.
    #[error("{0}")]
    Policy(String),
    /// The prefill leg failed and nothing else could serve.
    #[error("prefill request failed ({}): {detail}", failure.class())]
    Prefill {
        /// How.
        failure: PrefillFailure,
        /// What was seen, without prompt text.
        detail: String,
    },
    /// The decode pod could not be reached or cut the connection before answering.
    #[error("the decode pod could not be reached ({0}); retry the request")]
    DecodeUnreachable(String),
    /// The decode engine could not take over the KV.
    #[error("the decode pod could not take over the prompt's KV cache; retry the request")]
    DecodeHandOver,
    /// The decode pod fell silent.
    #[error("decode pod {pod} did not {what} within {} s", seconds(*.limit_ms))]
    DecodeTimeout {
        /// Pod name.
        pod: String,
        /// What was awaited.
        what: &'static str,
        /// The limit, in ms.
        limit_ms: u64,
    },
    /// The listener's configuration hides bodies from the filter.
    #[error(
        "the gateway is misconfigured: its wasm filter needs allow_on_headers_stop_iteration: true"
    )]
    Misconfigured,
}

impl Fault {
    /// Status, marker header, code and param of the fault.
    fn shape(
        &self,
    ) -> (
        u16,
        Option<&'static str>,
        Option<&'static str>,
        Option<&str>,
    ) {
        use names::*;
        match self {
            Self::Body(fault) => (400, Some(HEADER_ERROR_BODY), None, fault.param()),
            Self::NoBody => (400, Some(HEADER_ERROR_BODY), None, None),
            Self::Encoding(_) => (415, Some(HEADER_ERROR_BODY), None, None),
            Self::Path => (404, None, Some("unknown_path"), None),
            Self::Model(_) => {
                let marker = Some(HEADER_ERROR_NO_BACKENDS);
                (404, marker, Some("model_not_found"), Some("model"))
            }
            Self::NoSnapshot => (503, Some(HEADER_ERROR_ROUTING), Some("not_ready"), None),
            Self::NoPod { .. } | Self::Policy(_) => {
                let marker = Some(HEADER_ERROR_ROUTING);
                (503, marker, Some("service_unavailable"), None)
            }
            Self::Capacity(_) => (
                429,
                Some(HEADER_ERROR_ROUTING),
                Some("rate_limit_exceeded"),
                None,
            ),
            Self::Rate { .. } => (
                429,
                Some(HEADER_ERROR_RATE),
                Some("rate_limit_exceeded"),
                None,
            ),
            Self::Strategy(_) => (400, Some(HEADER_ERROR_ROUTING), None, Some(HEADER_STRATEGY)),
            // The reference's status for it.
            Self::Filter(_) => {
                let marker = Some(HEADER_ERROR_ROUTING);
                (
                    503,
                    marker,
                    Some("service_unavailable"),
                    Some(HEADER_FILTER),
                )
            }
            Self::Prefill { failure, .. } => {
                let status = match failure {
                    PrefillFailure::Transport | PrefillFailure::Setup => 503,
                    PrefillFailure::Timeout => 504,
                    // Overload of one pod: the client may try again.
                    PrefillFailure::Status(429 | 502 | 503) => 503,
                    PrefillFailure::Status(_) | PrefillFailure::BadResponse => 502,
                };
                (
                    status,
                    Some(HEADER_ERROR_PREFILL),
                    Some("prefill_failed"),
                    None,
                )
            }
            Self::DecodeUnreachable(_) => {
                (503, Some(HEADER_ERROR_DECODE), Some("decode_failed"), None)
            }
            Self::DecodeHandOver => (502, Some(HEADER_ERROR_DECODE), Some("decode_failed"), None),
            Self::DecodeTimeout { .. } => {
                (504, Some(HEADER_ERROR_DECODE), Some("decode_timeout"), None)
            }
            Self::Misconfigured => (500, None, Some("gateway_misconfigured"), None),
        }
    }

    /// Status of the answer.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.shape().0
    }

    /// The client's answer; `request_id` is the gateway's id, when there is one.
    #[must_use]
    pub fn reply(&self, request_id: Option<&str>) -> Reply {
        let (status, marker, code, param) = self.shape();
        let body = error_body(status, &self.to_string(), code, param);
        let mut reply = Reply {
            status,
            headers: Vec::new(),
            body,
        };
        if let Some(marker) = marker {
            let value = match self {
                Self::Model(name) => header_text(name),
                _ => "true".to_owned(),
            };
            reply.headers.push((marker, value));
        }
        let retry_after_s = match self {
            Self::Capacity(_) => Some(1),
            Self::Rate { retry_after_s, .. } => Some(*retry_after_s),
            _ => None,
        };
        if let Some(seconds) = retry_after_s {
            reply.headers.push(("retry-after", seconds.to_string()));
        }
        if let Some(id) = request_id {
            reply
                .headers
                .push((names::HEADER_GATEWAY_REQUEST_ID, id.to_owned()));
        }
        reply
    }
}

/// The engine's own refusal of a prefill leg: its status and message, with our marker. A body in
/// OpenAI's form stays as it came; of others the message is taken.
#[must_use]
pub fn prefill_passthrough(status: u16, body: &[u8], request_id: &str) -> Reply {
    let said = Said::read(body);
    let body = if said.in_openai_form {
        body.to_vec()
    } else {
        let text = said.message.map(Cow::Owned);
        let text = text.unwrap_or_else(|| String::from_utf8_lossy(excerpt(body)));
        let mut text: String = text.chars().take(MESSAGE_CHARS).collect();
        if text.trim().is_empty() {
            text = format!("the prefill engine answered {status} without a message");
        }
        error_body(status, &text, Some("prefill_failed"), None)
    };
    Reply {
        status,
        headers: vec![
            (names::HEADER_ERROR_PREFILL, "true".to_owned()),
            (names::HEADER_GATEWAY_REQUEST_ID, request_id.to_owned()),
        ],
        body,
    }
}

/// The beginning of a body, at least as long as what is quoted of it.
fn excerpt(body: &[u8]) -> &[u8] {
    // A character has at most four bytes.
    body.get(..4 * MESSAGE_CHARS).unwrap_or(body)
}

/// What an engine says of its refusal. The text is walked and nothing of it built: an engine may
/// answer megabytes.
#[derive(Default)]
struct Said {
    /// `error` is an object whose `message` is a text.
    in_openai_form: bool,
    /// SGLang has `message`, TensorRT-LLM that or a text as `error`.
    message: Option<String>,
}

impl Said {
    fn read(body: &[u8]) -> Self {
        Self::walk(body).unwrap_or_default()
    }

    /// `None` when the body is no JSON object.
    fn walk(body: &[u8]) -> Option<Self> {
        simdutf8::basic::from_utf8(body).ok()?;
        let (mut message, mut error, mut in_error) = (None, None, None);
        let mut cursor = Cursor::new(body);
        let walked = cursor.object::<JsonError>(0, |cursor, key| {
            match cursor.slice(key.inner()) {
                b"error" if cursor.peek() == Some(b'{') => {
                    (error, in_error) = (None, None);
                    cursor.object::<JsonError>(1, |cursor, key| {
                        let value = cursor.value(2)?;
                        if cursor.slice(key.inner()) == b"message" {
                            in_error = Some(cursor.slice(value));
                        }
                        Ok(())
                    })?;
                }
                name => {
                    let value = cursor.value(1)?;
                    let text = Some(cursor.slice(value));
                    match name {
                        b"error" => (error, in_error) = (text, None),
                        b"message" => message = text,
                        _ => {}
                    }
                }
            }
            Ok(())
        });
        walked.and_then(|_| cursor.end()).ok()?;
        let is_text = |raw: &&[u8]| raw.starts_with(b"\"");
        let text = |raw| serde_json::from_slice(raw).ok();
        Some(Self {
            in_openai_form: in_error.as_ref().is_some_and(is_text),
            message: [message, error]
                .into_iter()
                .flatten()
                .find(is_text)
                .and_then(text),
        })
    }
}

/// `type` of an error by its status, as OpenAI names them.
fn error_type(status: u16) -> &'static str {
    match status {
        400 | 404 | 413 | 415 => "invalid_request_error",
        401 => "authentication_error",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    }
}

/// An OpenAI-shaped error body.
fn error_body(status: u16, message: &str, code: Option<&str>, param: Option<&str>) -> Vec<u8> {
    let value = serde_json::json!({
        "error": {
            "message": message,
            "type": error_type(status),
            "code": code,
            "param": param,
        }
    });
    value.to_string().into_bytes()
}

/// Milliseconds as seconds, with a fraction where there is one.
fn seconds(ms: u64) -> String {
    let (whole, rest) = (ms / 1000, ms % 1000);
    if rest == 0 {
        return whole.to_string();
    }
    let text = format!("{whole}.{rest:03}");
    text.trim_end_matches('0').to_owned()
}

/// Text that is safe as a header value: printable ASCII, bounded.
fn header_text(text: &str) -> String {
    text.chars()
        .take(128)
        .map(|c| if c.is_ascii_graphic() { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_timeout_is_a_504_with_the_marker_and_an_openai_body() {
        let fault = Fault::Prefill {
            failure: PrefillFailure::Timeout,
            detail: "no answer within 30 s".to_owned(),
        };
        let reply = fault.reply(Some("id"));
        assert_eq!(reply.status, 504);
        assert!(
            reply
                .headers
                .contains(&(names::HEADER_ERROR_PREFILL, "true".to_owned()))
        );
        let body: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
        assert_eq!(body["error"]["type"], "api_error");
        assert_eq!(
            body["error"]["message"],
            "prefill request failed (timeout): no answer within 30 s"
        );
    }

    #[test]
    fn a_limit_is_told_in_seconds_and_their_fractions() {
        for (limit_ms, told) in [(60_000, "60"), (1500, "1.5"), (20, "0.02"), (1001, "1.001")] {
            let (pod, what) = ("d".to_owned(), "start responding");
            let fault = Fault::DecodeTimeout {
                pod,
                what,
                limit_ms,
            };
            let message = format!("decode pod d did not start responding within {told} s");
            assert_eq!(fault.to_string(), message);
        }
    }

    #[test]
    fn an_unknown_model_cannot_put_control_characters_into_a_header() {
        let reply = Fault::Model("a\r\nset-cookie: x".to_owned()).reply(None);
        assert_eq!(reply.status, 404);
        assert_eq!(reply.headers[0].1, "a__set-cookie:_x");
    }

    #[test]
    fn an_engines_refusal_keeps_its_status_and_its_json() {
        let body = br#"{"error":{"message":"too long"}}"#;
        assert_eq!(prefill_passthrough(400, body, "i").body, body);
        for flat in [
            r#"{"object":"error","message":"too long","code":400}"#,
            r#"{"error":"too long"}"#,
        ] {
            let reply = prefill_passthrough(400, flat.as_bytes(), "i");
            let shaped: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
            assert_eq!(shaped["error"]["message"], "too long");
            assert_eq!(shaped["error"]["type"], "invalid_request_error");
        }
        // An object without a message is not OpenAI's form: it is quoted.
        for odd in [
            r#"{"error":{}}"#,
            r#"{"error":{"message":5}}"#,
            r#"{"error":[1]}"#,
        ] {
            let reply = prefill_passthrough(400, odd.as_bytes(), "i");
            let shaped: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
            assert_eq!(shaped["error"]["message"], odd);
        }
        let text = prefill_passthrough(500, b"oops", "i");
        assert_eq!(text.status, 500);
        assert!(String::from_utf8(text.body).unwrap().contains("oops"));
        let nothing = prefill_passthrough(404, b"", "i");
        assert!(
            String::from_utf8(nothing.body)
                .unwrap()
                .contains("answered 404")
        );
    }
}
