//! Driving a gateway: requests in, time forward, everything due delivered.

use std::cell::RefCell;
use std::rc::Rc;

use crate::engines::{Script, Sent};
use crate::exchange::{Exchange, Flight, Outcome};
use crate::gateway::{FlightState, Gateway};
use crate::host::calls::{CallId, CallState, Reply};
use crate::host::clock::NANOS_PER_MS;
use crate::host::headers::HeaderMap;
use crate::host::stream::{Ending, Seen, Side, Stream};
use crate::host::{LocalReply, VmKey};
use crate::lifetime;
use crate::timeline::{Event, Upstream};
use crate::vm::Vm;

/// Steps after which a pump or an advance is taken for a loop without end.
const MAX_STEPS: usize = 1_000_000;
/// How long [`Gateway::run`] waits for a response, in virtual milliseconds.
const RUN_LIMIT_MS: u64 = 120_000;
/// What Envoy answers when the upstream breaks before response headers, and its details.
const RESET_BODY: &str = "upstream connect error or disconnect/reset before headers. \
                          reset reason: connection termination";
const RESET_DETAILS: &str = "upstream_reset_before_response_started{connection_termination}";

impl Gateway {
    /// Sends a whole request and delivers what is due now.
    pub fn send(&mut self, exchange: Exchange) -> Flight {
        let (chunks, inline) = (exchange.chunks.clone(), exchange.end_with_last_chunk);
        let flight = self.open(exchange, chunks.is_empty());
        let last = chunks.len();
        for (index, chunk) in chunks.iter().enumerate() {
            self.deliver_body(flight, chunk, inline && index + 1 == last);
        }
        if last > 0 && !inline {
            self.deliver_body(flight, b"", true);
        }
        self.pump();
        flight
    }

    /// Sends the headers of a request whose body follows by [`Gateway::body`].
    pub fn begin(&mut self, exchange: Exchange) -> Flight {
        let flight = self.open(exchange, false);
        self.pump();
        flight
    }

    /// Sends a piece of a request's body.
    pub fn body(&mut self, flight: Flight, bytes: &[u8], end: bool) {
        self.deliver_body(flight, bytes, end);
        self.pump();
    }

    /// The client of a request goes away.
    pub fn disconnect(&mut self, flight: Flight) {
        let (vm, stream) = self.key(flight);
        self.vms[vm].disconnect(stream);
        self.pump();
    }

    /// Sends a request and moves time until its response is over, two minutes at most.
    pub fn run(&mut self, exchange: Exchange) -> Outcome {
        let flight = self.send(exchange);
        self.settle(flight, RUN_LIMIT_MS);
        self.outcome(flight)
    }

    /// Moves time until a request is over, or `limit_ms` have passed.
    pub fn settle(&mut self, flight: Flight, limit_ms: u64) {
        let limit = self.now() + limit_ms * NANOS_PER_MS;
        for _ in 0..MAX_STEPS {
            if self.flights[flight.0].seen.borrow().ending != Ending::Open {
                return;
            }
            match self.next_due() {
                Some(at) if at <= limit => self.advance_to(at),
                _ => return,
            }
        }
        panic!("a request did not settle after {MAX_STEPS} steps");
    }

    /// Headers of the response, from an upstream that has no script.
    pub fn respond_headers(&mut self, flight: Flight, headers: &[(&str, &str)], end: bool) {
        let step = Upstream::Headers {
            headers: HeaderMap::of(headers),
            details: "via_upstream",
            end,
        };
        self.respond(flight, step);
    }

    /// A piece of the response body, from an upstream that has no script.
    pub fn respond_data(&mut self, flight: Flight, bytes: &[u8], end: bool) {
        self.respond(
            flight,
            Upstream::Data {
                bytes: bytes.to_vec(),
                end,
            },
        );
    }

    /// The upstream's connection breaks.
    pub fn respond_reset(&mut self, flight: Flight) {
        self.respond(flight, Upstream::Reset);
    }

    fn respond(&mut self, flight: Flight, step: Upstream) {
        let (vm, stream) = self.key(flight);
        upstream_step(&mut self.vms[vm], stream, step);
        self.pump();
    }

    /// Answers a pending call by a script, from now on.
    pub fn answer(&mut self, call: CallId, script: Script) {
        let now = self.now();
        self.timeline.plan_reply(now, call, script);
        self.pump();
    }

