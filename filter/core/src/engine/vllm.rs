//! vLLM: what the prefill copy of a request looks like, and what of the prefill reply the decode
//! leg is given.
//!
//! A decode engine that is given wrong hand-over fields answers with other text or dies, so a
//! reply is passed on as it came, or not at all.

use super::hand_over::{HandOver, Unusable};
use super::limits;
use crate::request::cursor::{Cursor, JsonError};
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
        KvConnector::Shfs => match params.map(|raw| reachable(raw, prefill_ip)) {
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

/// The reply as an object, and its `kv_transfer_params`.
fn top_level(reply: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    simdutf8::basic::from_utf8(reply).ok()?;
    let mut cursor = Cursor::new(reply);
    let start = cursor.at();
    let mut params = None;
    let key_name = Member::KvTransferParams.name().as_bytes();
    cursor
        .object::<JsonError>(0, |cursor, key| {
            let value = cursor.value(1)?;
            if cursor.slice(key.inner()) == key_name {
                params = Some(value);
            }
            Ok(())
        })
        .ok()?;
    let object = start..cursor.at();
    cursor.end().ok()?;
    Some((reply.get(object)?, params.and_then(|span| reply.get(span))))
}

/// Values of the hand-over that are looked at.
#[derive(Default)]
struct Fields {
    do_remote_prefill: Option<Range<usize>>,
    remote_block_ids: Option<Range<usize>>,
    remote_engine_id: Option<Range<usize>>,
    remote_request_id: Option<Range<usize>>,
    remote_host: Option<Range<usize>>,
    remote_port: Option<Range<usize>>,
}

impl Fields {
    fn read(params: &[u8]) -> Result<Self, Unusable> {
        let mut fields = Self::default();
        let mut repeated = false;
        Cursor::new(params)
            .object::<JsonError>(0, |cursor, key| {
                let value = cursor.value(1)?;
                let field = match cursor.slice(key.inner()) {
                    b"do_remote_prefill" => &mut fields.do_remote_prefill,
                    b"remote_block_ids" => &mut fields.remote_block_ids,
                    b"remote_engine_id" => &mut fields.remote_engine_id,
                    b"remote_request_id" => &mut fields.remote_request_id,
                    b"remote_host" => &mut fields.remote_host,
                    b"remote_port" => &mut fields.remote_port,
                    _ => return Ok(()),
                };
                repeated |= field.replace(value).is_some();
                Ok(())
            })
            .map_err(|_| Unusable::NotAnObject)?;
        if repeated {
            Err(Unusable::Repeated)
        } else {
            Ok(fields)
        }
    }
}

/// `kv_transfer_params` with a host that the decode pod can reach, every other byte as it came.
fn reachable<'r>(params: &'r [u8], prefill_ip: &str) -> Result<Cow<'r, [u8]>, Unusable> {
    match params.first() {
        Some(b'{') => {}
        Some(b'n') | None => return Err(Unusable::Missing),
        Some(_) => return Err(Unusable::NotAnObject),
    }
    let fields = Fields::read(params)?;
    let raw = |span: &Option<Range<usize>>| span.clone().and_then(|span| params.get(span));
    if raw(&fields.do_remote_prefill) != Some(b"true") {
        return Err(Unusable::NotRemote);
    }
    let request_id = raw(&fields.remote_request_id);
    // An engine that sends no request id is old enough to mean a flat list; a newer decode
    // engine dies of one.
    let named = match raw(&fields.remote_block_ids).and_then(block_ids) {
        Some(BlockIds::Groups) => true,
        Some(BlockIds::Flat) => request_id.is_none(),
        None => false,
    };
    if !named {
        return Err(Unusable::BlockIds);
    }
    if !raw(&fields.remote_engine_id).is_some_and(is_name) {
        return Err(Unusable::EngineId);
    }
    if !request_id.is_none_or(is_name) {
        return Err(Unusable::RequestId);
    }
    if !raw(&fields.remote_port).is_some_and(is_port) {
        return Err(Unusable::Port);
    }
    let keep = match raw(&fields.remote_host) {
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
    let (span, text) = match fields.remote_host {
        Some(span) => (span, ip),
        // The object has members, so a comma follows.
        None => (1..1, format!(r#""remote_host":{ip},"#)),
    };
    let before = params.get(..span.start).unwrap_or_default();
    let after = params.get(span.end..).unwrap_or_default();
    Ok(Cow::Owned([before, text.as_bytes(), after].concat()))
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

enum BlockIds {
    /// One list per KV cache group.
    Groups,
    /// One list, of engines that know one group only.
    Flat,
}

/// The form of a list of block ids; `None` when it names none, or mixes forms.
fn block_ids(raw: &[u8]) -> Option<BlockIds> {
    let mut cursor = Cursor::new(raw);
    let (mut flat, mut groups) = (false, false);
    cursor
        .array(0, |cursor| {
            if cursor.peek() == Some(b'[') {
                groups = true;
                let mut blocks = false;
                cursor.array(1, |cursor| {
                    blocks = true;
                    whole_number(cursor, 2)
                })?;
                if blocks {
                    Ok(())
                } else {
                    Err(cursor.error("expected a block"))
                }
            } else {
                flat = true;
                whole_number(cursor, 1)
            }
        })
        .ok()?;
    match (flat, groups) {
        (true, false) => Some(BlockIds::Flat),
        (false, true) => Some(BlockIds::Groups),
        _ => None,
    }
}

fn whole_number(cursor: &mut Cursor<'_>, depth: u32) -> Result<(), JsonError> {
    let span = cursor.value(depth)?;
    if cursor.slice(span).iter().all(u8::is_ascii_digit) {
        Ok(())
    } else {
        Err(cursor.error("expected a whole number"))
    }
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
