//! Performs what flows ask for: the only place that pauses, resumes, dispatches and answers.

use crate::host::{call, clock, raw, stream};
use crate::registry::FlowId;
use crate::root::TICK_MS;
use crate::vm::Vm;
use pd_core::flow::{BodyEdit, Call, Effect, Event, Leg, Lost};
use pd_core::reply::Reply;
use pd_core::request::patch::Prefix;
use pd_wire::names;
use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, Status};
use std::rc::Rc;

/// The stream is no longer there to act on.
const GONE: Event<'static> = Event::Gone {
    engine_cut: false,
    unsent: false,
};
/// Name of the filter state that access logs show.
const NOTE: &str = "pd_decision";

/// Which callback is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A request callback of the flow's stream.
    Request,
    /// A response callback of the flow's stream.
    Response,
    /// A callback of this root context.
    Root(u32),
}

/// What the callback must tell the host.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Let the request go on.
    pub sent: bool,
    /// Keep this part of the response.
    pub hold: bool,
    /// The stream was answered locally.
    pub replied: bool,
    /// Body to put in place of the one that follows.
    pub rewrite: Option<Vec<u8>>,
}

impl Vm {
    /// Hands an event to a flow and performs what it asks for. A flow that is gone ignores it.
    pub fn handle(&mut self, id: FlowId, event: Event<'_>, place: Place) -> Outcome {
        let mut outcome = Outcome::default();
        self.step(id, event, place, &mut outcome);
        outcome
    }

    fn step(&mut self, id: FlowId, event: Event<'_>, place: Place, outcome: &mut Outcome) {
        let Some(entry) = self.flows.get_mut(id) else {
            return;
        };
        let settings = Rc::clone(&entry.settings);
        let now_ms = match event {
            // On the way of every request, and every token of every stream: what the tick knew is
            // exact enough for a deadline that only has to lie behind the real one.
            Event::CallReply { status: 200, .. }
            | Event::ResponseHeaders { .. }
            | Event::ResponseChunk { .. } => self.ticked_at.saturating_add(TICK_MS),
            _ => clock::now_ms(),
        };
        let scene = &mut Self::scene(&mut self.worker, &settings, now_ms);
        let effects = entry.flow.on(event, scene);
        for effect in effects {
            if !self.perform(id, effect, place, outcome) {
                break;
            }
        }
        self.flows.settle(id, now_ms);
    }

    /// Performs one effect. False when the flow has heard that it could not be, and what else it
    /// asked for no longer holds.
    fn perform(&mut self, id: FlowId, effect: Effect, place: Place, outcome: &mut Outcome) -> bool {
        match effect {
            Effect::Call(call) => return self.post(id, call, place, outcome),
            Effect::ReadBody => {
                let body = self.at_stream(id, place).then(|| self.read_body(id));
                match body {
                    Some(body) => self.step(id, Event::Body(&body), place, outcome),
                    None => self.step(id, GONE, place, outcome),
                }
            }
            Effect::ProbeBody => {
                if self.at_stream(id, place) {
                    let hidden_body = !self.bodies_seen && body_is_hidden();
                    self.step(id, Event::Probed { hidden_body }, place, outcome);
                }
            }
            Effect::Send(leg) => {
                if self.at_stream(id, place) {
                    self.send(id, &leg, place, outcome);
                }
            }
            Effect::Reply(reply) => {
                if self.at_stream(id, place) {
                    answer(&reply);
                    outcome.replied = true;
                }
            }
            Effect::Rewrite(reply) => {
                stream::set_response_header(":status", &reply.status.to_string());
                stream::set_response_header("content-type", "application/json");
                stream::set_response_header("content-length", &reply.body.len().to_string());
                for (name, value) in &reply.headers {
                    stream::set_response_header(name, value);
                }
                outcome.rewrite = Some(reply.body);
            }
            Effect::Cut => {
                if self.at_stream(id, place) {
                    raw::reset_response();
                }
            }
            Effect::Dress(headers) => {
                for (name, value) in &headers {
                    stream::set_response_header(name, value);
                }
            }
            Effect::Hold => outcome.hold = true,
            Effect::Resume => {
                if self.at_stream(id, place) {
                    raw::continue_response();
                }
            }
            Effect::Orphan(flow) => match self.flows.orphan(id, *flow) {
                Some((orphan, true)) => self.flows.settle(orphan, clock::now_ms()),
                Some((orphan, false)) => {
                    self.step(
                        orphan,
                        Event::CallLost(Lost::Unsent),
                        place,
                        &mut Outcome::default(),
                    );
                }
                None => {}
            },
            Effect::Count(count) => self.meters.count(count),
            Effect::Note(text) => {
                if self.at_stream(id, place) {
                    stream::note(NOTE, &text);
                }
            }
            Effect::Warn(text) => {
                let request = self
                    .flows
                    .get_mut(id)
                    .map(|entry| entry.flow.request_id().to_owned());
                self.warn(format_args!(
                    "request {}: {text}",
                    request.as_deref().unwrap_or("-")
                ));
            }
        }
        true
    }

