//! TensorRT-LLM (the OpenAI disaggregation protocol of 1.3.0rc8). The context worker computes the
//! prompt, the generation worker what follows; both are told by `disaggregated_params`.
//!
//! *Context first*: the generation leg carries what the context reply says, with the prompt as
//! the token ids that were computed. *Generation first*: both legs are sent at once and meet by
//! an id; where the context worker is, its `/server_info` has told before.
//!
//! Ids have 63 bits: they pass as the text they came as.

pub mod ids;
pub mod workers;

use super::hand_over::{HandOver, Unusable};
use super::limits;
use crate::request::cursor::{Cursor, JsonError};
use crate::request::patch::Edit;
use crate::request::{Endpoint, Member, Scan};
use std::borrow::Cow;
use std::ops::Range;

const PARAMS: &str = "disaggregated_params";

/// Which leg waits for which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The generation leg waits for the context reply.
    ContextFirst,
    /// Neither waits.
    GenerationFirst,
}

/// What turns a client's body into that of the context leg. `max_completion_tokens` goes: the
/// schema takes only one cap.
#[must_use]
pub fn prefill_edits(scan: &Scan, id: u64, schedule: Schedule) -> Vec<Edit<'static>> {
    let style = match schedule {
        Schedule::ContextFirst => "",
        Schedule::GenerationFirst => r#","schedule_style":1"#,
    };
    let params = format!(r#"{{"request_type":"context_only","disagg_request_id":{id}{style}}}"#);
    let mut edits = vec![Edit::Set(
        Member::DisaggregatedParams,
        Cow::Owned(params.into_bytes()),
    )];
    limits::one_token(scan, &[Member::MaxTokens], &mut edits);
    if scan.has(Member::MaxCompletionTokens) {
        edits.push(Edit::Delete(Member::MaxCompletionTokens));
    }
    edits
}

/// Reads the reply of a context-first leg (status 200): its `disaggregated_params`, at the top
/// level or in the first choice, become those of the generation leg.
#[must_use]
pub fn hand_over(reply: &[u8]) -> HandOver {
    let Some(found) = Reply::read(reply) else {
        return HandOver::NotAnObject;
    };
    let Some(params) = found.params.and_then(|span| reply.get(span)) else {
        return HandOver::Unusable(Unusable::NoContext);
    };
    match generation_params(params) {
        Ok(params) => HandOver::Members([format!("\"{PARAMS}\":").as_bytes(), &params].concat()),
        Err(reason) => HandOver::Unusable(reason),
    }
}

/// The prompt as the context worker read it: a JSON list of token ids, if the reply has one.
#[must_use]
pub fn prompt_ids(reply: &[u8]) -> Option<&[u8]> {
    let ids = reply.get(Reply::read(reply)?.prompt_ids?)?;
    ids.starts_with(b"[").then_some(ids)
}

/// The member that the token ids of the prompt stand for in the generation leg.
#[must_use]
pub fn ids_member(endpoint: Endpoint) -> Option<Member> {
    match endpoint {
        Endpoint::Chat => Some(Member::PromptTokenIds),
        Endpoint::Completions => Some(Member::Prompt),
        _ => None,
    }
}

