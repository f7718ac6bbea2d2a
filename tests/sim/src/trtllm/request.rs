//! A generation request as a worker reads it.

use hyper::header::HeaderMap;
use hyper::{Response, StatusCode};
use serde_json::json as value;

use super::Trtllm;
use super::params::{Context, Kind};
use crate::config::Transceiver;
use crate::openai::{Ask, Members, Problem, Route};
use crate::prompt::Prompt;
use crate::reply::{Reply, json_of};

/// Members both routes know beside the prompt.
const MEMBERS: [&str; 34] = [
    "model",
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "lora_request",
    "prompt_ignore_length",
    "use_beam_search",
    "top_k",
    "top_p_min",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "add_special_tokens",
    "response_format",
];

const CHAT_MEMBERS: [&str; 18] = [
    "messages",
    "prompt_token_ids",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "add_generation_prompt",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
    "agent_hierarchy",
    "thinking",
    "thinking_token_budget",
    "disaggregated_params",
];

const COMPLETIONS_MEMBERS: [&str; 5] = [
    "prompt",
    "suffix",
    "return_context_logits",
    "detokenize",
    "disaggregated_params",
];

/// A parsed request.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ask: Ask,
    pub(super) kind: Kind,
}

/// Why a request is not done.
#[derive(Debug)]
pub(super) enum Refusal {
    /// By the schema.
    Schema(String),
    /// By the worker.
    Worker(String),
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self::Schema(problem.sentence())
    }
}

impl Refusal {
    pub(super) fn respond(&self) -> Response<Reply> {
        let status = StatusCode::BAD_REQUEST;
        match self {
            Self::Schema(text) => json_of(status, &value!({ "error": text })),
            Self::Worker(text) => worker_error(status, text),
        }
    }
}

/// A worker's own error answer.
pub(super) fn worker_error(status: StatusCode, message: &str) -> Response<Reply> {
    let kind = if status.is_server_error() {
        "InternalServerError"
    } else {
        "BadRequestError"
    };
    let error = value!({
        "object": "error",
        "message": message,
        "type": kind,
        "param": null,
        "code": status.as_u16(),
    });
    json_of(status, &error)
}

impl Job {
    /// Reads a request.
    ///
    /// # Errors
    /// What schema validation refuses.
    pub(super) fn read(route: Route, headers: &HeaderMap, body: &[u8]) -> Result<Self, Refusal> {
        let members = Members::read(headers, body)?;
        let own: &[&str] = match route {
            Route::Chat => &CHAT_MEMBERS,
            Route::Completions => &COMPLETIONS_MEMBERS,
        };
        let extra = "Extra inputs are not permitted";
        for name in members.names() {
            if !MEMBERS.contains(&name) && !own.contains(&name) {
                return Err(Problem::of(Some(name), extra).into());
            }
        }
        let named = |name: &str| members.names().any(|member| member == name);
        // Two names of one member.
        if named("max_tokens") && named("max_completion_tokens") {
            return Err(Problem::of(Some("max_completion_tokens"), extra).into());
        }
        let mut ask = Ask::read(route, &members)?;
        if members.get("stream_options").is_some() && !ask.stream {
            let text = "Stream options can only be defined when stream is true.";
            return Err(Problem::of(None, text).into());
        }
        if let Some(ids) = token_ids(route, &members)? {
            ask.prompt = Prompt::from_token_ids(&ids);
        }
        let kind = Kind::read(members.get("disaggregated_params"))?;
        Ok(Self { ask, kind })
    }

    /// Refuses what is well-formed and still impossible at this worker.
    pub(super) fn accepted(self, engine: &Trtllm) -> Result<Self, Refusal> {
        let config = &engine.core.config;
        if !engine.capacity.fits(&self.ask, config) {
            return Err(Refusal::Worker(format!(
                "The sum of prompt length ({}) and query length should not exceed max_num_tokens ({})",
                self.ask.prompt.tokens, config.max_model_len
            )));
        }
        if self.kind != Kind::Whole && self.ask.sequences() > 1 {
            let text = "Disaggregated serving takes one prompt and one choice";
            return Err(Refusal::Worker(text.to_owned()));
        }
        match self.kind {
            Kind::Context(Context {
                generation_first: true,
                ..
            }) if config.transceiver == Transceiver::Cpp => {
                let text = "generation_first needs transceiver_runtime: PYTHON";
                Err(Refusal::Worker(text.to_owned()))
            }
            Kind::Context(Context { id: Some(id), .. })
                if engine.capacity.kv.holds(&id.to_string()) =>
            {
                Err(Refusal::Worker(format!(
                    "disagg_request_id {id} is in use by another request"
                )))
            }
            _ => Ok(self),
        }
    }
}

/// The prompt as token ids, if that is how it is given.
fn token_ids(route: Route, members: &Members<'_>) -> Result<Option<Vec<u32>>, Problem> {
    match route {
        Route::Chat => members.typed("prompt_token_ids", "list of integers"),
        Route::Completions => {
            let prompt = members.get("prompt").map(|raw| raw.get());
            let ids = prompt.and_then(|text| serde_json::from_str::<Vec<u32>>(text).ok());
            Ok(ids.filter(|ids| !ids.is_empty()))
        }
    }
}
