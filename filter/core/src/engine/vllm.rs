//! vLLM: what the prefill copy of a request looks like, and what of the prefill reply the decode
//! leg is given.
//!
//! A decode engine that is given wrong hand-over fields answers with other text or dies, so a
//! reply is passed on as it came, or not at all.

use super::hand_over::{HandOver, Unusable};
use super::limits;
use crate::request::cursor::{Cursor, JsonError, Text};
use crate::request::patch::Edit;
use crate::request::{Endpoint, Member, Scan};
use pd_wire::knobs::KvConnector;
use std::borrow::Cow;
use std::net::IpAddr;
use std::ops::Range;

/// What asks a prefill engine to keep its KV for another one.
const KEEP_KV: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// Why no legs can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VllmError {
    /// MooncakeConnector needs a side channel between router and engines.
    #[error(
        "the KV connector `mooncake` is not supported: label the pods \
         `model.aibrix.ai/kv-connector-type: shfs` (NixlConnector) or `nixl` (Neuron)"
    )]
    MooncakeUnsupported,
}

/// What turns a client's body into that of the prefill leg: one token, no stream, nothing that
/// costs or that a capped request is refused for.
///
/// # Errors
/// [`VllmError::MooncakeUnsupported`].
pub fn prefill_edits(
    endpoint: Endpoint,
    scan: &Scan,
    connector: KvConnector,
) -> Result<Vec<Edit<'static>>, VllmError> {
    let mut edits = match connector {
        KvConnector::Shfs => vec![Edit::Set(Member::KvTransferParams, Cow::Borrowed(KEEP_KV))],
        KvConnector::Nixl => Vec::new(),
        KvConnector::Mooncake => return Err(VllmError::MooncakeUnsupported),
    };
    let caps: &[Member] = match endpoint {
        Endpoint::Chat => &[Member::MaxTokens, Member::MaxCompletionTokens],
        Endpoint::Completions | Endpoint::Messages => &[Member::MaxTokens],
        Endpoint::Responses => &[Member::MaxOutputTokens],
        Endpoint::Other => &[],
    };
    limits::one_token(scan, caps, &mut edits);
    Ok(edits)
}

/// Reads a prefill reply (status 200).
///
/// `prefill_ip` is the address of the prefill pod, without port and brackets. It stands in for a
/// `remote_host` that only the prefill pod itself can reach; anything else is passed on as it
/// came. With [`KvConnector::Mooncake`] nothing is.
pub fn hand_over(reply: &[u8], connector: KvConnector, prefill_ip: &str) -> HandOver {
    let Some((object, params)) = top_level(reply) else {
        return HandOver::NotAnObject;
    };
    let (member, value) = match connector {
        KvConnector::Shfs => match params.map(|params| params.reachable(reply, prefill_ip)) {
            Some(Ok(value)) => (Member::KvTransferParams, value),
            Some(Err(reason)) => return HandOver::Unusable(reason),
            None => return HandOver::Unusable(Unusable::Missing),
        },
        KvConnector::Nixl => (Member::DisaggPrefillResp, Cow::Borrowed(object)),
        KvConnector::Mooncake => return HandOver::Unusable(Unusable::Missing),
    };
    HandOver::Members([b"\"", member.name().as_bytes(), b"\":", &value].concat())
}