/// A generation leg of one token, which takes the KV that `members` (of [`HandOver::Members`])
/// names and with that has the context worker free it.
#[must_use]
pub fn release_body(model: &str, members: &[u8], ids: &[u8], endpoint: Endpoint) -> Vec<u8> {
    let model = serde_json::Value::from(model);
    let (prompt, end): (&str, &[u8]) = match endpoint {
        Endpoint::Completions => (r#""prompt":"#, b""),
        _ => (
            r#""prompt_token_ids":"#,
            br#","messages":[{"role":"user","content":"-"}]"#,
        ),
    };
    let head = format!(r#"{{"model":{model},"max_tokens":1,{prompt}"#);
    [head.as_bytes(), ids, end, b",", members, b"}"].concat()
}

/// Where the generation worker finds a context worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextWorker {
    /// Members of the generation leg's parameters, as the worker wrote their values.
    members: String,
}

/// Why a context worker cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoContextWorker {
    /// The answer is no JSON object, or has no `disaggregated_params` object.
    #[error("its /server_info has no disaggregated_params")]
    NoParams,
    /// The object is empty.
    #[error(
        "its /server_info has empty disaggregated_params: generation_first needs \
         cache_transceiver_config with transceiver_runtime: PYTHON on both roles"
    )]
    Empty,
    /// The place is not one non-empty string.
    #[error("ctx_info_endpoint of its /server_info does not name one place")]
    Endpoint,
    /// The rank is no whole number.
    #[error("ctx_dp_rank of its /server_info is not a whole number")]
    Rank,
    /// The opaque state is no string.
    #[error("encoded_opaque_state of its /server_info is not a string")]
    State,
}

