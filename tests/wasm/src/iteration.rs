//! How headers and bodies pass through the filter, on both sides of a stream: the part of Envoy's
//! filter manager around one filter (`filter_manager.cc`: `commonHandleAfter…Callback`,
//! `commonContinue`).
//!
//! A pause in a headers callback stops the headers but not the body callbacks
//! (`allow_on_headers_stop_iteration`); without that permission it stops everything, and the host
//! keeps the body to itself. A pause in a body callback buffers: the next callback sees the whole
//! buffer. `Continue` from a body callback passes on whatever was held before it.

use crate::host::stream::{Chunk, Ending, Iteration, Side};
use crate::host::{Fault, Forwarded};
use crate::lifetime;
use crate::vm::Vm;

impl Vm {
    /// Runs the headers callback of a side and passes the headers on, or holds them.
    pub(crate) fn headers(&mut self, side: Side, id: u32, end: bool) {
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        let leg = stream.leg(side);
        leg.headers_visible = true;
        leg.ended = end;
        leg.in_callback = true;
        let count = stream.headers(side).map_or(0, |headers| headers.len());
        let (name, callback) = match side {
            Side::Request => ("request_headers", self.exports.request_headers.clone()),
            Side::Response => ("response_headers", self.exports.response_headers.clone()),
        };
        self.note(id, name);
        let returned = self.enter(id, callback, (id, count as u32, u32::from(end)));
        let stopped = returned.as_ref().is_some_and(|r| r.stopped);
        let pause = stopped || returned.is_some_and(|r| r.value != 0);
        self.run_actions();
        let only_headers = !stopped && self.host().world.borrow().stop_iteration;
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        let leg = stream.leg(side);
        leg.in_callback = false;
        if pause {
            leg.iteration = if only_headers {
                Iteration::Stopped
            } else {
                Iteration::StoppedAll
            };
        } else {
            leg.headers_visible = false;
            self.pass_headers(side, id, end);
        }
    }

    /// Takes body bytes from the sender of a side through the filter.
    pub(crate) fn data(&mut self, side: Side, id: u32, bytes: &[u8], end: bool) {
        if self.lost {
            return self.fail_stream(id);
        }
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if side == Side::Request && stream.replied {
            return;
        }
        let leg = stream.leg(side);
        leg.received += bytes.len() as u64;
        leg.ended |= end;
        if leg.iteration == Iteration::StoppedAll {
            leg.buffer.extend_from_slice(bytes);
            self.limit_buffer(side, id);
            return;
        }
        self.body_callback(side, id, bytes, end);
    }

    /// Answers 413 when a paused request holds more than the host buffers; whether it did.
    fn limit_buffer(&mut self, side: Side, id: u32) -> bool {
        let host = self.host();
        let limit = host.world.borrow().request_body_buffer_limit;
        let Some(stream) = host.streams.get(&id) else {
            return true;
        };
        if side == Side::Response || stream.request.buffer.len() <= limit {
            return false;
        }
        self.local_reply(id, lifetime::payload_too_large());
        true
    }

    fn body_callback(&mut self, side: Side, id: u32, bytes: &[u8], end: bool) {
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        let leg = stream.leg(side);
        if leg.buffering {
            leg.buffer.extend_from_slice(bytes);
            if self.limit_buffer(side, id) {
                return;
            }
        } else {
            leg.chunk = Some(bytes.to_vec());
        }
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        let leg = stream.leg(side);
        leg.in_callback = true;
        let size = leg.visible().map_or(0, |body| body.len());
        let (name, callback) = match side {
            Side::Request => ("request_body", self.exports.request_body.clone()),
            Side::Response => ("response_body", self.exports.response_body.clone()),
        };
        self.note(id, name);
        let returned = self.enter(id, callback, (id, size as u32, u32::from(end)));
        let stopped = returned.as_ref().is_some_and(|r| r.stopped);
        let pause = stopped || returned.is_some_and(|r| r.value != 0);
        if stopped && let Some(stream) = self.host().streams.get_mut(&id) {
            // After a local reply Envoy stops without buffering.
            let leg = stream.leg(side);
            leg.buffering = false;
            leg.chunk = None;
        }
        self.run_actions();
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        let replied = stream.replied;
        let leg = stream.leg(side);
        leg.in_callback = false;
        let chunk = leg.chunk.take().unwrap_or_default();
        if side == Side::Request && replied {
            return;
        }
        if pause {
            leg.iteration = Iteration::Stopped;
            leg.buffer.extend_from_slice(&chunk);
            leg.buffering = !stopped;
            self.limit_buffer(side, id);
            return;
        }
        leg.iteration = Iteration::Running;
        leg.buffering = false;
        let mut body = std::mem::take(&mut leg.buffer);
        body.extend_from_slice(&chunk);
        self.pass_headers(side, id, false);
        self.pass_data(side, id, body, end);
    }

