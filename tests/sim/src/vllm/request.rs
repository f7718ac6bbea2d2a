//! A generation request as vLLM reads it: borrowed parsing, last duplicate wins, no DOM of the
//! prompt. Schema errors come first, as there; what the serving layer refuses is found later by
//! [`Job::refusal`], because vLLM treats the named remote KV differently.

use hyper::HeaderMap;
use hyper::header::CONTENT_TYPE;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::Refusal;
use super::transfer::{self, Transfer};
use crate::config::EngineConfig;
use crate::core::Words;
use crate::identity::prompt_hash;

/// Choices of one request; more are refused.
const MOST_CHOICES: i64 = 128;

/// The generation routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completions,
    Responses,
    Messages,
}

/// A parsed request.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) route: Route,
    /// Response id: prefix and the caller's or a random part.
    pub(super) id: String,
    pub(super) prompt: Prompt,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    /// Tokens the request allows.
    pub(super) max_tokens: Option<u32>,
    /// Choices per prompt.
    pub(super) n: u32,
    pub(super) transfer: Transfer,
    model: Option<String>,
    temperature: Option<f64>,
    min_tokens: Option<i64>,
    asked_tokens: Option<i64>,
}

/// What is known of a prompt without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) hash: u64,
    pub(super) bytes: usize,
    /// A token per four bytes, at least four.
    pub(super) tokens: u32,
    /// Prompts in a list.
    pub(super) count: u32,
}

#[derive(Default)]
struct Fields<'a> {
    model: Option<&'a RawValue>,
    messages: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    stream_options: Option<&'a RawValue>,
    max_tokens: Option<&'a RawValue>,
    max_completion_tokens: Option<&'a RawValue>,
    max_output_tokens: Option<&'a RawValue>,
    min_tokens: Option<&'a RawValue>,
    temperature: Option<&'a RawValue>,
    n: Option<&'a RawValue>,
    request_id: Option<&'a RawValue>,
    return_token_ids: Option<&'a RawValue>,
    kv_transfer_params: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Model,
    Messages,
    Prompt,
    Input,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MinTokens,
    Temperature,
    N,
    RequestId,
    ReturnTokenIds,
    KvTransferParams,
    #[serde(other)]
    Other,
}

// === impl Route ===

impl Route {
    /// The route of a path.
    pub(super) fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => return None,
        })
    }

    fn prefix(self) -> &'static str {
        match self {
            // vLLM serves /v1/messages by its chat code.
            Self::Chat | Self::Messages => "chatcmpl-",
            Self::Completions => "cmpl-",
            Self::Responses => "resp_",
        }
    }
}

// === impl Job ===

