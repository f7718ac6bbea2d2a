//! Answers, whole and streamed, of OpenAI's shape with each engine's own members.

use std::fmt::Write as _;

use serde_json::Value;

use super::ask::{Ask, Route};

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    /// By an abort call.
    Abort,
}

/// The members an engine adds, as JSON fragments that start with a comma or are empty.
pub(crate) struct Voice {
    /// After `content` of a message.
    pub(crate) message: &'static str,
    /// After `content` of a delta.
    pub(crate) delta: &'static str,
    /// After `finish_reason` of a choice.
    pub(crate) choice: &'static str,
    /// After `finish_reason` of a streamed choice.
    pub(crate) chunk_choice: &'static str,
    /// After the counts of `usage`.
    pub(crate) usage: &'static str,
    /// At the end of a whole answer.
    pub(crate) end: &'static str,
    /// Whether the finish reason comes in a chunk of its own after the last token.
    pub(crate) finish_apart: bool,
}

/// What is said about one request.
pub(crate) struct Parts<'a> {
    pub(crate) voice: &'static Voice,
    pub(crate) ask: &'a Ask,
    pub(crate) id: &'a str,
    pub(crate) model: &'a str,
    /// Unix seconds.
    pub(crate) created: u64,
}

// === impl Finish ===

impl Finish {
    fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

// === impl Parts ===

impl Parts<'_> {
    /// The answer in one piece. `choice` and `end` are more members, as a [`Voice`]'s.
    pub(crate) fn whole(
        &self,
        text: &str,
        finish: Finish,
        tokens: u32,
        choice: &str,
        end: &str,
    ) -> String {
        let mut out = String::with_capacity(text.len().saturating_add(1024));
        let object = match self.ask.route {
            Route::Chat => "chat.completion",
            Route::Completions => "text_completion",
        };
        out.push_str(&self.head(object));
        let (voice, text) = (self.voice, quote(text));
        for index in 0..self.ask.sequences() {
            let comma = if index == 0 { "" } else { "," };
            let said = match self.ask.route {
                Route::Chat => format!(
                    r#""message":{{"role":"assistant","content":{text}{}}}"#,
                    voice.message
                ),
                Route::Completions => format!(r#""text":{text}"#),
            };
            // Writing to a String cannot fail.
            let _ = write!(
                out,
                r#"{comma}{{"index":{index},{said},"logprobs":null,"finish_reason":"{}"{}{choice}}}"#,
                finish.name(),
                voice.choice,
            );
        }
        let _ = write!(out, "],{}{}{end}}}", self.usage(tokens), voice.end);
        out
    }

    /// What a chat stream opens with, once the first token is there.
    pub(crate) fn opening(&self) -> String {
        if self.ask.route != Route::Chat {
            return String::new();
        }
        (0..self.ask.sequences())
            .map(|index| self.chunk(index, r#""assistant""#, Some(""), None))
            .collect()
    }

    /// One token of one choice; `finish` with the last.
    pub(crate) fn content(&self, text: &str, index: u32, finish: Option<Finish>) -> String {
        if self.voice.finish_apart && finish.is_some() {
            let content = self.chunk(index, "null", Some(text), None);
            return content + &self.chunk(index, "null", None, finish);
        }
        self.chunk(index, "null", Some(text), finish)
    }

    /// The end of a choice that gets no more tokens.
    pub(crate) fn cut_short(&self, index: u32, finish: Finish) -> String {
        self.chunk(index, "null", None, Some(finish))
    }

    /// What follows the last token.
    pub(crate) fn closing(&self, tokens: u32) -> String {
        let usage = if self.ask.include_usage {
            let head = self.head(self.chunk_object());
            format!("data: {head}],{}}}\n\n", self.usage(tokens))
        } else {
            String::new()
        };
        format!("{usage}data: [DONE]\n\n")
    }

    /// A chunk of one choice; `role` is JSON.
    fn chunk(&self, index: u32, role: &str, text: Option<&str>, finish: Option<Finish>) -> String {
        let head = self.head(self.chunk_object());
        let reason = finish.map_or("null".to_owned(), |finish| format!("\"{}\"", finish.name()));
        let said = match self.ask.route {
            Route::Chat => {
                let content = text.map_or("null".to_owned(), quote);
                let more = self.voice.delta;
                format!(r#""delta":{{"role":{role},"content":{content}{more}}}"#)
            }
            Route::Completions => format!(r#""text":{}"#, quote(text.unwrap_or_default())),
        };
        format!(
            "data: {head}{{\"index\":{index},{said},\"logprobs\":null,\"finish_reason\":{reason}{}}}],\"usage\":null}}\n\n",
            self.voice.chunk_choice
        )
    }

    fn chunk_object(&self) -> &'static str {
        match self.ask.route {
            Route::Chat => "chat.completion.chunk",
            Route::Completions => "text_completion",
        }
    }

    fn head(&self, object: &str) -> String {
        format!(
            r#"{{"id":{},"object":"{object}","created":{},"model":{},"choices":["#,
            quote(self.id),
            self.created,
            quote(self.model)
        )
    }

    fn usage(&self, tokens: u32) -> String {
        let prompt = &self.ask.prompt;
        let prompt = prompt.tokens.saturating_mul(prompt.count);
        let completion = tokens.saturating_mul(self.ask.sequences());
        format!(
            r#""usage":{{"prompt_tokens":{prompt},"total_tokens":{},"completion_tokens":{completion}{}}}"#,
            prompt.saturating_add(completion),
            self.voice.usage
        )
    }
}

/// A JSON string literal.
pub(crate) fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