    /// Milliseconds since the gateway started.
    pub fn now_ms(&self) -> u64 {
        self.world.borrow().clock.elapsed_ms()
    }

    /// Lets so much time go by between any two reads of a clock, so that work takes time.
    pub fn slow_down(&mut self, micros_per_read: u64) {
        self.world.borrow_mut().clock.per_read = micros_per_read * 1000;
    }

    /// Steps the wall clock alone.
    pub fn step_wall_clock(&mut self, ms: i64) {
        self.world.borrow_mut().clock.step_wall(ms);
    }

    /// Moves time forward: every tick and event due on the way happens at its own time.
    pub fn advance(&mut self, ms: u64) {
        let target = self.now() + ms * NANOS_PER_MS;
        self.pump();
        for _ in 0..MAX_STEPS {
            match self.next_due() {
                Some(at) if at <= target => self.advance_to(at),
                _ => {
                    self.world.borrow_mut().clock.advance_to(target);
                    return;
                }
            }
        }
        panic!("{MAX_STEPS} things were due within {ms} ms");
    }

    /// Delivers queue notices, replies and response pieces due now, until all is quiet.
    pub fn pump(&mut self) {
        for _ in 0..MAX_STEPS {
            if !self.step() {
                return;
            }
        }
        panic!("the gateway is not quiet after {MAX_STEPS} steps");
    }

    fn now(&self) -> u64 {
        self.world.borrow().clock.monotonic
    }

    fn key(&self, flight: Flight) -> (VmKey, u32) {
        let state = &self.flights[flight.0];
        (state.vm, state.stream)
    }

    fn open(&mut self, exchange: Exchange, end: bool) -> Flight {
        let key = self.workers[exchange.worker];
        assert!(
            !self.vms[key].frozen,
            "worker {} is frozen: it takes no request",
            exchange.worker
        );
        let seen = Rc::new(RefCell::new(Seen::default()));
        let flight = Flight(self.flights.len());
        self.flights.push(FlightState {
            vm: key,
            stream: 0,
            seen: Rc::clone(&seen),
            first_call: self.world.borrow().calls.all.len(),
        });
        let vm = &mut self.vms[key];
        if vm.lost {
            let world = self.world.borrow();
            let reply = lifetime::fail_reply();
            seen.borrow_mut().code_details = Some(reply.details.clone());
            lifetime::answer_directly(&world, &seen, reply.header_map(), reply.body);
            lifetime::close(&world, &seen, Ending::Complete);
            return flight;
        }
        let mut stream = Stream::new(vm.plugins[exchange.plugin.0], exchange.headers, seen);
        stream.connection_id = flight.0 as u64 + 1;
        stream.properties = exchange.properties;
        let id = vm.open_stream(stream);
        self.flights[flight.0].stream = id;
        vm.headers(Side::Request, id, end);
        flight
    }

    fn deliver_body(&mut self, flight: Flight, bytes: &[u8], end: bool) {
        let (vm, stream) = self.key(flight);
        self.vms[vm].data(Side::Request, stream, bytes, end);
    }

    /// Earliest time at which something happens by itself.
    fn next_due(&self) -> Option<u64> {
        let tick = self
            .vms
            .iter()
            .filter_map(|vm| vm.next_tick().map(|(at, _)| at))
            .min();
        let event = self.timeline.next(|event| self.reaches(event));
        tick.into_iter().chain(event).min()
    }

    fn advance_to(&mut self, at: u64) {
        self.world.borrow_mut().clock.advance_to(at);
        self.pump();
        let now = self.now();
        for key in 0..self.vms.len() {
            while let Some((due, root)) = self.vms[key].next_tick()
                && due <= now
            {
                self.vms[key].tick(root);
                self.pump();
            }
        }
    }

    /// Whether an event can be delivered: its VM is not frozen.
    fn reaches(&self, event: &Event) -> bool {
        match event {
            Event::CallReply(call, _) | Event::CallTimeout(call) => {
                let world = self.world.borrow();
                world
                    .calls
                    .all
                    .get(call.0)
                    .is_none_or(|call| !self.vms[call.vm].frozen)
            }
            Event::Upstream(vm, ..) => !self.vms[*vm].frozen,
        }
    }

    /// Does one thing that is due now; `false` when there is none.
    fn step(&mut self) -> bool {
        self.route_calls() || self.route_streams() || self.deliver_notice() || self.deliver_event()
    }