impl Job {
    /// Reads a request.
    ///
    /// # Errors
    /// What schema validation refuses.
    pub(super) fn read(
        route: Route,
        headers: &HeaderMap,
        body: &[u8],
        words: &Words,
    ) -> Result<Self, Refusal> {
        let json = headers
            .get(CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.trim_start().starts_with("application/json"));
        if !json {
            return Err(Refusal {
                param: None,
                ..Refusal::schema(
                    "body",
                    "Unsupported Media Type: Only 'application/json' is allowed",
                )
            });
        }
        let fields: Fields<'_> = serde_json::from_slice(body).map_err(|error| {
            if body.is_empty() {
                Refusal::schema("body", "Field required")
            } else if error.is_data() {
                Refusal::schema("body", "Input should be a valid dictionary")
            } else {
                Refusal::schema(format!("body.{}", error.column()), "JSON decode error")
            }
        })?;
        let (name, prompt) = match route {
            Route::Chat | Route::Messages => ("messages", fields.messages),
            Route::Completions => ("prompt", fields.prompt),
            Route::Responses => ("input", fields.input),
        };
        let prompt = Prompt::read(name, present(prompt))?;
        let stream = boolean("stream", fields.stream)?.unwrap_or(false);
        let include_usage = stream_options(fields.stream_options, stream)?;
        let cap = |field, raw| integer(field, raw);
        let max_tokens = cap("max_tokens", fields.max_tokens)?;
        let asked_tokens = match route {
            Route::Chat => {
                cap("max_completion_tokens", fields.max_completion_tokens)?.or(max_tokens)
            }
            Route::Completions | Route::Messages => max_tokens,
            Route::Responses => cap("max_output_tokens", fields.max_output_tokens)?,
        };
        let n = integer("n", fields.n)?.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&n) {
            return Err(Refusal::schema(
                "body.n",
                "Input should be a small positive integer",
            ));
        }
        let transfer = transfer::read(present(fields.kv_transfer_params))?;
        let id = match headers.get("x-request-id").map(|v| v.as_bytes()) {
            Some(id) if !id.is_empty() => String::from_utf8_lossy(id).into_owned(),
            _ => match string("request_id", fields.request_id)? {
                Some(id) => id,
                None => format!("{:016x}", words.next()),
            },
        };
        Ok(Self {
            route,
            id: format!("{}{id}", route.prefix()),
            prompt,
            stream,
            include_usage,
            return_token_ids: boolean("return_token_ids", fields.return_token_ids)?
                .unwrap_or(false),
            max_tokens: asked_tokens.and_then(|n| u32::try_from(n).ok()),
            n: u32::try_from(n).unwrap_or(1),
            transfer,
            model: string("model", fields.model)?,
            temperature: number("temperature", fields.temperature)?,
            min_tokens: integer("min_tokens", fields.min_tokens)?,
            asked_tokens,
        })
    }

    /// What the serving layer refuses about the request.
    pub(super) fn refusal(&self, config: &EngineConfig, capacity: u64) -> Option<Refusal> {
        if let Some(model) = &self.model
            && *model != config.model
        {
            return Some(Refusal::model(model));
        }
        if let Some(temperature) = self.temperature
            && temperature < 0.0
        {
            let message = format!(
                "temperature must be non-negative, got {temperature}. (parameter=temperature, value={temperature})"
            );
            return Some(Refusal::value(Some("temperature"), message));
        }
        if let Some(asked) = self.asked_tokens
            && asked < 1
        {
            let message = format!("max_tokens must be at least 1, got {asked}.");
            return Some(Refusal::value(Some("max_tokens"), message));
        }
        if let (Some(min), Some(asked)) = (self.min_tokens, self.asked_tokens)
            && min > asked
        {
            let message =
                format!("min_tokens must be less than or equal to max_tokens={asked}, got {min}.");
            return Some(Refusal::value(None, message));
        }
        let (tokens, limit) = (self.prompt.tokens, config.max_model_len);
        if tokens > limit || self.blocks_needed(config.block_size) > capacity {
            let message = format!(
                "This model's maximum context length is {limit} tokens. However, your prompt contains at \
                 least {tokens} input tokens, which exceeds this limit even without any output tokens. \
                 Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})"
            );
            return Some(Refusal::value(Some("input_tokens"), message));
        }
        None
    }

    /// Sequences the engine runs for this request.
    pub(super) fn sequences(&self) -> u32 {
        self.prompt.count.saturating_mul(self.n)
    }

    fn blocks_needed(&self, block_size: u32) -> u64 {
        let one = u64::from(self.prompt.tokens.div_ceil(block_size.max(1)));
        one.saturating_mul(u64::from(self.sequences()))
    }
}

// === impl Prompt ===

impl Prompt {
    fn read(name: &str, raw: Option<&RawValue>) -> Result<Self, Refusal> {
        let param = || format!("body.{name}");
        let Some(raw) = raw else {
            return Err(Refusal::schema(param(), "Field required"));
        };
        let text = raw.get();
        let list = text.starts_with('[');
        if !list && (name == "messages" || !text.starts_with('"')) {
            return Err(Refusal::schema(param(), "Input should be a valid list"));
        }
        let inner = text.get(1..).unwrap_or_default().trim_start();
        // A list of strings or of token lists is several prompts; a list of numbers is one.
        let several = name == "prompt" && list && inner.starts_with(['"', '[']);
        let count = if several {
            serde_json::from_str::<Vec<IgnoredAny>>(text).map_or(1, |all| all.len())
        } else {
            1
        };
        let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let each = text.len().div_ceil(count as usize);
        Ok(Self {
            hash: prompt_hash(text.as_bytes()),
            bytes: text.len(),
            tokens: u32::try_from(each.div_ceil(4)).unwrap_or(u32::MAX).max(4),
            count,
        })
    }

