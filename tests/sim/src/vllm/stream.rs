//! Server-sent events of a streamed answer, as vLLM 0.32 writes them.

use super::metrics::Finish;
use super::request::{Job, Route};
use super::shape::{FINGERPRINT, quote};
use crate::core::unix_ms;

/// The writer of one request's events.
pub(super) struct Events {
    route: Route,
    /// What OpenAI chunks open with, or the quoted id on the other routes.
    head: String,
    model: String,
    choices: u32,
    usage: bool,
}

// === impl Events ===

impl Events {
    pub(super) fn new(job: &Job, model: String) -> Self {
        let object = match job.route {
            Route::Chat => "chat.completion.chunk",
            _ => "text_completion",
        };
        let (id, created) = (quote(&job.id), unix_ms() / 1000);
        let model = quote(&model);
        let head = match job.route {
            Route::Chat | Route::Completions => format!(
                r#"data: {{"id":{id},"object":"{object}","created":{created},"model":{model},"choices":["#
            ),
            Route::Responses | Route::Messages => id,
        };
        Self {
            route: job.route,
            head,
            model,
            choices: job.sequences(),
            usage: job.include_usage,
        }
    }

    /// What comes before the engine did anything; nothing on the completions route.
    pub(super) fn opening(&self, prompt_tokens: u32) -> String {
        let (head, model) = (&self.head, &self.model);
        match self.route {
            Route::Chat => (0..self.choices)
                .map(|index| {
                    format!(
                        "{head}{{\"index\":{index},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}],\"prompt_token_ids\":null,\"prompt_text\":null}}\n\n"
                    )
                })
                .collect(),
            Route::Completions => String::new(),
            Route::Responses => format!(
                "event: response.created\ndata: {{\"type\":\"response.created\",\"sequence_number\":0,\"response\":{{\"id\":{head},\"object\":\"response\",\"model\":{model},\"status\":\"in_progress\",\"output\":[]}}}}\n\n"
            ),
            Route::Messages => format!(
                "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"id\":{head},\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":{model},\"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{prompt_tokens},\"output_tokens\":0}}}}}}\n\nevent: content_block_start\ndata: {{\"type\":\"content_block_start\",\"index\":0,\"content_block\":{{\"type\":\"text\",\"text\":\"\"}}}}\n\n"
            ),
        }
    }

    /// One token of one choice; `finish` with the last.
    pub(super) fn content(&self, text: &str, choice: u32, finish: Option<Finish>) -> String {
        let (head, text) = (&self.head, quote(text));
        let reason = match finish {
            None => "null",
            Some(Finish::Length) => "\"length\"",
            Some(Finish::Stop) => "\"stop\"",
        };
        match self.route {
            Route::Chat => {
                let stop = if finish.is_some() {
                    r#""stop_reason":null,"#
                } else {
                    ""
                };
                format!(
                    "{head}{{\"index\":{choice},\"delta\":{{\"content\":{text}}},\"logprobs\":null,\"finish_reason\":{reason},{stop}\"token_ids\":null}}]}}\n\n"
                )
            }
            Route::Completions => format!(
                "{head}{{\"index\":{choice},\"text\":{text},\"logprobs\":null,\"finish_reason\":{reason},\"stop_reason\":null,\"prompt_token_ids\":null,\"token_ids\":null}}]}}\n\n"
            ),
            Route::Responses => format!(
                "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"output_index\":{choice},\"content_index\":0,\"delta\":{text}}}\n\n"
            ),
            Route::Messages => format!(
                "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{choice},\"delta\":{{\"type\":\"text_delta\",\"text\":{text}}}}}\n\n"
            ),
        }
    }

    /// What follows the last token.
    pub(super) fn closing(
        &self,
        job: &Job,
        prompt: u32,
        completion: u32,
        cached: u32,
        finish: Finish,
    ) -> String {
        let (head, model) = (&self.head, &self.model);
        let total = prompt.saturating_add(completion);
        let length = finish == Finish::Length;
        match job.route {
            Route::Chat | Route::Completions => {
                let created = if job.route == Route::Chat {
                    r#","created_cache_tokens":0"#
                } else {
                    ""
                };
                let usage = if self.usage {
                    format!(
                        "{head}],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{completion},\"prompt_tokens_details\":{{\"cached_tokens\":{cached}{created}}}}},\"system_fingerprint\":\"{FINGERPRINT}\"}}\n\n"
                    )
                } else {
                    String::new()
                };
                format!("{usage}data: [DONE]\n\n")
            }
            Route::Responses => {
                let status = if length { "incomplete" } else { "completed" };
                format!(
                    "event: response.{status}\ndata: {{\"type\":\"response.{status}\",\"response\":{{\"id\":{head},\"object\":\"response\",\"model\":{model},\"status\":\"{status}\",\"usage\":{{\"input_tokens\":{prompt},\"output_tokens\":{completion},\"total_tokens\":{total}}}}}}}\n\n"
                )
            }
            Route::Messages => {
                let stop = if length { "max_tokens" } else { "end_turn" };
                format!(
                    "event: content_block_stop\ndata: {{\"type\":\"content_block_stop\",\"index\":0}}\n\nevent: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{stop}\",\"stop_sequence\":null}},\"usage\":{{\"output_tokens\":{completion}}}}}\n\nevent: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\ndata: [DONE]\n\n"
                )
            }
        }
    }
}
