//! Beginnings and endings of streams: creation, local replies, resets, the final callbacks, and
//! the loss of a VM.

use std::cell::RefCell;
use std::rc::Rc;

use crate::host::headers::HeaderMap;
use crate::host::stream::{Ending, Seen, Side, Stream};
use crate::host::{LocalReply, World};
use crate::vm::Vm;

/// Details Envoy gives the 503 of a stream whose VM is gone.
pub(crate) const FAIL_STREAM: &str = "wasm_fail_stream";

impl Vm {
    /// Creates a stream context under `root`; the caller fills in what the client sent.
    pub(crate) fn open_stream(&mut self, stream: Stream) -> u32 {
        let id = self.next_context();
        let root = stream.root;
        self.host().streams.insert(id, stream);
        self.create_context(id, root);
        id
    }

    /// Headers of the upstream's response arrive.
    pub(crate) fn upstream_headers(
        &mut self,
        id: u32,
        headers: HeaderMap,
        details: &str,
        end: bool,
    ) {
        if self.lost {
            return self.fail_stream(id);
        }
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if stream.replied || stream.response_headers.is_some() {
            return;
        }
        stream.response_headers = Some(headers);
        stream.seen.borrow_mut().code_details = Some(details.to_owned());
        stream.seen.borrow_mut().upstream_finished = end;
        self.headers(Side::Response, id, end);
    }

    /// Body bytes of the upstream's response arrive.
    pub(crate) fn upstream_data(&mut self, id: u32, bytes: &[u8], end: bool) {
        if self.lost {
            return self.fail_stream(id);
        }
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if stream.replied || stream.response_headers.is_none() {
            return;
        }
        stream.seen.borrow_mut().upstream_finished |= end;
        self.data(Side::Response, id, bytes, end);
    }

    /// A response of the proxy's own (`FilterManager::sendLocalReply`): through the filter when no
    /// response has begun, straight to the client when its headers are still held, and a reset once
    /// they went out.
    pub(crate) fn local_reply(&mut self, id: u32, reply: LocalReply) {
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if stream.finishing {
            return;
        }
        stream.replied = true;
        stream.seen.borrow_mut().code_details = Some(reply.details.clone());
        let headers = reply.header_map();
        if stream.response_headers.is_none() {
            stream.response_headers = Some(headers);
            self.headers(Side::Response, id, reply.body.is_empty());
            if !reply.body.is_empty() {
                self.data(Side::Response, id, &reply.body, true);
            }
        } else if !stream.response.headers_passed {
            stream.response_headers = Some(headers.clone());
            let seen = Rc::clone(&stream.seen);
            answer_directly(&self.host().world.borrow(), &seen, headers, reply.body);
            self.finish(id, Ending::Complete);
        } else {
            self.finish(id, Ending::Reset);
        }
    }

    /// Cuts a stream.
    pub(crate) fn reset(&mut self, id: u32) {
        self.finish(id, Ending::Reset);
    }

    /// The client went away.
    pub(crate) fn disconnect(&mut self, id: u32) {
        let host = self.host();
        if let Some(stream) = host.orphans.remove(&id) {
            close(&host.world.borrow(), &stream.seen, Ending::Disconnected);
        }
        if let Some(stream) = self.host().streams.get(&id) {
            stream.seen.borrow_mut().code_details = Some("downstream_remote_disconnect".into());
        }
        self.finish(id, Ending::Disconnected);
    }

    /// Ends a stream: access log, `on_done`, `on_delete`, in Envoy's order.
    pub(crate) fn finish(&mut self, id: u32, ending: Ending) {
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if stream.finishing {
            return;
        }
        stream.finishing = true;
        stream.logging = true;
        let seen = Rc::clone(&stream.seen);
        close(&self.host().world.borrow(), &seen, ending);
        self.note(id, "log");
        self.enter(id, self.exports.log.clone(), id);
        self.run_actions();
        if let Some(stream) = self.host().streams.get_mut(&id) {
            stream.logging = false;
        }
        self.note(id, "done");
        self.enter(id, self.exports.done.clone(), id);
        self.run_actions();
        self.note(id, "delete");
        self.enter(id, self.exports.delete.clone(), id);
        self.run_actions();
        if self.host().streams.remove(&id).is_some() {
            seen.borrow_mut().deleted = true;
        }
    }

    /// The VM is gone: no callback runs any more, its calls never call back. Envoy fails a stream
    /// when it next has something for the filter ([`Vm::fail_stream`]); a paused one hangs.
    pub(crate) fn lose(&mut self) {
        self.lost = true;
        let host = self.host();
        host.actions.clear();
        host.roots.clear();
        let streams = std::mem::take(&mut host.streams);
        host.orphans
            .extend(streams.into_iter().filter(|(_, stream)| !stream.finishing));
        host.world.borrow_mut().calls.abandon(host.vm, None);
    }

    /// Ends a stream of a lost VM: Envoy's 503 before response headers, a cut after.
    pub(crate) fn fail_stream(&mut self, id: u32) {
        let host = self.host();
        let Some(stream) = host.orphans.remove(&id) else {
            return;
        };
        let world = host.world.borrow();
        if stream.response.headers_passed {
            close(&world, &stream.seen, Ending::VmLost);
        } else {
            let reply = fail_reply();
            stream.seen.borrow_mut().code_details = Some(reply.details.clone());
            answer_directly(&world, &stream.seen, reply.header_map(), reply.body);
            close(&world, &stream.seen, Ending::Complete);
        }
    }
}

/// The answer of a worker without a VM.
pub(crate) fn fail_reply() -> LocalReply {
    LocalReply {
        status: 503,
        headers: HeaderMap::default(),
        body: Vec::new(),
        details: FAIL_STREAM.into(),
    }
}

/// Envoy's answer to a body over the buffer limit.
pub(crate) fn payload_too_large() -> LocalReply {
    LocalReply {
        status: 413,
        headers: HeaderMap::default(),
        body: b"Payload Too Large".to_vec(),
        details: "request_payload_too_large".into(),
    }
}

/// Gives the client a whole response that no filter sees.
pub(crate) fn answer_directly(
    world: &World,
    seen: &RefCell<Seen>,
    headers: HeaderMap,
    body: Vec<u8>,
) {
    let at_ms = world.clock.elapsed_ms();
    let mut seen = seen.borrow_mut();
    seen.headers = Some(headers);
    seen.headers_at_ms = at_ms;
    seen.chunks.clear();
    if !body.is_empty() {
        seen.chunks
            .push(crate::host::stream::Chunk { at_ms, bytes: body });
    }
}

/// Records the ending of a stream; an upstream still at work is cut.
pub(crate) fn close(world: &World, seen: &RefCell<Seen>, ending: Ending) {
    let mut seen = seen.borrow_mut();
    seen.ending = ending;
    seen.ended_at_ms = world.clock.elapsed_ms();
    let finished = seen.upstream_finished;
    if let Some(upstream) = &mut seen.upstream {
        upstream.cut = !finished;
    }
}

// === impl LocalReply ===

impl LocalReply {
    /// Headers as Envoy completes them (`Utility::prepareLocalReply`).
    pub(crate) fn header_map(&self) -> HeaderMap {
        let mut headers = HeaderMap::of(&[(":status", &self.status.to_string())]);
        for (name, value) in self.headers.iter() {
            headers.add(name, value);
        }
        if self.body.is_empty() {
            headers.remove("content-length");
            headers.remove("content-type");
        } else {
            headers.set("content-length", self.body.len().to_string().as_bytes());
            if headers.get("content-type").is_none() {
                headers.add("content-type", b"text/plain");
            }
        }
        headers
    }
}
