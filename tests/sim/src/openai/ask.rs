//! A generation request as far as it is the same for all engines. `null` is absent, the last of
//! duplicate members wins; what is not read is skipped, not built.

use hyper::HeaderMap;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::prompt::Prompt;

/// Choices of one request; more are refused.
const MOST_CHOICES: i64 = 128;

/// The generation routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completions,
}

/// The top-level members of a body, in its order.
pub(crate) struct Members<'a>(Vec<(String, &'a RawValue)>);

/// What is wrong with a request, for the engine to say in its own way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// The member, if it is about one.
    pub(crate) member: Option<String>,
    pub(crate) text: String,
}

/// A parsed request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) route: Route,
    /// Model as the client names it.
    pub(crate) model: String,
    pub(crate) prompt: Prompt,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Tokens the request allows.
    pub(crate) max_tokens: Option<u32>,
    /// Choices per prompt.
    pub(crate) n: u32,
}

// === impl Route ===

impl Route {
    /// The route of a path.
    pub(crate) fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }

    /// Name of the member with the prompt.
    pub(crate) fn prompt_member(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }
}

// === impl Members ===

impl<'a> Members<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// It is not JSON by its type or content, or not an object.
    pub(crate) fn read(headers: &HeaderMap, body: &'a [u8]) -> Result<Self, Problem> {
        let json = headers
            .get(CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.trim_start().starts_with("application/json"));
        if !json {
            return Err(Problem::of(
                None,
                "Unsupported Media Type: Only 'application/json' is allowed",
            ));
        }
        if headers.contains_key(CONTENT_ENCODING) {
            return Err(Problem::of(None, "JSON decode error"));
        }
        serde_json::from_slice(body).map_err(|error| {
            let text = if error.is_data() {
                "Input should be a valid dictionary"
            } else {
                "JSON decode error"
            };
            Problem::of(None, text)
        })
    }

    /// A member that is not `null`.
    pub(crate) fn get(&self, name: &str) -> Option<&'a RawValue> {
        let (_, raw) = self.0.iter().rev().find(|(member, _)| member == name)?;
        (raw.get() != "null").then_some(*raw)
    }

    /// A member read as `T`.
    ///
    /// # Errors
    /// It is something else.
    pub(crate) fn typed<T: Deserialize<'a>>(
        &self,
        name: &str,
        what: &str,
    ) -> Result<Option<T>, Problem> {
        let Some(raw) = self.get(name) else {
            return Ok(None);
        };
        let problem = |_| Problem::of(Some(name), &format!("Input should be a valid {what}"));
        serde_json::from_str(raw.get()).map(Some).map_err(problem)
    }

    /// The names of all members.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::with_capacity(16);
                while let Some(entry) = map.next_entry()? {
                    members.push(entry);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

// === impl Problem ===

impl Problem {
    pub(crate) fn of(member: Option<&str>, text: &str) -> Self {
        Self {
            member: member.map(str::to_owned),
            text: text.to_owned(),
        }
    }

    /// Member and text in one sentence, as a validation library has them.
    pub(crate) fn sentence(&self) -> String {
        match &self.member {
            Some(member) => format!("1 validation error: body.{member}: {}", self.text),
            None => format!("1 validation error: body: {}", self.text),
        }
    }
}

// === impl Ask ===

impl Ask {
    /// Reads a request.
    ///
    /// # Errors
    /// A member is missing or not what it has to be.
    pub(crate) fn read(route: Route, members: &Members<'_>) -> Result<Self, Problem> {
        let name = route.prompt_member();
        let missing = |name| Problem::of(Some(name), "Field required");
        let prompt = members.get(name).ok_or_else(|| missing(name))?.get();
        if !prompt.starts_with('[') && (route == Route::Chat || !prompt.starts_with('"')) {
            return Err(Problem::of(Some(name), "Input should be a valid list"));
        }
        let stream = members.typed("stream", "boolean")?.unwrap_or(false);
        let max_tokens = match route {
            Route::Chat => cap(members, "max_completion_tokens")?.or(cap(members, "max_tokens")?),
            Route::Completions => cap(members, "max_tokens")?,
        };
        let n = members.typed::<i64>("n", "integer")?.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&n) {
            return Err(Problem::of(Some("n"), "Input should be at least 1"));
        }
        let model: Option<String> = members.typed("model", "string")?;
        Ok(Self {
            route,
            model: model.ok_or_else(|| missing("model"))?,
            prompt: Prompt::measure(prompt, route == Route::Completions),
            stream,
            include_usage: include_usage(members)?,
            max_tokens,
            n: u32::try_from(n).unwrap_or(1),
        })
    }

    /// Sequences the engine runs for this request.
    pub(crate) fn sequences(&self) -> u32 {
        self.prompt.count.saturating_mul(self.n)
    }
}

fn cap(members: &Members<'_>, name: &str) -> Result<Option<u32>, Problem> {
    let Some(asked) = members.typed::<i64>(name, "integer")? else {
        return Ok(None);
    };
    match u32::try_from(asked) {
        Ok(asked) if asked > 0 => Ok(Some(asked)),
        _ => Err(Problem::of(Some(name), "Input should be greater than 0")),
    }
}

fn include_usage(members: &Members<'_>) -> Result<bool, Problem> {
    #[derive(serde::Deserialize)]
    struct Options {
        include_usage: Option<bool>,
    }
    let options = members.typed::<Options>("stream_options", "dictionary")?;
    Ok(options.and_then(|o| o.include_usage).unwrap_or(false))
}
