//! `kv_transfer_params`: what a request asks for, and what a prefill answers with.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::error::Refusal;
use crate::prompt::Prompt;

/// What is to be done with the KV of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Nothing: compute and generate here.
    None,
    /// Compute, and hold for a decode engine.
    Produce,
    /// Generate from remote KV.
    Consume(Box<Remote>),
}

/// The remote KV a request names, as far as it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) engine_id: Option<String>,
    pub(super) request_id: Option<String>,
    pub(super) host: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) blocks: Blocks,
    /// Prompt tokens the prefill engine had cached.
    pub(super) cached_tokens: u32,
    prompt_token_ids: Option<Vec<u32>>,
}

/// `remote_block_ids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Blocks {
    Missing,
    /// Not a list of lists.
    Malformed,
    /// The first list: the simulated model has one KV group.
    Ids(Vec<u32>),
}

/// A complete name of remote KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) engine_id: String,
    pub(super) request_id: String,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) blocks: Vec<u32>,
}

/// What kills a decode engine about the parameters it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fatal {
    /// Answers 500, then dies.
    AtOnce(&'static str),
    /// Hangs, then dies.
    Hang(&'static str),
}

/// What a prefill answers with.
pub(super) struct Offer<'a> {
    pub(super) blocks: &'a [u32],
    pub(super) engine_id: &'a str,
    pub(super) request_id: &'a str,
    pub(super) host: &'a str,
    pub(super) port: u16,
    pub(super) tokens: u32,
    /// The prefill ended in its first step.
    pub(super) one_step: bool,
}

#[derive(Deserialize)]
struct Wire<'a> {
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    #[serde(borrow)]
    remote_engine_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    remote_request_id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    remote_host: Option<Cow<'a, str>>,
    remote_port: Option<u16>,
    #[serde(borrow)]
    remote_block_ids: Option<&'a RawValue>,
    remote_prefill_cached_tokens: Option<u32>,
    prompt_token_ids: Option<Vec<u32>>,
}

/// Reads a request's `kv_transfer_params`.
///
/// # Errors
/// It is not an object.
pub(super) fn read(raw: Option<&RawValue>) -> Result<Transfer, Refusal> {
    let Some(raw) = raw else {
        return Ok(Transfer::None);
    };
    if !raw.get().starts_with('{') {
        let problem = "Input should be a valid dictionary";
        return Err(Refusal::schema("body.kv_transfer_params", problem));
    }
    let Ok(wire) = serde_json::from_str::<Wire<'_>>(raw.get()) else {
        return Ok(read_odd(raw));
    };
    if wire.do_remote_decode == Some(true) {
        return Ok(Transfer::Produce);
    }
    if wire.do_remote_prefill != Some(true) {
        return Ok(Transfer::None);
    }
    let blocks = match wire.remote_block_ids {
        None => Blocks::Missing,
        Some(raw) if raw.get() == "null" => Blocks::Missing,
        Some(raw) => match serde_json::from_str::<Vec<Vec<u32>>>(raw.get()) {
            Ok(lists) => Blocks::Ids(lists.into_iter().next().unwrap_or_default()),
            Err(_) => Blocks::Malformed,
        },
    };
    Ok(Transfer::Consume(Box::new(Remote {
        engine_id: wire.remote_engine_id.map(Cow::into_owned),
        request_id: wire.remote_request_id.map(Cow::into_owned),
        host: wire.remote_host.map(Cow::into_owned),
        port: wire.remote_port,
        blocks,
        cached_tokens: wire.remote_prefill_cached_tokens.unwrap_or(0),
        prompt_token_ids: wire.prompt_token_ids,
    })))
}

/// Members of unexpected types: vLLM declares none of them, so they reach the engine.
fn read_odd(raw: &RawValue) -> Transfer {
    let members: Map<String, Value> = serde_json::from_str(raw.get()).unwrap_or_default();
    let is = |name: &str| members.get(name) == Some(&Value::Bool(true));
    if is("do_remote_decode") {
        return Transfer::Produce;
    }
    if !is("do_remote_prefill") {
        return Transfer::None;
    }
    let text = |name: &str| members.get(name).and_then(Value::as_str).map(str::to_owned);
    let port = members.get("remote_port").and_then(Value::as_u64);
    Transfer::Consume(Box::new(Remote {
        engine_id: text("remote_engine_id"),
        request_id: text("remote_request_id"),
        host: text("remote_host"),
        port: port.and_then(|port| u16::try_from(port).ok()),
        blocks: Blocks::Malformed,
        cached_tokens: 0,
        prompt_token_ids: None,
    }))
}

// === impl Remote ===

impl Remote {
    /// The prompt the parameters carry as token ids; it replaces the request's text.
    pub(super) fn prompt(&self) -> Option<Prompt> {
        self.prompt_token_ids.as_deref().map(Prompt::from_token_ids)
    }

    /// The KV named, if a decode engine that needs `needed` blocks survives the name.
    pub(super) fn source(&self, needed: u32) -> Result<Source, Fatal> {
        let nothing = self.engine_id.is_none() && self.host.is_none() && self.request_id.is_none();
        if nothing && self.blocks == Blocks::Missing {
            return Err(Fatal::AtOnce("AssertionError: empty kv_transfer_params"));
        }
        let ids = match &self.blocks {
            Blocks::Missing => return Err(Fatal::AtOnce("KeyError: remote_block_ids")),
            Blocks::Malformed => return Err(Fatal::AtOnce("TypeError: remote_block_ids")),
            Blocks::Ids(ids) if ids.len() < needed as usize => {
                return Err(Fatal::AtOnce("AssertionError: too few remote_block_ids"));
            }
            Blocks::Ids(ids) => ids.clone(),
        };
        let missing = |name| Fatal::Hang(name);
        Ok(Source {
            engine_id: self
                .engine_id
                .clone()
                .ok_or(missing("KeyError: remote_engine_id"))?,
            request_id: self
                .request_id
                .clone()
                .ok_or(missing("KeyError: remote_request_id"))?,
            host: self.host.clone().ok_or(missing("KeyError: remote_host"))?,
            port: self.port.ok_or(missing("KeyError: remote_port"))?,
            blocks: ids,
        })
    }
}

// === impl Offer ===

impl Offer<'_> {
    /// The answer's `kv_transfer_params`, members in vLLM's order.
    pub(super) fn write(&self) -> String {
        let mut text = String::with_capacity(512);
        let quote = |s: &str| Value::from(s).to_string();
        text.push_str(
            r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[["#,
        );
        for (at, block) in self.blocks.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            // Writing to a String cannot fail.
            let _ = write!(text, "{comma}{block}");
        }
        let _ = write!(
            text,
            r#"]],"remote_engine_id":{},"remote_request_id":{},"remote_host":{},"remote_port":{},"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":{},"remote_blocks_expiry_time":null,"transfer_mode":"pull""#,
            quote(self.engine_id),
            quote(self.request_id),
            quote(self.host),
            self.port,
            self.tokens,
        );
        if self.one_step {
            text.push_str(r#","remote_prefill_cached_tokens":0"#);
        }
        text.push('}');
        text
    }
}
