//! vLLM's error answers: OpenAI's object on its own routes, FastAPI's `detail` elsewhere.

use std::fmt::Write as _;

use hyper::{Response, StatusCode};
use serde_json::json as value;

use super::request::Route;
use crate::reply::{Reply, json_of};

/// A refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) kind: &'static str,
    pub(super) message: String,
    pub(super) param: Option<String>,
    /// Raised by schema validation, before the serving layer sees the request.
    pub(super) schema: bool,
}

/// Text of a 500, also of the error event of a stream.
pub(super) const INTERNAL: &str = r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#;

// === impl Refusal ===

impl Refusal {
    /// The body is not what the schema asks for.
    pub(super) fn schema(param: impl Into<String>, problem: &str) -> Self {
        let param = param.into();
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: format!("1 validation error:\n  {param}: {problem}"),
            param: Some(param),
            schema: true,
        }
    }

    /// A value the serving layer does not accept.
    pub(super) fn value(param: Option<&str>, message: String) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message,
            param: param.map(str::to_owned),
            schema: false,
        }
    }

    /// The model is not served here.
    pub(super) fn model(model: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: format!("The model `{model}` does not exist."),
            param: Some("model".to_owned()),
            schema: false,
        }
    }

    /// Too many requests wait.
    pub(super) fn busy() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "Service Unavailable",
            message: "The engine is currently busy and cannot accept new requests. \
                      Please try again later or on a different instance."
                .to_owned(),
            param: None,
            schema: false,
        }
    }

    /// The engine failed.
    pub(super) fn internal() -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            message: "Internal server error".to_owned(),
            param: None,
            schema: false,
        }
    }

    /// Any status with a kind of its own, for injected faults and closed routes.
    pub(super) fn other(status: StatusCode, kind: &'static str, message: &str) -> Self {
        Self {
            status,
            kind,
            message: message.to_owned(),
            param: None,
            schema: false,
        }
    }

    /// The answer on a route. Serving errors of `/v1/messages` have that API's shape.
    pub(super) fn respond(&self, route: Option<Route>) -> Response<Reply> {
        if route == Some(Route::Messages) && !self.schema {
            let error = value!({ "type": self.kind, "message": self.message });
            return json_of(self.status, &value!({ "type": "error", "error": error }));
        }
        let mut body = String::with_capacity(128);
        // Writing to a String cannot fail.
        let _ = write!(
            body,
            r#"{{"error":{{"message":{},"type":{},"param":{},"code":{}}}}}"#,
            value!(self.message),
            value!(self.kind),
            value!(self.param),
            self.status.as_u16(),
        );
        crate::reply::json(self.status, body)
    }
}