    /// Resumes a paused side: what was held goes on, and so does what follows.
    pub(crate) fn resume(&mut self, side: Side, id: u32) {
        let Some(stream) = self.host().streams.get_mut(&id) else {
            return;
        };
        if stream.finishing || (side == Side::Request && stream.replied) {
            return;
        }
        let leg = stream.leg(side);
        let held = leg.iteration;
        if held == Iteration::Running && !leg.in_callback {
            self.host().fault(Fault::ResumeNotPaused { stream: id });
            return;
        }
        leg.iteration = Iteration::Running;
        leg.buffering = false;
        // Inside a body callback the chunk at hand still depends on what the callback returns.
        let ended = leg.ended && leg.chunk.is_none();
        let body = std::mem::take(&mut leg.buffer);
        let only_headers = !leg.headers_passed && ended && body.is_empty();
        self.pass_headers(side, id, only_headers);
        if only_headers || (body.is_empty() && !ended) {
            return;
        }
        if held == Iteration::StoppedAll {
            // The filter has not seen this body yet.
            self.body_callback(side, id, &body, ended);
        } else {
            self.pass_data(side, id, body, ended);
        }
    }

    fn pass_headers(&mut self, side: Side, id: u32, end: bool) {
        let host = self.host();
        let now = host.world.borrow().clock.elapsed_ms();
        let Some(stream) = host.streams.get_mut(&id) else {
            return;
        };
        if stream.leg(side).headers_passed {
            return;
        }
        stream.leg(side).headers_passed = true;
        let mut seen = stream.seen.borrow_mut();
        match side {
            Side::Request => {
                let upstream = seen.upstream.get_or_insert_default();
                upstream.headers = stream.request_headers.clone();
                upstream.at_ms = now;
            }
            Side::Response => {
                seen.headers = stream.response_headers.clone();
                seen.headers_at_ms = now;
            }
        }
        drop(seen);
        if end {
            self.end_of(side, id);
        }
    }

    fn pass_data(&mut self, side: Side, id: u32, bytes: Vec<u8>, end: bool) {
        let host = self.host();
        let at_ms = host.world.borrow().clock.elapsed_ms();
        let Some(stream) = host.streams.get_mut(&id) else {
            return;
        };
        let mut seen = stream.seen.borrow_mut();
        match side {
            Side::Request => {
                seen.upstream
                    .get_or_insert_default()
                    .body
                    .extend_from_slice(&bytes);
            }
            Side::Response if bytes.is_empty() => {}
            Side::Response => seen.chunks.push(Chunk { at_ms, bytes }),
        }
        drop(seen);
        if end {
            self.end_of(side, id);
        }
    }

    /// The last byte of a side went on.
    fn end_of(&mut self, side: Side, id: u32) {
        let host = self.host();
        let Some(stream) = host.streams.get_mut(&id) else {
            return;
        };
        let mut seen = stream.seen.borrow_mut();
        let (declared, sent) = match side {
            Side::Request => {
                let upstream = seen.upstream.get_or_insert_default();
                upstream.ended = true;
                (upstream.headers.text("content-length"), upstream.body.len())
            }
            Side::Response => (
                seen.headers
                    .as_ref()
                    .and_then(|headers| headers.text("content-length")),
                seen.chunks.iter().map(|chunk| chunk.bytes.len()).sum(),
            ),
        };
        let wrong = declared
            .filter(|text| text.parse() != Ok(sent))
            .map(str::to_owned);
        drop(seen);
        if let Some(declared) = wrong {
            host.fault(Fault::ContentLength {
                stream: id,
                declared,
                sent,
            });
        }
        match side {
            Side::Request => {
                let forwarded = Forwarded {
                    vm: host.vm,
                    stream: id,
                };
                host.world.borrow_mut().forwarded.push_back(forwarded);
            }
            Side::Response => self.finish(id, Ending::Complete),
        }
    }

    /// Records that a callback of a stream runs.
    pub(crate) fn note(&mut self, id: u32, callback: &'static str) {
        if let Some(stream) = self.host().streams.get(&id) {
            stream.seen.borrow_mut().callbacks.push(callback);
        }
    }
}
