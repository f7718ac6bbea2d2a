//! The `env.*` imports that are not about an HTTP message: logs, time, properties, shared data,
//! queues, calls, metrics, contexts.

use wasmtime::{Caller, Linker};

use super::calls::{CallId, CallRecord, CallState};
use super::clock::NANOS_PER_MS;
use super::headers::HeaderMap;
use super::{Action, Host, LogLevel, Status, http, memory, properties};

type Guest<'a, 'b> = &'a mut Caller<'b, Host>;
type Done = Result<(), Status>;

/// Registers functions that return an ABI status.
macro_rules! hostcalls {
    ($linker:ident { $($name:literal => $function:path [$($arg:ident: $ty:ty),*];)* }) => {
        $($linker.func_wrap(
            "env",
            $name,
            |mut caller: wasmtime::Caller<'_, $crate::host::Host>, $($arg: $ty),*| -> u32 {
                $function(&mut caller, $($arg),*).map_or_else(|status| status as u32, |()| 0)
            },
        )?;)*
    };
}
pub(crate) use hostcalls;

/// Defines every `env.*` function of ABI 0.2.1 that the Rust SDK declares.
pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    hostcalls!(linker {
        "proxy_log" => log [level: u32, ptr: u32, len: u32];
        "proxy_get_log_level" => get_log_level [out: u32];
        "proxy_get_current_time_nanoseconds" => get_current_time [out: u32];
        "proxy_set_tick_period_milliseconds" => set_tick_period [period: u32];
        "proxy_get_property" => get_property [path: u32, len: u32, ptr: u32, size: u32];
        "proxy_set_property" => set_property [path: u32, len: u32, value: u32, value_len: u32];
        "proxy_get_shared_data" => get_shared_data [key: u32, len: u32, ptr: u32, size: u32, cas: u32];
        "proxy_set_shared_data" => set_shared_data [key: u32, len: u32, value: u32, value_len: u32, cas: u32];
        "proxy_register_shared_queue" => register_queue [name: u32, len: u32, out: u32];
        "proxy_resolve_shared_queue" => resolve_queue [vm: u32, vm_len: u32, name: u32, len: u32, out: u32];
        "proxy_dequeue_shared_queue" => dequeue [token: u32, ptr: u32, size: u32];
        "proxy_enqueue_shared_queue" => enqueue [token: u32, value: u32, len: u32];
        "proxy_http_call" => http_call [cluster: u32, cluster_len: u32, headers: u32, headers_len: u32, body: u32, body_len: u32, trailers: u32, trailers_len: u32, timeout: u32, out: u32];
        "proxy_grpc_call" => grpc_call [_cluster: u32, _cluster_len: u32, _service: u32, _service_len: u32, _method: u32, _method_len: u32, _metadata: u32, _metadata_len: u32, _message: u32, _message_len: u32, _timeout: u32, _out: u32];
        "proxy_grpc_stream" => grpc_stream [_cluster: u32, _cluster_len: u32, _service: u32, _service_len: u32, _method: u32, _method_len: u32, _metadata: u32, _metadata_len: u32, _out: u32];
        "proxy_grpc_send" => grpc_send [_token: u32, _message: u32, _len: u32, _end: u32];
        "proxy_grpc_cancel" => no_grpc [_token: u32];
        "proxy_grpc_close" => no_grpc [_token: u32];
        "proxy_get_status" => get_status [code: u32, ptr: u32, size: u32];
        "proxy_set_effective_context" => set_effective_context [context: u32];
        "proxy_call_foreign_function" => no_foreign_function [_name: u32, _len: u32, _args: u32, _args_len: u32, _ptr: u32, _size: u32];
        "proxy_done" => done [];
        "proxy_define_metric" => define_metric [kind: u32, name: u32, len: u32, out: u32];
        "proxy_get_metric" => get_metric [id: u32, out: u32];
        "proxy_record_metric" => record_metric [id: u32, value: u64];
        "proxy_increment_metric" => increment_metric [id: u32, by: i64];
    });
    http::link(linker)
}

fn log(guest: Guest<'_, '_>, level: u32, ptr: u32, len: u32) -> Done {
    let text = memory::read_text(guest, ptr, len)?;
    guest.data().log(LogLevel::from_abi(level), text);
    Ok(())
}

fn get_log_level(guest: Guest<'_, '_>, out: u32) -> Done {
    let level = guest.data().world.borrow().log_level as u32;
    memory::write_u32(guest, out, level)
}