    /// Makes the flow's stream the one that host calls act on; false when it is gone.
    fn at_stream(&mut self, id: FlowId, place: Place) -> bool {
        let context = self.flows.get_mut(id).and_then(|entry| entry.context);
        match (context, place) {
            (Some(context), Place::Root(_)) => hostcalls::set_effective_context(context).is_ok(),
            (context, _) => context.is_some(),
        }
    }

    /// Sends a call, owned by the flow's own root, which lives as long as the client's stream. A
    /// callback of another root leaves it to that root's next tick. An orphan has no stream, so its
    /// call may go out from any root at hand. False when the host refused it.
    fn post(&mut self, id: FlowId, call: Call, place: Place, outcome: &mut Outcome) -> bool {
        self.flows.give_up_call(id);
        let Some(entry) = self.flows.get_mut(id) else {
            return true;
        };
        let own = entry.settings.root;
        match place {
            Place::Root(root) if root != own && entry.context.is_some() => {
                entry.outbox = Some(call);
                self.posted.push(id);
                true
            }
            Place::Root(root) => {
                let sent = hostcalls::set_effective_context(root).and_then(|()| call::send(&call));
                self.called(id, sent, place, outcome)
            }
            Place::Request | Place::Response => {
                self.called(id, call::send_as_root(own, call), place, outcome)
            }
        }
    }

    /// Sends the calls that flows left for this root.
    pub fn dispatch_posted(&mut self, root: u32) {
        for id in std::mem::take(&mut self.posted) {
            let Some(entry) = self.flows.get_mut(id) else {
                continue;
            };
            if entry.settings.root != root {
                self.posted.push(id);
            } else if let Some(call) = entry.outbox.take() {
                self.post(id, call, Place::Root(root), &mut Outcome::default());
            }
        }
    }

    fn called(
        &mut self,
        id: FlowId,
        sent: Result<u32, Status>,
        place: Place,
        outcome: &mut Outcome,
    ) -> bool {
        match sent {
            Ok(token) => {
                self.flows.called(id, token);
                true
            }
            Err(status) => {
                log::error!("cluster {} refused a call: {status:?}", names::CLUSTER);
                self.step(id, Event::CallLost(Lost::Unsent), place, outcome);
                false
            }
        }
    }

    fn read_body(&mut self, id: FlowId) -> Vec<u8> {
        let size = self.flows.get_mut(id).map_or(0, |entry| entry.body_len);
        stream::read(BufferType::HttpRequestBody, 0, size)
    }

    /// Releases the client's own request to its pod.
    fn send(&mut self, id: FlowId, leg: &Leg, place: Place, outcome: &mut Outcome) {
        stream::set_request_header(names::HEADER_TARGET, &leg.address);
        stream::set_request_header(names::HEADER_REQUEST_ID, &leg.request_id);
        if !leg.says_json {
            // The body was read as JSON; engines refuse JSON that does not say so.
            stream::set_request_header("content-type", "application/json");
        }
        let size = self.flows.get_mut(id).map_or(0, |entry| entry.body_len);
        let length = match &leg.body {
            BodyEdit::Keep => size,
            BodyEdit::Prefix(Prefix { replace, bytes }) => {
                self.replace_prefix(size, *replace, bytes);
                size.saturating_sub(*replace).saturating_add(bytes.len())
            }
            BodyEdit::Replace { .. } => {
                let body = leg.body.apply(&self.read_body(id));
                raw::set_buffer(BufferType::HttpRequestBody, 0, size, &body);
                body.len()
            }
        };
        stream::set_request_header("content-length", &length.to_string());
        outcome.sent = true;
        if let Place::Root(_) = place {
            raw::continue_request();
        }
    }

    fn replace_prefix(&mut self, size: usize, replace: usize, bytes: &[u8]) {
        let buffer = BufferType::HttpRequestBody;
        if self.replaces_prefix && raw::set_buffer(buffer, 0, replace, bytes) {
            return;
        }
        self.replaces_prefix = false;
        let mut whole = bytes.to_vec();
        whole.extend(stream::read(buffer, replace, size.saturating_sub(replace)));
        raw::set_buffer(buffer, 0, size, &whole);
    }
}

/// Answers the stream in effect.
pub fn answer(reply: &Reply) {
    let mut headers = vec![("content-type", "application/json")];
    headers.extend(
        reply
            .headers
            .iter()
            .map(|(name, value)| (*name, value.as_str())),
    );
    raw::send_local_response(reply.status, "pd_router", &headers, &reply.body);
}

/// True when body bytes arrived although the host gave us none: bytes received beyond the
/// headers' own.
fn body_is_hidden() -> bool {
    let headers: usize = stream::request_headers()
        .iter()
        .map(|(name, value)| name.len().saturating_add(value.len()))
        .sum();
    let headers = u64::try_from(headers).unwrap_or(u64::MAX);
    stream::number(&["request", "total_size"]).is_some_and(|total| total > headers)
}