    /// The token ids of this prompt: the hash in four, then filler. A decode engine given these
    /// knows the prompt without its text.
    pub(super) fn token_ids(&self) -> Vec<u32> {
        let hash = (0..4u32).map(|part| ((self.hash >> (16 * part)) & 0xffff) as u32);
        let filler = (4..self.tokens).map(|at| 100 + at % 1000);
        hash.chain(filler).collect()
    }

    /// The prompt of such token ids.
    pub(super) fn from_token_ids(ids: &[u32]) -> Self {
        let hash = ids.iter().take(4).rev();
        Self {
            hash: hash.fold(0, |hash, id| (hash << 16) | u64::from(*id & 0xffff)),
            bytes: ids.len().saturating_mul(4),
            tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX).max(1),
            count: 1,
        }
    }
}

// === impl Fields ===

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    // Derived code refuses duplicate keys; vLLM takes the last.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        while let Some(field) = map.next_key()? {
            let slot = match field {
                Field::Model => &mut fields.model,
                Field::Messages => &mut fields.messages,
                Field::Prompt => &mut fields.prompt,
                Field::Input => &mut fields.input,
                Field::Stream => &mut fields.stream,
                Field::StreamOptions => &mut fields.stream_options,
                Field::MaxTokens => &mut fields.max_tokens,
                Field::MaxCompletionTokens => &mut fields.max_completion_tokens,
                Field::MaxOutputTokens => &mut fields.max_output_tokens,
                Field::MinTokens => &mut fields.min_tokens,
                Field::Temperature => &mut fields.temperature,
                Field::N => &mut fields.n,
                Field::RequestId => &mut fields.request_id,
                Field::ReturnTokenIds => &mut fields.return_token_ids,
                Field::KvTransferParams => &mut fields.kv_transfer_params,
                Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *slot = Some(map.next_value()?);
        }
        Ok(fields)
    }
}

// === field readers: null is absent; numbers may stand in strings, as pydantic allows ===

fn present(raw: Option<&RawValue>) -> Option<&RawValue> {
    raw.filter(|raw| raw.get() != "null")
}

fn read<'a, T: Deserialize<'a>>(
    field: &str,
    raw: Option<&'a RawValue>,
    what: &str,
) -> Result<Option<T>, Refusal> {
    let Some(raw) = present(raw) else {
        return Ok(None);
    };
    let problem = || {
        Refusal::schema(
            format!("body.{field}"),
            &format!("Input should be a valid {what}"),
        )
    };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|_| problem())
}

fn boolean(field: &str, raw: Option<&RawValue>) -> Result<Option<bool>, Refusal> {
    read(field, raw, "boolean")
}

fn string(field: &str, raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    read(field, raw, "string")
}

fn number(field: &str, raw: Option<&RawValue>) -> Result<Option<f64>, Refusal> {
    let Some(raw) = present(raw) else {
        return Ok(None);
    };
    let value = raw.get().trim_matches('"').parse::<f64>();
    let problem = |_| Refusal::schema(format!("body.{field}"), "Input should be a valid number");
    value.map(Some).map_err(problem)
}

fn integer(field: &str, raw: Option<&RawValue>) -> Result<Option<i64>, Refusal> {
    match number(field, raw)? {
        None => Ok(None),
        Some(value) if value.fract() == 0.0 => Ok(Some(value as i64)),
        Some(_) => Err(Refusal::schema(
            format!("body.{field}"),
            "Input should be a valid integer",
        )),
    }
}

fn stream_options(raw: Option<&RawValue>, stream: bool) -> Result<bool, Refusal> {
    #[derive(serde::Deserialize)]
    struct Options {
        include_usage: Option<bool>,
    }
    let Some(options) = read::<Options>("stream_options", raw, "dictionary")? else {
        return Ok(false);
    };
    if !stream {
        let message =
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
        let mut refusal = Refusal::value(Some("stream_options"), message.to_owned());
        refusal.schema = true;
        return Err(refusal);
    }
    Ok(options.include_usage.unwrap_or(false))
}