/// A request that the serving layer of a decode engine refuses, whereupon it tells the prefill
/// engine to free the KV that `members` (of [`HandOver::Members`]) names.
///
/// It passes the schema: an engine that refuses a body by schema does not look at the hand-over.
pub fn release_body(model: &str, members: &[u8], endpoint: Endpoint) -> Vec<u8> {
    let rest = match endpoint {
        Endpoint::Chat | Endpoint::Messages => {
            r#""messages":[{"role":"user","content":"-"}],"max_tokens":1"#
        }
        Endpoint::Responses => r#""input":"-","max_output_tokens":1"#,
        Endpoint::Completions | Endpoint::Other => r#""prompt":"-","max_tokens":1"#,
    };
    let model = serde_json::Value::from(model);
    let head = format!(r#"{{"model":{model},{rest},"temperature":-1,"#);
    [head.as_bytes(), members, b"}"].concat()
}

/// The reply as an object, and its `kv_transfer_params`. One walk over the text: it is on the way
/// of every request.
fn top_level(reply: &[u8]) -> Option<(&[u8], Option<Params>)> {
    simdutf8::basic::from_utf8(reply).ok()?;
    let mut cursor = Cursor::new(reply);
    let start = cursor.at();
    let mut params = None;
    let key_name = Member::KvTransferParams.name().as_bytes();
    cursor
        .object::<JsonError>(0, |cursor, key| {
            if cursor.slice(key.inner()) == key_name {
                params = Some(Params::read(cursor)?);
            } else {
                cursor.value(1)?;
            }
            Ok(())
        })
        .ok()?;
    let object = start..cursor.at();
    cursor.end().ok()?;
    Some((reply.get(object)?, params))
}

/// `kv_transfer_params`, and where in the reply its values stand that are looked at.
struct Params {
    span: Range<usize>,
    repeated: bool,
    do_remote_prefill: Option<Range<usize>>,
    remote_block_ids: Option<BlockIds>,
    remote_engine_id: Option<Range<usize>>,
    remote_request_id: Option<Range<usize>>,
    remote_host: Option<Range<usize>>,
    remote_port: Option<Range<usize>>,
}

// === impl Params ===

impl Params {
    /// Walks over the value that begins here, whatever it is.
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, JsonError> {
        let start = cursor.at();
        let mut params = Self {
            span: start..start,
            repeated: false,
            do_remote_prefill: None,
            remote_block_ids: None,
            remote_engine_id: None,
            remote_request_id: None,
            remote_host: None,
            remote_port: None,
        };
        if cursor.peek() == Some(b'{') {
            cursor.object(1, |cursor, key| params.member(cursor, &key))?;
        } else {
            cursor.value(1)?;
        }
        params.span.end = cursor.at();
        Ok(params)
    }

    fn member(&mut self, cursor: &mut Cursor<'_>, key: &Text) -> Result<(), JsonError> {
        const VALUE: u32 = 2;
        let field = match cursor.slice(key.inner()) {
            b"do_remote_prefill" => &mut self.do_remote_prefill,
            b"remote_block_ids" => {
                let blocks = block_ids(cursor, VALUE)?;
                self.repeated |= self.remote_block_ids.replace(blocks).is_some();
                return Ok(());
            }
            b"remote_engine_id" => &mut self.remote_engine_id,
            b"remote_request_id" => &mut self.remote_request_id,
            b"remote_host" => &mut self.remote_host,
            b"remote_port" => &mut self.remote_port,
            _ => {
                cursor.value(VALUE)?;
                return Ok(());
            }
        };
        self.repeated |= field.replace(cursor.value(VALUE)?).is_some();
        Ok(())
    }

    /// The text with a host that the decode pod can reach, every other byte as it came.
    fn reachable<'r>(&self, reply: &'r [u8], prefill_ip: &str) -> Result<Cow<'r, [u8]>, Unusable> {
        let params = reply.get(self.span.clone()).unwrap_or_default();
        match params.first() {
            Some(b'{') => {}
            Some(b'n') | None => return Err(Unusable::Missing),
            Some(_) => return Err(Unusable::NotAnObject),
        }
        if self.repeated {
            return Err(Unusable::Repeated);
        }
        let raw = |span: &Option<Range<usize>>| span.clone().and_then(|span| reply.get(span));
        if raw(&self.do_remote_prefill) != Some(b"true") {
            return Err(Unusable::NotRemote);
        }
        let request_id = raw(&self.remote_request_id);
        // An engine that sends no request id is old enough to mean a flat list; a newer decode
        // engine dies of one.
        let named = match self.remote_block_ids {
            Some(BlockIds::Groups) => true,
            Some(BlockIds::Flat) => request_id.is_none(),
            Some(BlockIds::None) | None => false,
        };
        if !named {
            return Err(Unusable::BlockIds);
        }
        if !raw(&self.remote_engine_id).is_some_and(is_name) {
            return Err(Unusable::EngineId);
        }
        if !request_id.is_none_or(is_name) {
            return Err(Unusable::RequestId);
        }
        if !raw(&self.remote_port).is_some_and(is_port) {
            return Err(Unusable::Port);
        }
        let keep = match raw(&self.remote_host) {
            None | Some(b"null") => false,
            Some(text) => {
                let host: String = serde_json::from_slice(text).map_err(|_| Unusable::Host)?;
                is_reachable(&host, prefill_ip)
            }
        };
        if keep {
            return Ok(Cow::Borrowed(params));
        }
        let ip = serde_json::Value::from(prefill_ip).to_string();
        let (place, text) = match &self.remote_host {
            Some(place) => (place.clone(), ip),
            // The object has members, so a comma follows.
            None => {
                let first = self.span.start.saturating_add(1);
                (first..first, format!(r#""remote_host":{ip},"#))
            }
        };
        let before = reply.get(self.span.start..place.start).unwrap_or_default();
        let after = reply.get(place.end..self.span.end).unwrap_or_default();
        Ok(Cow::Owned([before, text.as_bytes(), after].concat()))
    }
}

/// True when another pod can use `host`, as far as its text tells.
fn is_reachable(host: &str, prefill_ip: &str) -> bool {
    let address = |text: &str| match text {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        _ => text.parse().ok().map(|ip: IpAddr| ip.to_canonical()),
    };
    let is_loopback = |text: &str| address(text).is_some_and(|ip| ip.is_loopback());
    match address(host) {
        None => !host.is_empty(),
        Some(ip) => !ip.is_unspecified() && (!ip.is_loopback() || is_loopback(prefill_ip)),
    }
}

/// The form of a list of block ids.
enum BlockIds {
    /// One list per KV cache group.
    Groups,
    /// One list, of engines that know one group only.
    Flat,
    /// It names none, or mixes forms.
    None,
}

/// Walks over a list of block ids, or what stands in its place.
fn block_ids(cursor: &mut Cursor<'_>, depth: u32) -> Result<BlockIds, JsonError> {
    if cursor.peek() != Some(b'[') {
        cursor.value(depth)?;
        return Ok(BlockIds::None);
    }
    let inner = depth.saturating_add(1);
    let (mut flat, mut groups, mut sound) = (false, false, true);
    cursor.array::<JsonError>(depth, |cursor| {
        if cursor.peek() != Some(b'[') {
            flat = true;
            sound &= whole_numbers(cursor, inner)?;
            return Ok(());
        }
        groups = true;
        let mut blocks = false;
        cursor.array::<JsonError>(inner, |cursor| {
            blocks = true;
            sound &= whole_numbers(cursor, inner.saturating_add(1))?;
            Ok(())
        })?;
        sound &= blocks;
        Ok(())
    })?;
    Ok(match (sound, flat, groups) {
        (true, true, false) => BlockIds::Flat,
        (true, false, true) => BlockIds::Groups,
        _ => BlockIds::None,
    })
}

/// Walks over one or more elements of a list; false when the last is no whole number, as those
/// before it are.
fn whole_numbers(cursor: &mut Cursor<'_>, depth: u32) -> Result<bool, JsonError> {
    cursor.integers();
    let span = cursor.value(depth)?;
    Ok(cursor.slice(span).iter().all(u8::is_ascii_digit))
}

/// A non-empty string.
fn is_name(raw: &[u8]) -> bool {
    raw.len() > 2 && raw.first() == Some(&b'"')
}

fn is_port(raw: &[u8]) -> bool {
    str::from_utf8(raw)
        .ok()
        .and_then(|text| text.parse::<u16>().ok())
        .is_some_and(|port| port > 0)
}

#[cfg(test)]
mod tests;
