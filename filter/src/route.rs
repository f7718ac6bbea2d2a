//! A client's stream: callbacks become events of its flow.

use crate::control::Control;
use crate::effects::{Outcome, Place, answer};
use crate::host::{headers::Headers, stream};
use crate::registry::FlowId;
use crate::root::Settings;
use crate::vm::{self, Vm};
use pd_core::flow::{self, Event, Flow, Head, Lost};
use pd_core::{models, reply::Fault};
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, BufferType};
use std::rc::Rc;

/// What the proxy says when the engine answered.
const VIA_UPSTREAM: &str = "via_upstream";

/// How the proxy's words for an engine that cut its answer begin.
const UPSTREAM_CUT: &str = "upstream_reset_after_response_started";

/// One stream.
pub struct Route {
    id: u32,
    settings: Rc<Settings>,
    /// The request, while it is live.
    flow: Option<FlowId>,
    /// Set on the control listener.
    control: Option<Control>,
    /// The body was handed in.
    body_done: bool,
    /// Response bytes handed in while the stream is held.
    response_seen: usize,
    /// Body to put in place of the proxy's own.
    rewrite: Option<Vec<u8>>,
}

impl Route {
    /// A stream whose headers have not arrived.
    pub fn new(id: u32, settings: Rc<Settings>) -> Self {
        Self {
            id,
            settings,
            flow: None,
            control: None,
            body_done: false,
            response_seen: 0,
            rewrite: None,
        }
    }

    /// Starts the flow of an inference request.
    fn start(&mut self, head: Head, headers: &Headers, end: bool) -> Result<(), Fault> {
        let encoding = headers.value("content-encoding");
        if let Some(encoding) = encoding.filter(|value| *value != b"identity") {
            let encoding = String::from_utf8_lossy(encoding);
            return Err(Fault::Encoding(encoding.chars().take(32).collect()));
        }
        if encoding.is_some() {
            // Says nothing, and some engines refuse any encoding.
            stream::remove_request_header("content-encoding");
        }
        if end {
            return Err(Fault::NoBody);
        }
        self.flow = Some(vm::with(|vm| {
            let probe = !vm.bodies_seen;
            // Only the look for a hidden body depends on it, and that is the tick's.
            let now_ms = vm.ticked_at;
            let scene = &mut Vm::scene(&mut vm.worker, &self.settings, now_ms);
            let flow = Flow::new(head, probe, scene);
            let id = vm
                .flows
                .insert(flow, Some(self.id), Rc::clone(&self.settings));
            vm.flows.settle(id, now_ms);
            id
        }));
        Ok(())
    }

    /// The request body is complete.
    fn body_complete(&mut self, size: usize) -> Action {
        self.body_done = true;
        let Some(id) = self.flow else {
            return Action::Continue;
        };
        let body = stream::read(BufferType::HttpRequestBody, 0, size);
        let outcome = vm::with(|vm| vm.handle(id, Event::Body(&body), Place::Request));
        if outcome.sent {
            Action::Continue
        } else {
            Action::Pause
        }
    }

    /// Hands in an event of the response.
    fn respond(&mut self, event: Event<'_>) -> Action {
        let Some(id) = self.flow else {
            return Action::Continue;
        };
        let Outcome {
            hold,
            replied,
            rewrite,
            ..
        } = vm::with(|vm| vm.handle(id, event, Place::Response));
        self.rewrite = rewrite.or(self.rewrite.take());
        if hold || replied {
            Action::Pause
        } else {
            Action::Continue
        }
    }

    /// Requests that the filter answers from what it knows.
    fn answer_locally(route: flow::Route<'_>) {
        let reply = vm::with(|vm| {
            let fleet = &mut vm.worker.fleet;
            fleet.refresh(&crate::host::store::SharedData);
            let request_id = vm.worker.ids.request_id();
            match route {
                flow::Route::Models => models::list(fleet),
                flow::Route::Model(id) => models::one(fleet, id, &request_id),
                flow::Route::Ready => models::readiness(fleet, &request_id),
                flow::Route::Unknown | flow::Route::Inference(_) => {
                    Fault::Path.reply(Some(&request_id))
                }
            }
        });
        answer(&reply);
    }
}

impl HttpContext for Route {
    fn on_http_request_headers(&mut self, _: usize, end: bool) -> Action {
        let headers = stream::request_headers();
        let value = |name| headers.text_value(name).unwrap_or_default();
        let (method, path) = (value(":method"), value(":path"));
        #[cfg(feature = "test-trap")]
        if value("x-pd-test-trap") == "1" {
            core::arch::wasm32::unreachable();
        }
        if let Some(control) = Control::claim(method, path, &headers, &self.settings) {
            self.control = Some(control);
            return self
                .control
                .as_mut()
                .map_or(Action::Pause, |control| control.headers(end));
        }
        let route = flow::route(method, path);
        let flow::Route::Inference(endpoint) = route else {
            Self::answer_locally(route);
            return Action::Pause;
        };
        let head = Head::read(path, endpoint, headers.iter());
        if let Err(fault) = self.start(head, &headers, end) {
            answer(&fault.reply(Some(&vm::with(|vm| vm.worker.ids.request_id()))));
        }
        Action::Pause
    }

