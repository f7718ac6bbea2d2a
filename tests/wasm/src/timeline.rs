//! Things that will happen at a time: answers of calls, call timeouts, pieces of a response.

use std::collections::BTreeMap;

use crate::engines::{Finish, Script};
use crate::host::VmKey;
use crate::host::calls::{CallId, Reply};
use crate::host::clock::NANOS_PER_MS;
use crate::host::headers::HeaderMap;

/// Something due.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    CallReply(CallId, Reply),
    CallTimeout(CallId),
    Upstream(VmKey, u32, Upstream),
}

/// A step of the main stream's upstream.
#[derive(Debug, Clone)]
pub(crate) enum Upstream {
    Headers {
        headers: HeaderMap,
        details: &'static str,
        end: bool,
    },
    Data {
        bytes: Vec<u8>,
        end: bool,
    },
    Reset,
}

/// Events by monotonic nanosecond, then by the order they were planned in.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    events: BTreeMap<(u64, u64), Event>,
    planned: u64,
}

// === impl Timeline ===

impl Timeline {
    pub(crate) fn plan(&mut self, at: u64, event: Event) {
        self.planned += 1;
        self.events.insert((at, self.planned), event);
    }

    /// Plans the answer of a call: the whole response at once, when it is complete.
    pub(crate) fn plan_reply(&mut self, now: u64, call: CallId, script: Script) {
        let at = now + script.total_ms() * NANOS_PER_MS;
        let reply = match (script.finish, script.headers) {
            (Finish::Stall, _) | (Finish::End, None) => return,
            (Finish::Reset, _) => Reply::failure(),
            (Finish::End, Some(headers)) => Reply {
                headers,
                body: script
                    .chunks
                    .into_iter()
                    .flat_map(|(_, bytes)| bytes)
                    .collect(),
                trailers: script.trailers,
            },
        };
        self.plan(at, Event::CallReply(call, reply));
    }

    /// Plans the response of the main stream, piece by piece.
    pub(crate) fn plan_stream(&mut self, now: u64, vm: VmKey, stream: u32, script: Script) {
        let mut at = now + script.after_ms * NANOS_PER_MS;
        let ends = script.finish == Finish::End;
        let inline_end = ends && script.end_after_ms.is_none();
        if let Some(headers) = script.headers {
            let end = inline_end && script.chunks.is_empty();
            let step = Upstream::Headers {
                headers,
                details: script.details,
                end,
            };
            self.plan(at, Event::Upstream(vm, stream, step));
        }
        let last = script.chunks.len();
        for (index, (gap, bytes)) in script.chunks.into_iter().enumerate() {
            at += gap * NANOS_PER_MS;
            let end = inline_end && index + 1 == last;
            self.plan(
                at,
                Event::Upstream(vm, stream, Upstream::Data { bytes, end }),
            );
        }
        if script.finish == Finish::Reset {
            self.plan(at, Event::Upstream(vm, stream, Upstream::Reset));
        } else if ends && let Some(gap) = script.end_after_ms {
            let step = Upstream::Data {
                bytes: Vec::new(),
                end: true,
            };
            self.plan(at + gap * NANOS_PER_MS, Event::Upstream(vm, stream, step));
        }
    }

    /// The earliest event `ready` agrees to.
    pub(crate) fn next(&self, ready: impl Fn(&Event) -> bool) -> Option<u64> {
        self.events
            .iter()
            .find(|(_, event)| ready(event))
            .map(|((at, _), _)| *at)
    }

    /// Takes the earliest event due at `now` that `ready` agrees to.
    pub(crate) fn take(&mut self, now: u64, ready: impl Fn(&Event) -> bool) -> Option<Event> {
        let key = self
            .events
            .range(..=(now, u64::MAX))
            .find(|(_, event)| ready(event))
            .map(|(key, _)| *key)?;
        self.events.remove(&key)
    }
}