fn get_current_time(guest: Guest<'_, '_>, out: u32) -> Done {
    let wall = guest.data().world.borrow().clock.wall;
    memory::write(guest, out, &wall.to_le_bytes())
}

fn set_tick_period(guest: Guest<'_, '_>, period: u32) -> Done {
    let host = guest.data_mut();
    let now = host.world.borrow().clock.monotonic;
    let root = host.root_of(host.target());
    let root = host.roots.get_mut(&root).ok_or(Status::BadArgument)?;
    root.period_ms = period;
    root.next_tick = (period > 0).then(|| now + u64::from(period) * NANOS_PER_MS);
    Ok(())
}

fn get_property(guest: Guest<'_, '_>, path: u32, len: u32, ptr: u32, size: u32) -> Done {
    let path = properties::dotted(&memory::read(guest, path, len)?);
    let host = guest.data();
    let stream = host.streams.get(&host.target());
    let value = stream
        .and_then(|s| s.properties.get(&path).cloned())
        .or_else(|| stream.and_then(|s| properties::computed(s, &path)))
        .or_else(|| stream.and_then(|s| s.seen.borrow().filter_state.get(&path).cloned()))
        .or_else(|| (path == "plugin_vm_id").then(|| host.vm_id.clone().into_bytes()))
        .or_else(|| {
            let known = stream.is_some() || properties::without_stream(&path);
            known
                .then(|| host.world.borrow().properties.get(&path).cloned())
                .flatten()
        })
        .ok_or(Status::NotFound)?;
    memory::give(guest, ptr, size, &value)
}

fn set_property(guest: Guest<'_, '_>, path: u32, len: u32, value: u32, value_len: u32) -> Done {
    let path = properties::dotted(&memory::read(guest, path, len)?);
    let value = memory::read(guest, value, value_len)?;
    let stream = guest.data_mut().stream().ok_or(Status::NotFound)?;
    stream.seen.borrow_mut().filter_state.insert(path, value);
    Ok(())
}

fn get_shared_data(
    guest: Guest<'_, '_>,
    key: u32,
    len: u32,
    ptr: u32,
    size: u32,
    cas: u32,
) -> Done {
    let key = memory::read_text(guest, key, len)?;
    let host = guest.data();
    let world = host.world.borrow();
    let mut shared = world.shared.lock();
    shared.counts.gets += 1;
    let found = shared.get(&host.vm_id, &key);
    let crowded = shared.crowded;
    drop(shared);
    drop(world);
    if crowded {
        std::thread::yield_now();
    }
    let (value, number) = found?;
    memory::give(guest, ptr, size, &value)?;
    memory::write_u32(guest, cas, number)
}

fn set_shared_data(
    guest: Guest<'_, '_>,
    key: u32,
    len: u32,
    value: u32,
    value_len: u32,
    cas: u32,
) -> Done {
    let key = memory::read_text(guest, key, len)?;
    let value = memory::read(guest, value, value_len)?;
    let host = guest.data();
    host.world
        .borrow()
        .shared
        .lock()
        .set_raced(&host.vm_id, &key, &value, cas)
}

fn register_queue(guest: Guest<'_, '_>, name: u32, len: u32, out: u32) -> Done {
    let name = memory::read_text(guest, name, len)?;
    let host = guest.data();
    let root = host.root_of(host.target());
    let token = host
        .world
        .borrow_mut()
        .queues
        .register(&host.vm_id, &name, host.vm, root);
    memory::write_u32(guest, out, token)
}

fn resolve_queue(
    guest: Guest<'_, '_>,
    vm: u32,
    vm_len: u32,
    name: u32,
    len: u32,
    out: u32,
) -> Done {
    let vm_id = memory::read_text(guest, vm, vm_len)?;
    let name = memory::read_text(guest, name, len)?;
    let host = guest.data();
    let vm_id = if vm_id.is_empty() {
        &host.vm_id
    } else {
        &vm_id
    };
    let token = host.world.borrow().queues.resolve(vm_id, &name)?;
    memory::write_u32(guest, out, token)
}

fn dequeue(guest: Guest<'_, '_>, token: u32, ptr: u32, size: u32) -> Done {
    let value = guest.data().world.borrow_mut().queues.dequeue(token)?;
    memory::give(guest, ptr, size, &value)
}

fn enqueue(guest: Guest<'_, '_>, token: u32, value: u32, len: u32) -> Done {
    let value = memory::read(guest, value, len)?;
    guest.data().world.borrow_mut().queues.enqueue(token, value)
}