    fn on_http_request_body(&mut self, size: usize, end: bool) -> Action {
        if let Some(control) = &mut self.control {
            return control.body(size, end);
        }
        vm::with(|vm| {
            vm.bodies_seen = true;
            if let Some(entry) = self.flow.and_then(|id| vm.flows.get_mut(id)) {
                entry.body_len = size;
            }
        });
        if end {
            self.body_complete(size)
        } else {
            Action::Pause
        }
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        if let Some(control) = &mut self.control {
            return control.trailers();
        }
        if self.body_done || self.flow.is_none() {
            return Action::Continue;
        }
        // The body ended without saying so.
        let size = self
            .flow
            .and_then(|id| vm::with(|vm| vm.flows.get_mut(id).map(|entry| entry.body_len)));
        self.body_complete(size.unwrap_or(0))
    }

    fn on_http_response_headers(&mut self, _: usize, end: bool) -> Action {
        let Some(id) = self.flow else {
            return Action::Continue;
        };
        let streams = vm::with(|vm| {
            let entry = vm.flows.get_mut(id);
            entry.is_some_and(|entry| entry.flow.awaits_events())
        });
        let (status, event_stream) = if streams {
            // All at once costs less than one by one.
            let headers = stream::response_headers();
            let status = headers.text_value(":status");
            let status = status.and_then(|text| text.parse().ok());
            (status, is_event_stream(&headers))
        } else {
            (stream::response_status(), false)
        };
        let status = status.unwrap_or(502);
        let details = if status < 400 {
            None
        } else {
            stream::property(&["response", "code_details"]).filter(|text| text != VIA_UPSTREAM)
        };
        self.respond(Event::ResponseHeaders {
            status,
            proxy_details: details.as_deref(),
            event_stream,
            end,
        })
    }

    fn on_http_response_body(&mut self, size: usize, end: bool) -> Action {
        if let Some(body) = self.rewrite.take() {
            crate::host::raw::set_buffer(BufferType::HttpResponseBody, 0, size, &body);
            return Action::Continue;
        }
        let Some(id) = self.flow else {
            return Action::Continue;
        };
        let reads = vm::with(|vm| {
            vm.flows
                .get_mut(id)
                .is_some_and(|entry| entry.flow.reads_response())
        });
        // Held bytes stay in the host's buffer, in front of the new ones.
        let fresh = size.saturating_sub(self.response_seen);
        let bytes = if reads {
            stream::read(BufferType::HttpResponseBody, self.response_seen, fresh)
        } else {
            Vec::new()
        };
        let action = self.respond(Event::ResponseChunk { bytes: &bytes, end });
        self.response_seen = if action == Action::Pause { size } else { 0 };
        action
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        self.respond(Event::ResponseChunk {
            bytes: &[],
            end: true,
        })
    }

    fn on_log(&mut self) {
        let Some(id) = self.flow.take() else { return };
        vm::with(|vm| vm.client_left(id));
    }
}

/// True when an answer has the media type of event streams, with or without parameters. Of one that
/// is encoded the events cannot be told apart, so none would be let go.
fn is_event_stream(headers: &Headers) -> bool {
    let content_type = headers.text_value("content-type").unwrap_or_default();
    let kind = content_type.split(';').next().unwrap_or_default();
    kind.trim().eq_ignore_ascii_case("text/event-stream")
        && headers.value("content-encoding").is_none()
}

impl Context for Route {}

impl Vm {
    /// The stream is over: what is left of its request goes on without it.
    fn client_left(&mut self, id: FlowId) {
        let Some(entry) = self.flows.get_mut(id) else {
            return;
        };
        entry.context = None;
        // A call that frees KV goes its way without the stream.
        let dropped = !entry.flow.is_orphaned() && entry.outbox.take().is_some();
        let details = stream::property(&["response", "code_details"]);
        let engine_cut = details.is_some_and(|details| details.starts_with(UPSTREAM_CUT));
        // The host knows its own end of the connection once the request is on it.
        let unsent = stream::property(&["upstream", "local_address"]).is_none();
        self.handle(id, Event::Gone { engine_cut, unsent }, Place::Response);
        if dropped && !self.flows.is_calling(id) {
            // Its call never left, so nothing will answer.
            self.handle(id, Event::CallLost(Lost::Unsent), Place::Response);
        }
    }
}