impl ContextWorker {
    /// Reads the body of `/server_info`.
    ///
    /// # Errors
    /// See [`NoContextWorker`].
    pub fn read(info: &[u8]) -> Result<Self, NoContextWorker> {
        let params = Reply::read(info).and_then(|found| info.get(found.params?));
        let params = params.filter(|params| params.starts_with(b"{"));
        let params = params.ok_or(NoContextWorker::NoParams)?;
        let (mut endpoint, mut rank, mut state, mut empty) = (None, None, None, true);
        let walked = Cursor::new(params).object::<JsonError>(0, |cursor, key| {
            empty = false;
            let value = cursor.value(1)?;
            match cursor.slice(key.inner()) {
                b"ctx_info_endpoint" => endpoint = Some(cursor.slice(value)),
                b"ctx_dp_rank" => rank = Some(cursor.slice(value)),
                b"encoded_opaque_state" => state = Some(cursor.slice(value)),
                _ => {}
            }
            Ok(())
        });
        if walked.is_err() {
            return Err(NoContextWorker::NoParams);
        }
        if empty {
            return Err(NoContextWorker::Empty);
        }
        let endpoint = endpoint
            .and_then(one_text)
            .ok_or(NoContextWorker::Endpoint)?;
        let rank = rank.and_then(whole_number).ok_or(NoContextWorker::Rank)?;
        let mut members = format!(r#""ctx_dp_rank":{rank},"ctx_info_endpoint":{endpoint}"#);
        if let Some(state) = state.filter(|state| *state != b"null") {
            let state = text(state).ok_or(NoContextWorker::State)?;
            members.push_str(r#","encoded_opaque_state":"#);
            members.push_str(state);
        }
        Ok(Self { members })
    }

    /// Text of the member that a generation-first leg carries.
    #[must_use]
    pub fn decode_members(&self, id: u64) -> Vec<u8> {
        let place = &self.members;
        format!(
            r#""{PARAMS}":{{"request_type":"generation_only","disagg_request_id":{id},"ctx_request_id":{id},"schedule_style":1,{place}}}"#
        )
        .into_bytes()
    }
}

/// What is looked at of a worker's answer.
struct Reply {
    params: Option<Range<usize>>,
    prompt_ids: Option<Range<usize>>,
}

impl Reply {
    fn read(reply: &[u8]) -> Option<Self> {
        simdutf8::basic::from_utf8(reply).ok()?;
        let mut cursor = Cursor::new(reply);
        let (mut params, mut in_choice, mut prompt_ids) = (None, None, None);
        cursor
            .object::<JsonError>(0, |cursor, key| {
                let name = cursor.slice(key.inner());
                if name == b"choices" && cursor.peek() == Some(b'[') {
                    in_choice = first_choice(cursor)?;
                    return Ok(());
                }
                let value = cursor.value(1)?;
                match name {
                    b"disaggregated_params" => params = Some(value),
                    b"prompt_token_ids" => prompt_ids = Some(value),
                    _ => {}
                }
                Ok(())
            })
            .ok()?;
        cursor.end().ok()?;
        Some(Self {
            params: params.or(in_choice),
            prompt_ids,
        })
    }
}

/// Walks over `choices`; returns the parameters of the first.
fn first_choice(cursor: &mut Cursor<'_>) -> Result<Option<Range<usize>>, JsonError> {
    let mut found = None;
    let mut first = true;
    cursor.array(1, |cursor| {
        if !std::mem::replace(&mut first, false) || cursor.peek() != Some(b'{') {
            cursor.value(2)?;
            return Ok(());
        }
        cursor.object(2, |cursor, key| {
            let value = cursor.value(3)?;
            if cursor.slice(key.inner()) == PARAMS.as_bytes() {
                found = Some(value);
            }
            Ok(())
        })
    })?;
    Ok(found)
}

/// The parameters of a context reply as those of a generation leg: another `request_type`, every
/// other byte as it came.
fn generation_params(params: &[u8]) -> Result<Vec<u8>, Unusable> {
    const TYPE: &[u8] = br#""generation_only""#;
    match params.first() {
        Some(b'{') => {}
        Some(b'n') | None => return Err(Unusable::NoContext),
        Some(_) => return Err(Unusable::NotAnObject),
    }
    let (mut kind, mut id, mut tokens, mut repeated) = (None, None, None, false);
    Cursor::new(params)
        .object::<JsonError>(0, |cursor, key| {
            let value = cursor.value(1)?;
            let field = match cursor.slice(key.inner()) {
                b"request_type" => &mut kind,
                b"ctx_request_id" => &mut id,
                b"first_gen_tokens" => &mut tokens,
                _ => return Ok(()),
            };
            repeated |= field.replace(value).is_some();
            Ok(())
        })
        .map_err(|_| Unusable::NotAnObject)?;
    if repeated {
        return Err(Unusable::Repeated);
    }
    let raw = |span: Option<Range<usize>>| span.and_then(|span| params.get(span));
    let is_id = |text: &str| text.parse::<i64>().is_ok_and(|id| id >= 0);
    if !raw(id).and_then(whole_number).is_some_and(is_id) {
        return Err(Unusable::ContextId);
    }
    if !raw(tokens).is_some_and(|tokens| tokens.starts_with(b"[")) {
        return Err(Unusable::FirstTokens);
    }
    let (span, text) = match kind {
        Some(span) => (span, TYPE.to_vec()),
        // The object has members, so a comma follows.
        None => (1..1, [br#""request_type":"#, TYPE, b","].concat()),
    };
    let before = params.get(..span.start).unwrap_or_default();
    let after = params.get(span.end..).unwrap_or_default();
    Ok([before, &text, after].concat())
}

/// A whole number, as it is written.
fn whole_number(raw: &[u8]) -> Option<&str> {
    let digits = !raw.is_empty() && raw.iter().all(u8::is_ascii_digit);
    str::from_utf8(raw).ok().filter(|_| digits)
}

/// A non-empty string, as it is written.
fn text(raw: &[u8]) -> Option<&str> {
    let is_text = raw.len() > 2 && raw.starts_with(b"\"");
    str::from_utf8(raw).ok().filter(|_| is_text)
}

/// A non-empty string, or the only one of a list.
fn one_text(raw: &[u8]) -> Option<&str> {
    if !raw.starts_with(b"[") {
        return text(raw);
    }
    let (mut only, mut entries) = (None, 0_usize);
    Cursor::new(raw)
        .array::<JsonError>(0, |cursor| {
            let value = cursor.value(1)?;
            entries = entries.saturating_add(1);
            only = Some(cursor.slice(value));
            Ok(())
        })
        .ok()?;
    only.filter(|_| entries == 1).and_then(text)
}

#[cfg(test)]
mod tests;