#[allow(clippy::too_many_arguments, reason = "the ABI's signature")]
fn http_call(
    guest: Guest<'_, '_>,
    cluster: u32,
    cluster_len: u32,
    headers: u32,
    headers_len: u32,
    body: u32,
    body_len: u32,
    _trailers: u32,
    _trailers_len: u32,
    timeout_ms: u32,
    out: u32,
) -> Done {
    let cluster = memory::read_text(guest, cluster, cluster_len)?;
    let headers = HeaderMap::decode(&memory::read(guest, headers, headers_len)?);
    let body = memory::read(guest, body, body_len)?;
    let host = guest.data_mut();
    let root = host.root_of(host.target());
    let token = host.last_token + 1;
    let mut world = host.world.borrow_mut();
    if world
        .clusters
        .as_ref()
        .is_some_and(|known| !known.contains(&cluster))
    {
        return Err(Status::BadArgument);
    }
    let at_ms = world.clock.elapsed_ms();
    world.calls.dispatch(CallRecord {
        id: CallId(0),
        vm: host.vm,
        root,
        token,
        cluster,
        headers,
        body,
        timeout_ms,
        at_ms,
        state: CallState::Pending,
    })?;
    drop(world);
    host.last_token = token;
    memory::write_u32(guest, out, token)
}

/// No gRPC service is configured: what Envoy says of an unknown cluster.
#[allow(clippy::too_many_arguments, reason = "the ABI's signature")]
fn grpc_call(
    _: Guest<'_, '_>,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
) -> Done {
    Err(Status::ParseFailure)
}

#[allow(clippy::too_many_arguments, reason = "the ABI's signature")]
fn grpc_stream(
    _: Guest<'_, '_>,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
    _: u32,
) -> Done {
    Err(Status::ParseFailure)
}

fn grpc_send(_: Guest<'_, '_>, _: u32, _: u32, _: u32, _: u32) -> Done {
    Err(Status::NotFound)
}

fn no_grpc(_: Guest<'_, '_>, _: u32) -> Done {
    Err(Status::NotFound)
}

fn no_foreign_function(_: Guest<'_, '_>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32) -> Done {
    Err(Status::NotFound)
}

/// Why the call in delivery failed: `BrokenConnection` and "reset" for the failure shape.
fn get_status(guest: Guest<'_, '_>, code: u32, ptr: u32, size: u32) -> Done {
    let failed = guest
        .data()
        .reply
        .as_ref()
        .is_some_and(|(_, reply)| reply.headers.is_empty());
    let (number, text) = if failed { (11, "reset") } else { (0, "") };
    memory::write_u32(guest, code, number)?;
    memory::give(guest, ptr, size, text.as_bytes())
}

fn set_effective_context(guest: Guest<'_, '_>, context: u32) -> Done {
    let host = guest.data_mut();
    if !host.knows(context) {
        return Err(Status::BadArgument);
    }
    host.effective = context;
    Ok(())
}

fn done(guest: Guest<'_, '_>) -> Done {
    let host = guest.data_mut();
    let root = host.root_of(host.target());
    let waiting = host.roots.get(&root).is_some_and(|root| root.pending_done);
    if !waiting {
        return Err(Status::NotFound);
    }
    host.actions.push_back(Action::RootDone(root));
    Ok(())
}

fn define_metric(guest: Guest<'_, '_>, kind: u32, name: u32, len: u32, out: u32) -> Done {
    let name = memory::read_text(guest, name, len)?;
    let host = guest.data_mut();
    let (kind, id) = host.metrics.define(kind, name.clone())?;
    host.world.borrow_mut().meters.define(kind, &name);
    memory::write_u32(guest, out, id)
}

fn get_metric(guest: Guest<'_, '_>, id: u32, out: u32) -> Done {
    let host = guest.data();
    let (kind, name) = host.metrics.find(id)?;
    let value = host.world.borrow().meters.get(kind, name)?;
    memory::write(guest, out, &value.to_le_bytes())
}

fn record_metric(guest: Guest<'_, '_>, id: u32, value: u64) -> Done {
    let host = guest.data();
    let (kind, name) = host.metrics.find(id)?;
    host.world.borrow_mut().meters.record(kind, name, value);
    Ok(())
}

fn increment_metric(guest: Guest<'_, '_>, id: u32, by: i64) -> Done {
    let host = guest.data();
    let (kind, name) = host.metrics.find(id)?;
    host.world.borrow_mut().meters.increment(kind, name, by)
}
