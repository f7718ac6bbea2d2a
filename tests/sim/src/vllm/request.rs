//! A generation request as vLLM reads it: borrowed parsing, last duplicate wins, no DOM of the
//! prompt. Schema errors come first, as there; what the serving layer refuses is found later by
//! [`Job::refusal`], because vLLM treats the named remote KV differently.

use hyper::HeaderMap;
use hyper::header::CONTENT_TYPE;
use serde_json::value::RawValue;

use super::error::Refusal;
use super::fields::{Fields, boolean, integer, number, present, stream_options, string};
use super::transfer::{self, Transfer};
use crate::config::EngineConfig;
use crate::core::Words;
use crate::prompt::Prompt;

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
        let prompt = read_prompt(name, present(prompt))?;
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
        let prompt = match &transfer {
            Transfer::Consume(remote) => remote.prompt().unwrap_or(prompt),
            _ => prompt,
        };
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

fn read_prompt(name: &str, raw: Option<&RawValue>) -> Result<Prompt, Refusal> {
    let param = || format!("body.{name}");
    let Some(raw) = raw else {
        return Err(Refusal::schema(param(), "Field required"));
    };
    let text = raw.get();
    if !text.starts_with('[') && (name == "messages" || !text.starts_with('"')) {
        return Err(Refusal::schema(param(), "Input should be a valid list"));
    }
    Ok(Prompt::measure(text, name == "prompt"))
}
