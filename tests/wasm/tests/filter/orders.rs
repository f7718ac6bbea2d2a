//! Every order of events of a single request, up to a length.

use crate::stand::{
    DONE, ERROR, ROLE, TOKEN, assert_quiet, bare, chat, endings, engine_error, prefilled,
    stream_headers,
};
use pd_wasm_tests::{Ending, Exchange, Flight, Gateway, Script};

/// What can happen to a request from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A call is answered as a healthy engine does.
    Good,
    /// A call is answered 503.
    Busy,
    /// A call is answered 400.
    Refused,
    /// A call's connection breaks.
    Lost,
    /// The oldest of several calls is answered: the late reply of a leg that was given up.
    Late,
    /// The client goes away.
    Gone,
    /// The prefill timeout passes, and every decode timer that is set.
    Time,
    /// Response headers of the decode leg.
    Headers,
    /// The first event, without content.
    Role,
    /// An event with content.
    Token,
    /// An error event.
    Error,
    /// The end of the response.
    End,
    /// The decode leg breaks.
    Break,
}

const EVENTS: [Event; 13] = [
    Event::Good,
    Event::Busy,
    Event::Refused,
    Event::Lost,
    Event::Late,
    Event::Gone,
    Event::Time,
    Event::Headers,
    Event::Role,
    Event::Token,
    Event::Error,
    Event::End,
    Event::Break,
];

/// One request and how far its response is.
struct Run {
    flight: Flight,
    first_call: usize,
    responding: bool,
    responded: bool,
}

impl Run {
    fn start(gateway: &mut Gateway, exchange: Exchange) -> Self {
        let first_call = gateway.calls().len();
        Self {
            flight: gateway.send(exchange),
            first_call,
            responding: false,
            responded: false,
        }
    }

    /// Whether an event can happen now.
    fn is_possible(&self, gateway: &Gateway, event: Event) -> bool {
        let pending = gateway.pending_calls().len();
        let outcome = gateway.outcome(self.flight);
        let open = outcome.ending == Ending::Open;
        let leg = open && outcome.upstream.is_some() && !self.responded;
        match event {
            Event::Good | Event::Busy | Event::Refused | Event::Lost => pending > 0,
            Event::Time => pending > 0 || leg,
            Event::Late => pending > 1,
            Event::Gone => open,
            Event::Headers => leg && !self.responding,
            Event::Role | Event::Token | Event::Error | Event::End => leg && self.responding,
            Event::Break => leg,
        }
    }

    fn apply(&mut self, gateway: &mut Gateway, event: Event) {
        let pending = gateway.pending_calls();
        let newest = pending.last().map(|call| call.id);
        let oldest = pending.first().map(|call| call.id);
        match event {
            Event::Good => gateway.answer(newest.unwrap(), prefilled()),
            Event::Busy => gateway.answer(newest.unwrap(), engine_error(503)),
            Event::Refused => gateway.answer(newest.unwrap(), engine_error(400)),
            Event::Lost => gateway.answer(newest.unwrap(), Script::reset()),
            Event::Late => gateway.answer(oldest.unwrap(), prefilled()),
            Event::Gone => gateway.disconnect(self.flight),
            Event::Time => gateway.advance(1100),
            Event::Headers => {
                self.responding = true;
                stream_headers(gateway, self.flight);
            }
            Event::Role => gateway.respond_data(self.flight, ROLE.as_bytes(), false),
            Event::Token => gateway.respond_data(self.flight, TOKEN.as_bytes(), false),
            Event::Error => gateway.respond_data(self.flight, ERROR.as_bytes(), false),
            Event::End => {
                self.responded = true;
                gateway.respond_data(self.flight, DONE.as_bytes(), true);
            }
            Event::Break => {
                self.responded = true;
                gateway.respond_reset(self.flight);
            }
        }
    }

    /// Ends whatever is still open.
    fn end(self, gateway: &mut Gateway) {
        for _ in 0..8 {
            let Some(call) = gateway.pending_calls().pop() else {
                break;
            };
            gateway.answer(call.id, engine_error(500));
        }
        if gateway.outcome(self.flight).ending == Ending::Open {
            gateway.disconnect(self.flight);
        }
        assert!(gateway.pending_calls().is_empty());
        // At most one retry, and one freeing call for each leg.
        assert!(gateway.calls().len() - self.first_call <= 4);
    }
}

/// Runs every sequence of at most `depth` events; returns how many there were.
fn explore(plugin: &str, exchange: &Exchange, depth: usize) -> u64 {
    let mut gateway = bare(1, plugin);
    let mut on_this_gateway = 0;
    let mut sequences = 0;
    let mut open: Vec<Vec<Event>> = vec![Vec::new()];
    while let Some(prefix) = open.pop() {
        let before = endings(&mut gateway);
        let mut run = Run::start(&mut gateway, exchange.clone());
        for event in &prefix {
            run.apply(&mut gateway, *event);
        }
        if prefix.len() < depth {
            let next = EVENTS
                .iter()
                .filter(|event| run.is_possible(&gateway, **event));
            open.extend(next.map(|event| [&prefix[..], &[*event]].concat()));
        }
        run.end(&mut gateway);
        let faults = gateway.take_faults();
        assert!(faults.is_empty(), "{prefix:?}: {faults:?}");
        assert_eq!(endings(&mut gateway) - before, 1, "{prefix:?}");
        let held = crate::stand::charged(&mut gateway);
        assert_eq!(held, Default::default(), "{prefix:?}");
        sequences += 1;
        on_this_gateway += 1;
        if on_this_gateway == 100 {
            assert_quiet(&mut gateway, 1);
            gateway = bare(1, plugin);
            on_this_gateway = 0;
        }
    }
    assert_quiet(&mut gateway, 1);
    sequences
}

#[test]
fn any_order_ends_once_and_at_zero() {
    let sequences = explore(r#"{"prefillRequestTimeout":1}"#, &chat(true), 6);
    assert!(sequences > 500, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_under_every_timer() {
    let timers = r#"{"prefillRequestTimeout":1,"decodeFirstResponseTimeout":1,
        "decodeStreamIdleTimeout":1,"decodeResponseTimeout":1}"#;
    for stream in [true, false] {
        let sequences = explore(timers, &chat(stream), 5);
        assert!(sequences > 200, "{sequences}");
    }
}

#[test]
fn any_order_ends_once_and_at_zero_without_room_for_orphans() {
    let plugin = r#"{"prefillRequestTimeout":1,"maxOrphans":1,"prefillRetries":3}"#;
    let sequences = explore(plugin, &chat(true), 4);
    assert!(sequences > 200, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_in_one_leg() {
    let batch = Exchange::post("/v1/completions", r#"{"model":"m","prompt":["a","b"]}"#);
    let sequences = explore("", &batch, 5);
    assert!(sequences > 30, "{sequences}");
}
