//! Every order of events of a single request, up to a length.

use crate::stand::{
    DONE, ERROR, ROLE, TOKEN, assert_quiet, chat, endings, engine_error, good, pairs_of,
    stream_headers,
};
use pd_wasm_tests::{Ending, Exchange, Flight, Gateway, Script};
use pd_wire::control::Charged;

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
    /// Those of an error answer.
    Fails,
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

const EVENTS: [Event; 14] = [
    Event::Good,
    Event::Busy,
    Event::Refused,
    Event::Lost,
    Event::Late,
    Event::Gone,
    Event::Time,
    Event::Headers,
    Event::Fails,
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
            Event::Headers | Event::Fails => leg && !self.responding,
            Event::Role | Event::Token | Event::Error | Event::End => leg && self.responding,
            Event::Break => leg,
        }
    }

    fn apply(&mut self, gateway: &mut Gateway, event: Event) {
        let pending = gateway.pending_calls();
        let newest = pending.last().map(|call| call.id);
        match event {
            Event::Good => {
                let call = pending.last().unwrap();
                gateway.answer(call.id, good(call));
            }
            Event::Busy => gateway.answer(newest.unwrap(), engine_error(503)),
            Event::Refused => gateway.answer(newest.unwrap(), engine_error(400)),
            Event::Lost => gateway.answer(newest.unwrap(), Script::reset()),
            Event::Late => {
                let call = pending.first().unwrap();
                gateway.answer(call.id, good(call));
            }
            Event::Gone => gateway.disconnect(self.flight),
            Event::Time => gateway.advance(1100),
            Event::Headers => {
                self.responding = true;
                stream_headers(gateway, self.flight);
            }
            Event::Fails => {
                self.responding = true;
                gateway.respond_headers(self.flight, &[(":status", "500")], false);
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
    fn end(self, gateway: &mut Gateway, most_calls: usize) {
        for _ in 0..24 {
            if let Some(call) = gateway.pending_calls().pop() {
                gateway.answer(call.id, engine_error(500));
            } else if gateway.outcome(self.flight).ending == Ending::Open {
                gateway.disconnect(self.flight);
            } else if crate::stand::charged(gateway) != Charged::default() {
                // A second round of aborts follows.
                gateway.advance(1100);
            } else {
                break;
            }
        }
        assert!(gateway.pending_calls().is_empty());
        assert!(gateway.calls().len() - self.first_call <= most_calls);
    }
}

/// What is explored.
struct Space {
    engine: &'static str,
    plugin: &'static str,
    exchange: Exchange,
    /// Most events of a sequence.
    depth: usize,
    /// Most calls of a sequence.
    most_calls: usize,
    /// Sequences on one gateway: more than one only where no memory of one changes the next.
    per_gateway: u32,
}

impl Space {
    fn of_vllm(plugin: &'static str, exchange: Exchange, depth: usize) -> Self {
        Self {
            engine: "vllm",
            plugin,
            exchange,
            depth,
            // At most one retry, and one freeing call for each leg.
            most_calls: 4,
            per_gateway: 100,
        }
    }

    /// Runs every sequence; returns how many there were.
    fn explore(&self) -> u64 {
        let mut gateway = pairs_of(1, self.engine, self.plugin);
        let mut on_this_gateway = 0;
        let mut sequences = 0;
        let mut open: Vec<Vec<Event>> = vec![Vec::new()];
        while let Some(prefix) = open.pop() {
            let before = endings(&mut gateway);
            let mut run = Run::start(&mut gateway, self.exchange.clone());
            for event in &prefix {
                run.apply(&mut gateway, *event);
            }
            if prefix.len() < self.depth {
                let next = EVENTS
                    .iter()
                    .filter(|event| run.is_possible(&gateway, **event));
                open.extend(next.map(|event| [&prefix[..], &[*event]].concat()));
            }
            run.end(&mut gateway, self.most_calls);
            let faults = gateway.take_faults();
            assert!(faults.is_empty(), "{prefix:?}: {faults:?}");
            assert_eq!(endings(&mut gateway) - before, 1, "{prefix:?}");
            let held = crate::stand::charged(&mut gateway);
            assert_eq!(held, Charged::default(), "{prefix:?}");
            sequences += 1;
            on_this_gateway += 1;
            if on_this_gateway == self.per_gateway {
                assert_quiet(&mut gateway, 1);
                gateway = pairs_of(1, self.engine, self.plugin);
                on_this_gateway = 0;
            }
        }
        assert_quiet(&mut gateway, 1);
        sequences
    }
}

#[test]
fn any_order_ends_once_and_at_zero() {
    let space = Space::of_vllm(r#"{"prefillRequestTimeout":1}"#, chat(true), 6);
    let sequences = space.explore();
    assert!(sequences > 500, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_without_room_for_orphans() {
    let plugin = r#"{"prefillRequestTimeout":1,"maxOrphans":1,"prefillRetries":3}"#;
    let sequences = Space::of_vllm(plugin, chat(true), 4).explore();
    assert!(sequences > 200, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_in_one_leg() {
    let batch = Exchange::post("/v1/completions", r#"{"model":"m","prompt":["a","b"]}"#);
    let sequences = Space::of_vllm("", batch, 5).explore();
    assert!(sequences > 30, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_with_both_legs_in_a_room() {
    let space = Space {
        engine: "sglang",
        plugin: r#"{"prefillRequestTimeout":1,"decodeAbortTimeout":1,"decodeAbortRetryDelay":1}"#,
        exchange: chat(true),
        depth: 5,
        // The prefill leg, and two rounds of aborts at both pods.
        most_calls: 5,
        per_gateway: 100,
    };
    let sequences = space.explore();
    assert!(sequences > 500, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_without_aborts() {
    let space = Space {
        engine: "sglang",
        plugin: r#"{"prefillRequestTimeout":1,"decodeAbortTimeout":0}"#,
        exchange: chat(false),
        depth: 5,
        most_calls: 1,
        per_gateway: 100,
    };
    let sequences = space.explore();
    assert!(sequences > 200, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_with_the_context_first() {
    let space = Space {
        engine: "trtllm",
        ..Space::of_vllm(r#"{"prefillRequestTimeout":1}"#, chat(true), 5)
    };
    let sequences = space.explore();
    assert!(sequences > 300, "{sequences}");
}

#[test]
fn any_order_ends_once_and_at_zero_with_the_generation_first() {
    let space = Space {
        engine: "trtllm",
        plugin: r#"{"prefillRequestTimeout":1,"trtScheduleStyle":"generation_first"}"#,
        exchange: chat(true),
        depth: 5,
        // Two look-ups, and the prefill leg.
        most_calls: 3,
        // Look-ups are remembered.
        per_gateway: 1,
    };
    let sequences = space.explore();
    assert!(sequences > 200, "{sequences}");
}