    fn route_calls(&mut self) -> bool {
        let calls = std::mem::take(&mut self.world.borrow_mut().calls.unrouted);
        let now = self.now();
        for id in &calls {
            let call = self.world.borrow().calls.all[id.0].clone();
            if call.timeout_ms > 0 {
                let at = now + u64::from(call.timeout_ms) * NANOS_PER_MS;
                self.timeline.plan(at, Event::CallTimeout(*id));
            }
            let target = call
                .headers
                .text(&self.config.target_header)
                .map(str::to_owned);
            let sent = Sent {
                cluster: Some(call.cluster),
                headers: call.headers,
                body: call.body,
            };
            if let Some(script) = self.engines.ask(target.as_deref(), &sent) {
                self.timeline.plan_reply(now, *id, script);
            }
        }
        !calls.is_empty()
    }

    fn route_streams(&mut self) -> bool {
        let Some(forwarded) = self.world.borrow_mut().forwarded.pop_front() else {
            return false;
        };
        let state = self
            .flights
            .iter()
            .find(|flight| flight.vm == forwarded.vm && flight.stream == forwarded.stream);
        let upstream = state.and_then(|state| state.seen.borrow().upstream.clone());
        let Some(upstream) = upstream else {
            return true;
        };
        let target = upstream
            .headers
            .text(&self.config.target_header)
            .map(str::to_owned);
        let sent = Sent {
            cluster: None,
            headers: upstream.headers,
            body: upstream.body,
        };
        if let Some(script) = self.engines.ask(target.as_deref(), &sent) {
            let now = self.now();
            self.timeline
                .plan_stream(now, forwarded.vm, forwarded.stream, script);
        }
        true
    }

    fn deliver_notice(&mut self) -> bool {
        let mut world = self.world.borrow_mut();
        let notices = &mut world.queues.notices;
        let Some(at) = notices.iter().position(|(vm, ..)| !self.vms[*vm].frozen) else {
            return false;
        };
        let notice = notices.remove(at);
        drop(world);
        if let Some((vm, root, token)) = notice {
            self.vms[vm].queue_ready(root, token);
        }
        true
    }

    fn deliver_event(&mut self) -> bool {
        let now = self.now();
        let mut timeline = std::mem::take(&mut self.timeline);
        let event = timeline.take(now, |event| self.reaches(event));
        self.timeline = timeline;
        match event {
            None => return false,
            Some(Event::CallReply(call, reply)) => {
                let failed = reply.headers.is_empty();
                let state = if failed {
                    CallState::Failed
                } else {
                    CallState::Answered
                };
                self.deliver_reply(call, state, reply);
            }
            Some(Event::CallTimeout(call)) => {
                let reply = Reply::new(504, "upstream request timeout")
                    .header("content-type", "text/plain");
                self.deliver_reply(call, CallState::TimedOut, reply);
            }
            Some(Event::Upstream(vm, stream, step)) => {
                upstream_step(&mut self.vms[vm], stream, step);
            }
        }
        true
    }

    fn deliver_reply(&mut self, call: CallId, state: CallState, reply: Reply) {
        let found = self.world.borrow_mut().calls.pending(call).map(|call| {
            call.state = state;
            (call.vm, call.root, call.token)
        });
        if let Some((vm, root, token)) = found {
            self.vms[vm].call_response(root, token, reply);
        }
    }
}

/// One step of a response: through the filter, or Envoy's handling of a broken upstream.
fn upstream_step(vm: &mut Vm, stream: u32, step: Upstream) {
    match step {
        Upstream::Headers {
            headers,
            details,
            end,
        } => {
            vm.upstream_headers(stream, headers, details, end);
        }
        Upstream::Data { bytes, end } => vm.upstream_data(stream, &bytes, end),
        Upstream::Reset => {
            if vm.lost {
                return vm.fail_stream(stream);
            }
            let Some(state) = vm.host().streams.get_mut(&stream) else {
                return;
            };
            if state.replied {
                return;
            }
            state.seen.borrow_mut().upstream_finished = true;
            if state.response_headers.is_none() {
                let reply = LocalReply {
                    status: 503,
                    headers: HeaderMap::default(),
                    body: RESET_BODY.into(),
                    details: RESET_DETAILS.into(),
                };
                vm.local_reply(stream, reply);
            } else {
                let details = "upstream_reset_after_response_started";
                state.seen.borrow_mut().code_details = Some(details.into());
                vm.reset(stream);
            }
        }
    }
}
