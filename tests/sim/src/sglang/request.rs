//! A generation request as SGLang reads it.

use hyper::header::HeaderMap;
use hyper::{Response, StatusCode};
use serde_json::json as value;

use super::Sglang;
use crate::config::Role;
use crate::core::Core;
use crate::openai::{Ask, Members, Problem, Route};
use crate::reply::{Reply, json_of};

/// Port of a bootstrap server that names none.
const BOOTSTRAP_PORT: u16 = 8998;

/// A parsed request.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ask: Ask,
    pub(super) rid: String,
    pub(super) bootstrap_host: Option<String>,
    pub(super) bootstrap_port: u16,
    pub(super) room: Option<u64>,
}

/// An error answer.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) kind: &'static str,
    pub(super) message: String,
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: problem.sentence(),
        }
    }
}

/// A value that is not accepted.
pub(super) fn bad_request(message: &str) -> Refusal {
    Refusal {
        status: StatusCode::BAD_REQUEST,
        kind: "BadRequestError",
        message: message.to_owned(),
    }
}

impl Job {
    /// Reads a request.
    ///
    /// # Errors
    /// What schema validation refuses.
    pub(super) fn read(
        route: Route,
        headers: &HeaderMap,
        body: &[u8],
        core: &Core,
    ) -> Result<Self, Refusal> {
        let members = Members::read(headers, body)?;
        let rid: Option<String> = members.typed("rid", "string")?;
        let port: Option<u16> = members.typed("bootstrap_port", "integer")?;
        let room = room(&members)?;
        let as_double = |room: u64| room as f64 as u64;
        Ok(Self {
            ask: Ask::read(route, &members)?,
            rid: rid.unwrap_or_else(|| {
                let words = &core.words;
                format!("{:016x}{:016x}", words.next(), words.next())
            }),
            bootstrap_host: members.typed("bootstrap_host", "string")?,
            bootstrap_port: port.unwrap_or(BOOTSTRAP_PORT),
            room: if core.config.rooms_as_doubles {
                room.map(as_double)
            } else {
                room
            },
        })
    }

    /// Refuses what is well-formed and still impossible.
    pub(super) fn refusal(&self, engine: &Sglang) -> Result<(), Refusal> {
        let core = &engine.core;
        let config = &core.config;
        if config.role != Role::Both && self.room.is_none() {
            return Err(bad_request(&format!(
                "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{}'",
                self.rid
            )));
        }
        if !engine.capacity.fits(&self.ask, config) {
            return Err(bad_request(&format!(
                "The input ({} tokens) is longer than the model's context length ({} tokens).",
                self.ask.prompt.tokens, config.max_model_len
            )));
        }
        let queue = u64::from(config.max_num_queued_reqs);
        if queue > 0 && core.counters.waiting.get() >= queue {
            return Err(Refusal {
                status: StatusCode::SERVICE_UNAVAILABLE,
                kind: "503",
                message: "The request queue is full.".to_owned(),
            });
        }
        Ok(())
    }
}

/// The room as it is written: a double would not hold it.
fn room(members: &Members<'_>) -> Result<Option<u64>, Problem> {
    const NAME: &str = "bootstrap_room";
    let Some(raw) = members.get(NAME) else {
        return Ok(None);
    };
    let text = raw.get();
    let room = text.parse::<u64>().ok().or_else(|| {
        // 1e3 and 5.0 are integers to a lenient reader.
        let double = text.parse::<f64>().ok()?;
        let integral = double.fract() == 0.0 && (0.0..9.3e18).contains(&double);
        integral.then_some(double as u64)
    });
    match room {
        Some(room) if i64::try_from(room).is_ok() => Ok(Some(room)),
        _ => Err(Problem::of(
            Some(NAME),
            "Input should be an integer from 0 to 9223372036854775807",
        )),
    }
}

/// An error answer.
pub(super) fn error(status: StatusCode, kind: &str, message: &str) -> Response<Reply> {
    json_of(status, &error_object(status, kind, message))
}

/// The error event of a stream.
pub(super) fn error_event(status: StatusCode, message: &str) -> String {
    let kind = status.canonical_reason().unwrap_or("Error");
    let kind = kind.to_uppercase().replace(' ', "_");
    let event = value!({ "error": error_object(status, &kind, message) });
    format!("data: {event}\n\n")
}

fn error_object(status: StatusCode, kind: &str, message: &str) -> serde_json::Value {
    value!({
        "object": "error",
        "message": message,
        "type": kind,
        "param": null,
        "code": status.as_u16(),
    })
}
