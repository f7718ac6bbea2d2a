//! The `env.*` imports about an HTTP message: header maps, bodies, resume, local reply, reset.

use wasmtime::{Caller, Linker};

use super::abi::hostcalls;
use super::headers::HeaderMap;
use super::stream::Side;
use super::{Action, Fault, Host, LocalReply, Status, buffers, memory};

type Guest<'a, 'b> = &'a mut Caller<'b, Host>;
type Done = Result<(), Status>;

/// Buffer types of the ABI.
mod buffer {
    pub(super) const REQUEST_BODY: u32 = 0;
    pub(super) const RESPONSE_BODY: u32 = 1;
    pub(super) const CALL_RESPONSE_BODY: u32 = 4;
    pub(super) const VM_CONFIGURATION: u32 = 6;
    pub(super) const PLUGIN_CONFIGURATION: u32 = 7;
    pub(super) const MAX: u32 = 8;
}

/// Map types of the ABI.
mod map {
    pub(super) const REQUEST_HEADERS: u32 = 0;
    pub(super) const RESPONSE_HEADERS: u32 = 2;
    pub(super) const CALL_RESPONSE_HEADERS: u32 = 6;
    pub(super) const CALL_RESPONSE_TRAILERS: u32 = 7;
    pub(super) const MAX: u32 = 7;
}

pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    hostcalls!(linker {
        "proxy_get_buffer_bytes" => get_buffer [kind: u32, start: u32, length: u32, ptr: u32, size: u32];
        "proxy_set_buffer_bytes" => set_buffer [kind: u32, start: u32, length: u32, data: u32, data_len: u32];
        "proxy_get_header_map_pairs" => get_map [kind: u32, ptr: u32, size: u32];
        "proxy_set_header_map_pairs" => set_map [kind: u32, data: u32, len: u32];
        "proxy_get_header_map_value" => get_value [kind: u32, key: u32, len: u32, ptr: u32, size: u32];
        "proxy_remove_header_map_value" => remove_value [kind: u32, key: u32, len: u32];
        "proxy_replace_header_map_value" => replace_value [kind: u32, key: u32, len: u32, value: u32, value_len: u32];
        "proxy_add_header_map_value" => add_value [kind: u32, key: u32, len: u32, value: u32, value_len: u32];
        "proxy_continue_stream" => continue_stream [kind: u32];
        "proxy_close_stream" => close_stream [kind: u32];
        "proxy_send_local_response" => send_local_response [status: u32, details: u32, details_len: u32, body: u32, body_len: u32, headers: u32, headers_len: u32, _grpc: i32];
    });
    Ok(())
}

fn get_buffer(
    guest: Guest<'_, '_>,
    kind: u32,
    start: u32,
    length: u32,
    ptr: u32,
    size: u32,
) -> Done {
    if kind > buffer::MAX {
        return Err(Status::BadArgument);
    }
    let host = guest.data_mut();
    let bytes = match kind {
        buffer::REQUEST_BODY | buffer::RESPONSE_BODY => {
            let side = body_side(kind);
            let body = host.stream().ok_or(Status::NotFound)?.leg(side).visible();
            body.map(|body| buffers::window(body, start, length).to_vec())
                .unwrap_or_default()
        }
        buffer::CALL_RESPONSE_BODY => {
            let reply = reply(host).filter(|reply| !reply.headers.is_empty());
            let reply = reply.ok_or(Status::NotFound)?;
            buffers::window(&reply.body, start, length).to_vec()
        }
        buffer::VM_CONFIGURATION => buffers::window(&host.vm_config, start, length).to_vec(),
        buffer::PLUGIN_CONFIGURATION => {
            let config = host.configuring.as_ref().ok_or(Status::NotFound)?;
            buffers::window(config, start, length).to_vec()
        }
        _ => return Err(Status::NotFound),
    };
    memory::give(guest, ptr, size, &bytes)
}

fn set_buffer(
    guest: Guest<'_, '_>,
    kind: u32,
    start: u32,
    length: u32,
    data: u32,
    data_len: u32,
) -> Done {
    let data = memory::read(guest, data, data_len)?;
    let host = guest.data_mut();
    let first_byte_edit = host.world.borrow().first_byte_edit;
    if kind != buffer::REQUEST_BODY && kind != buffer::RESPONSE_BODY {
        return Err(Status::BadArgument);
    }
    let stream = host.stream().ok_or(Status::BadArgument)?;
    let body = stream
        .leg(body_side(kind))
        .visible()
        .ok_or(Status::BadArgument)?;
    buffers::edit(body, start, length, &data, first_byte_edit)
}

fn body_side(kind: u32) -> Side {
    if kind == buffer::REQUEST_BODY {
        Side::Request
    } else {
        Side::Response
    }
}

fn reply(host: &Host) -> Option<&super::calls::Reply> {
    let root = host.root_of(host.target());
    host.reply
        .as_ref()
        .filter(|(owner, _)| *owner == root)
        .map(|(_, reply)| reply)
}

