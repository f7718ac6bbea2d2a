//! `disaggregated_params`: what a request asks for, and what a context request answers with.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::openai::Problem;

/// The least id a router may give; smaller ones are a worker's own.
const LEAST_GLOBAL_ID: u64 = 1 << 42;

const NAME: &str = "disaggregated_params";

/// The members of 1.3.0rc8; another one is refused.
const MEMBERS: [&str; 13] = [
    "request_type",
    "first_gen_tokens",
    "first_gen_log_probs",
    "first_gen_logits",
    "ctx_request_id",
    "encoded_opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
    "schedule_style",
    "ctx_usage",
    "conversation_id",
];

/// What is to be done with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Everything.
    Whole,
    /// The prompt.
    Context(Context),
    /// What follows it.
    Generation(Generation),
}

/// A `context_only` request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Context {
    /// `disagg_request_id`.
    pub(super) id: Option<u64>,
    /// Waits for the generation leg.
    pub(super) generation_first: bool,
}

/// A `generation_only` request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Generation {
    pub(super) id: u64,
    pub(super) generation_first: bool,
    pub(super) place: Place,
}

/// A context worker's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) instance: String,
}

/// What a context request answers with.
pub(super) struct Offer<'a> {
    pub(super) id: u64,
    pub(super) disagg_id: Option<u64>,
    pub(super) generation_first: bool,
    /// As [`Place::parse`] reads it.
    pub(super) endpoint: &'a str,
    /// Whether the endpoint is told apart from the opaque state.
    pub(super) tells_endpoint: bool,
    pub(super) first_token: u32,
}

impl Kind {
    /// Reads a request's `disaggregated_params`.
    ///
    /// # Errors
    /// What a worker refuses about them.
    pub(super) fn read(raw: Option<&RawValue>) -> Result<Self, Problem> {
        let Some(raw) = raw else {
            return Ok(Self::Whole);
        };
        let members: Map<String, Value> = serde_json::from_str(raw.get())
            .map_err(|_| Problem::of(Some(NAME), "Input should be an object"))?;
        for name in members.keys() {
            if !MEMBERS.contains(&name.as_str()) {
                return Err(about(name, "Extra inputs are not permitted"));
            }
        }
        let request_type = members.get("request_type").and_then(Value::as_str);
        let style = integer(&members, "schedule_style")?.unwrap_or(0);
        if style > 1 {
            return Err(about("schedule_style", "Input should be 0 or 1"));
        }
        let generation_first = style == 1;
        let id = integer(&members, "disagg_request_id")?;
        match request_type {
            Some("context_only") => {
                if id.is_some_and(|id| id < LEAST_GLOBAL_ID) {
                    return Err(about(
                        "disagg_request_id",
                        "Input should be at least 4398046511104: smaller ids are the worker's own",
                    ));
                }
                if generation_first && id.is_none() {
                    return Err(about("disagg_request_id", "Field required"));
                }
                Ok(Self::Context(Context {
                    id,
                    generation_first,
                }))
            }
            Some("generation_only") => generation(&members, id, generation_first),
            Some(other) => Err(about(
                "request_type",
                &format!("Unknown request type: {other}"),
            )),
            None => Err(about("request_type", "Field required")),
        }
    }
}

fn generation(
    members: &Map<String, Value>,
    disagg_id: Option<u64>,
    generation_first: bool,
) -> Result<Kind, Problem> {
    let id = integer(members, "ctx_request_id")?;
    let id = id.ok_or_else(|| about("ctx_request_id", "Field required"))?;
    let differs = |from: &str| {
        about(
            "ctx_request_id",
            &format!("{id} is not the id of {from}: it lost bits, or belongs to another request"),
        )
    };
    if disagg_id.is_some_and(|other| other != id) {
        return Err(differs("disagg_request_id"));
    }
    let tokens = members.get("first_gen_tokens").filter(|v| !v.is_null());
    match tokens.map(Value::as_array) {
        Some(None) => return Err(about("first_gen_tokens", "Input should be a valid list")),
        None if !generation_first => return Err(about("first_gen_tokens", "Field required")),
        _ => {}
    }
    let state = text(members, "encoded_opaque_state")?;
    let endpoint = text(members, "ctx_info_endpoint")?;
    if let Some((known, _)) = state.and_then(|state| state.split_once('@'))
        && known != id.to_string()
    {
        return Err(differs("encoded_opaque_state"));
    }
    let place = endpoint.or(state
        .and_then(|state| state.split_once('@'))
        .map(|(_, at)| at));
    let place = place.and_then(Place::parse).ok_or_else(|| {
        about(
            "ctx_info_endpoint",
            "neither this nor encoded_opaque_state says where the context is",
        )
    })?;
    Ok(Kind::Generation(Generation {
        id,
        generation_first,
        place,
    }))
}

fn about(member: &str, text: &str) -> Problem {
    Problem::of(Some(&format!("{NAME}.{member}")), text)
}

/// An id or number, exactly: neither a double nor beyond 63 bits.
fn integer(members: &Map<String, Value>, name: &str) -> Result<Option<u64>, Problem> {
    match members.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_i64().and_then(|n| u64::try_from(n).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(about(
                name,
                "Input should be an integer from 0 to 9223372036854775807",
            )),
        },
    }
}

fn text<'a>(members: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, Problem> {
    match members.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(about(name, "Input should be a valid string")),
    }
}

impl Place {
    /// Reads `tcp://host:port/instance`.
    fn parse(endpoint: &str) -> Option<Self> {
        let (address, instance) = endpoint.strip_prefix("tcp://")?.rsplit_once('/')?;
        let (host, port) = address.rsplit_once(':')?;
        Some(Self {
            host: host.to_owned(),
            port: port.parse().ok()?,
            instance: instance.to_owned(),
        })
    }
}

impl Offer<'_> {
    /// The object, with the members in their order.
    pub(super) fn write(&self) -> String {
        let disagg_id = self
            .disagg_id
            .map_or("null".to_owned(), |id| id.to_string());
        let endpoint = if self.tells_endpoint {
            format!("\"{}\"", self.endpoint)
        } else {
            "null".to_owned()
        };
        format!(
            r#"{{"request_type":"context_only","first_gen_tokens":[{}],"first_gen_log_probs":null,"first_gen_logits":null,"ctx_request_id":{id},"encoded_opaque_state":"{id}@{}","draft_tokens":null,"disagg_request_id":{disagg_id},"ctx_dp_rank":0,"ctx_info_endpoint":{endpoint},"schedule_style":{},"ctx_usage":null}}"#,
            self.first_token,
            self.endpoint,
            u8::from(self.generation_first),
            id = self.id,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Kind, Problem> {
        Kind::read(Some(serde_json::from_str(text).unwrap()))
    }

    #[test]
    fn an_offer_is_a_generation_request_once_its_type_is_changed() {
        let id = (1 << 62) + 1;
        let offer = Offer {
            id,
            disagg_id: Some(id),
            generation_first: false,
            endpoint: "tcp://h:7/abc",
            tells_endpoint: false,
            first_token: 5,
        };
        let text = offer.write().replace("context_only", "generation_only");
        let place = Place {
            host: "h".to_owned(),
            port: 7,
            instance: "abc".to_owned(),
        };
        let expected = Kind::Generation(Generation {
            id,
            generation_first: false,
            place,
        });
        assert_eq!(read(&text).unwrap(), expected);
        let rounded = text.replace("4611686018427387905,\"enc", "4611686018427387904,\"enc");
        assert_ne!(rounded, text);
        assert!(read(&rounded).unwrap_err().text.contains("lost bits"));
    }
}