/// A map the guest may read now; absent ones read as `None`.
fn readable(host: &Host, kind: u32) -> Option<&HeaderMap> {
    let stream = host.streams.get(&host.target());
    match kind {
        map::REQUEST_HEADERS => stream?.headers(Side::Request),
        map::RESPONSE_HEADERS => stream?.headers(Side::Response),
        map::CALL_RESPONSE_HEADERS => reply(host).map(|r| &r.headers).filter(|h| !h.is_empty()),
        map::CALL_RESPONSE_TRAILERS => reply(host).map(|r| &r.trailers).filter(|t| !t.is_empty()),
        _ => None,
    }
}

fn writable(host: &mut Host, kind: u32) -> Result<&mut HeaderMap, Status> {
    let side = match kind {
        map::REQUEST_HEADERS => Side::Request,
        map::RESPONSE_HEADERS => Side::Response,
        _ => return Err(Status::BadArgument),
    };
    host.stream()
        .and_then(|stream| stream.headers_mut(side))
        .ok_or(Status::BadArgument)
}

fn get_map(guest: Guest<'_, '_>, kind: u32, ptr: u32, size: u32) -> Done {
    if kind > map::MAX {
        return Err(Status::BadArgument);
    }
    // An absent map reads as empty here, while a single value of it is a bad argument.
    let bytes = readable(guest.data(), kind)
        .map(HeaderMap::encode)
        .unwrap_or_default();
    memory::give(guest, ptr, size, &bytes)
}

fn set_map(guest: Guest<'_, '_>, kind: u32, data: u32, len: u32) -> Done {
    let pairs = HeaderMap::decode(&memory::read(guest, data, len)?);
    *writable(guest.data_mut(), kind)? = pairs;
    Ok(())
}

fn get_value(guest: Guest<'_, '_>, kind: u32, key: u32, len: u32, ptr: u32, size: u32) -> Done {
    let key = memory::read_text(guest, key, len)?;
    let host = guest.data();
    let value = match readable(host, kind) {
        Some(map) => map.get(&key).map(<[u8]>::to_vec).ok_or(Status::NotFound)?,
        None if host.streams.get(&host.target()).is_some_and(|s| s.logging) => {
            return Err(Status::NotFound);
        }
        None => return Err(Status::BadArgument),
    };
    memory::give(guest, ptr, size, &value)
}

fn remove_value(guest: Guest<'_, '_>, kind: u32, key: u32, len: u32) -> Done {
    let key = memory::read_text(guest, key, len)?;
    writable(guest.data_mut(), kind)?.remove(&key);
    Ok(())
}

fn replace_value(
    guest: Guest<'_, '_>,
    kind: u32,
    key: u32,
    len: u32,
    value: u32,
    value_len: u32,
) -> Done {
    let key = memory::read_text(guest, key, len)?;
    let value = memory::read(guest, value, value_len)?;
    writable(guest.data_mut(), kind)?.set(&key, &value);
    Ok(())
}

fn add_value(
    guest: Guest<'_, '_>,
    kind: u32,
    key: u32,
    len: u32,
    value: u32,
    value_len: u32,
) -> Done {
    let key = memory::read_text(guest, key, len)?;
    let value = memory::read(guest, value, value_len)?;
    writable(guest.data_mut(), kind)?.add(&key, &value);
    Ok(())
}

/// Side named by the ABI's stream type; TCP types have no stream here.
fn side_of(kind: u32) -> Result<Side, Status> {
    match kind {
        0 => Ok(Side::Request),
        1 => Ok(Side::Response),
        _ => Err(Status::BadArgument),
    }
}

fn continue_stream(guest: Guest<'_, '_>, kind: u32) -> Done {
    let side = side_of(kind)?;
    let host = guest.data_mut();
    let target = host.target();
    let Some(stream) = host.streams.get_mut(&target) else {
        host.fault(Fault::NoStream {
            call: "proxy_continue_stream",
        });
        return Ok(());
    };
    // Envoy forgets the request at once, whichever side is resumed.
    stream.request.headers_visible = false;
    host.acts.entry(target).or_default().1 += 1;
    host.actions.push_back(Action::Resume(target, side));
    Ok(())
}

fn close_stream(guest: Guest<'_, '_>, kind: u32) -> Done {
    side_of(kind)?;
    let host = guest.data_mut();
    let target = host.target();
    let Some(stream) = host.streams.get_mut(&target) else {
        host.fault(Fault::NoStream {
            call: "proxy_close_stream",
        });
        return Ok(());
    };
    stream
        .seen
        .borrow_mut()
        .code_details
        .get_or_insert_with(|| "wasm_close_stream".into());
    host.actions.push_back(Action::Reset(target));
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "the ABI's signature")]
fn send_local_response(
    guest: Guest<'_, '_>,
    status: u32,
    details: u32,
    details_len: u32,
    body: u32,
    body_len: u32,
    headers: u32,
    headers_len: u32,
    _grpc: i32,
) -> Done {
    let details = memory::read_text(guest, details, details_len)?;
    let body = memory::read(guest, body, body_len)?;
    let headers = HeaderMap::decode(&memory::read(guest, headers, headers_len)?);
    let host = guest.data_mut();
    host.stop = true;
    let target = host.target();
    if !host.streams.contains_key(&target) {
        host.fault(Fault::NoStream {
            call: "proxy_send_local_response",
        });
        return Ok(());
    }
    host.acts.entry(target).or_default().0 += 1;
    host.actions.push_back(Action::Reply(
        target,
        LocalReply {
            status,
            headers,
            body,
            details,
        },
    ));
    Ok(())
}
