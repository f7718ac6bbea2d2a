//! The life of one request: event × now → effects.
//!
//! ```text
//! Receiving ──body──▶ (choose and charge) ──┬─ one leg ──────────────▶ Decoding ──end──▶ Ended
//!     │  ▲                                  └─ pair ─▶ Prefilling ─ok─▶    │
//!     ▼  │ snapshot                             │  │  ▲                   └─ silence ─▶ Ended
//!  Awaiting                              failure│  │  └─ body again ─┐
//!                                               ▼  │                 │
//!                                           Rereading ───────────────┘
//!                                                  └─ client gone ─▶ Orphaned ─▶ Freeing ─▶ Ended
//!
//! Legs that go together: (choose and charge) ──▶ Decoding, by way of Preparing where the prefill
//! pod is asked first; the prefill call is out while Decoding.
//! Decoding of an engine that aborts ── silence, client gone ─▶ Aborting ─▶ Ended
//! ```
//!
//! Invariants: a state holds only what it needs; every way to `Ended` passes `ending.rs`, which
//! gives the charges back once and counts one ending; an event that a state does not expect
//! changes nothing. A flow never keeps the body: the host's buffer holds it, and a retry reads
//! it again.

mod abort;
mod affinity;
mod arrive;
mod decode;
mod doubt;
mod effect;
mod ending;
mod event;
mod explain;
mod head;
mod length;
mod orphan;
mod plan;
mod prefill;
mod prepare;
mod session;
pub mod sse;
mod state;
#[cfg(test)]
mod tests;
mod timers;
mod together;
mod unserved;
mod verdict;

pub use crate::request::patch::BodyEdit;
pub use effect::{Call, Effect, Leg};
pub use event::{Event, Lost};
pub use explain::explain;
pub use head::{Head, Route, route};

use crate::reply::{Fault, PrefillFailure};
use crate::worker::Scene;
use state::State;
use std::rc::Rc;

/// How often a request without a body is probed, and one without a snapshot looks again, in ms.
const POLL_MS: u64 = 50;

/// One request.
#[derive(Debug)]
pub struct Flow {
    head: Rc<Head>,
    /// Fresh id of the current attempt; both legs carry it.
    request_id: String,
    /// Model of the snapshot, once the body named one.
    model: Option<Rc<str>>,
    state: State,
}

impl Flow {
    /// A request whose headers arrived. `probe` asks to find out whether its body is hidden.
    #[must_use]
    pub fn new(head: Head, probe: bool, scene: &mut Scene<'_>) -> Self {
        scene.worker.in_flight = scene.worker.in_flight.saturating_add(1);
        Self {
            head: Rc::new(head),
            request_id: scene.worker.ids.request_id(),
            model: None,
            state: State::Receiving {
                probe_at: probe.then(|| scene.now_ms.saturating_add(POLL_MS)),
            },
        }
    }

    /// Id of the request at the engines and in the log.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// When `Due` is wanted, in ms of the shared clock.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.state.deadline()
    }

    /// True when nothing more will come of it.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// True while the client's stream is over and the work is not.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        matches!(
            self.state,
            State::Orphaned(_) | State::Freeing(_) | State::Aborting(_)
        )
    }

    /// For `ms` nobody listened to the pods: that time is none of their silence.
    pub fn unheard_for(&mut self, ms: u64) {
        if let State::Decoding(leg) = &mut self.state {
            leg.watch.unheard_for(ms);
        }
    }

    /// True when the answer may be an event stream, so that its content type matters.
    #[must_use]
    pub fn awaits_events(&self) -> bool {
        matches!(&self.state, State::Decoding(decoding) if decoding.choice.streams)
    }

    /// True when response chunks must be handed in with their bytes.
    #[must_use]
    pub fn reads_response(&self) -> bool {
        matches!(&self.state, State::Decoding(decoding) if decoding.opening.is_some())
    }

    /// Handles one event.
    pub fn on(&mut self, event: Event<'_>, scene: &mut Scene<'_>) -> Vec<Effect> {
        let mut effects = Vec::new();
        let state = std::mem::replace(&mut self.state, State::Ended);
        self.state = match (state, event) {
            (State::Receiving { .. }, Event::Body(body)) => {
                self.arrive(body, Attempt::first(scene.now_ms), scene, &mut effects)
            }
            (State::Awaiting { since, .. }, Event::Body(body)) => {
                self.arrive(body, Attempt::first(since), scene, &mut effects)
            }
            (State::Rereading(attempt), Event::Body(body)) => {
                self.arrive(body, attempt, scene, &mut effects)
            }
            (State::Receiving { .. }, Event::Due) => {
                effects.push(Effect::ProbeBody);
                State::Receiving {
                    probe_at: Some(scene.now_ms.saturating_add(POLL_MS)),
                }
            }
            (State::Receiving { .. }, Event::Probed { hidden_body: true }) => {
                effects.push(Effect::Warn(Fault::Misconfigured.to_string()));
                self.fail(&Fault::Misconfigured, scene, &mut effects)
            }
            (State::Awaiting { since, .. }, Event::Due) => self.wait(since, scene, &mut effects),
            (State::Preparing(leg), event) => self.preparing(leg, event, scene, &mut effects),
            (State::Prefilling(leg), event) => self.prefilling(leg, event, scene, &mut effects),
            (State::Decoding(leg), event) => self.decoding(leg, event, scene, &mut effects),
            (State::Orphaned(leg), event) => self.orphaned(leg, event, scene, &mut effects),
            (State::Freeing(leg), event) => self.freeing(leg, event, scene, &mut effects),
            (State::Aborting(leg), event) => self.aborting(leg, event, scene, &mut effects),
            (
                State::Receiving { .. } | State::Awaiting { .. } | State::Rereading(_),
                Event::Gone { .. },
            ) => self.client_gone(scene, &mut effects),
            (
                State::Receiving { .. } | State::Awaiting { .. } | State::Rereading(_),
                Event::ResponseHeaders { status, .. },
            ) => self.ended("proxy_refused", status, scene, &mut effects),
            (state, _) => state,
        };
        effects
    }
}

/// One try at serving a request.
#[derive(Debug)]
struct Attempt {
    /// When the first body was complete.
    since: u64,
    /// Prefill pods tried before.
    tried: Vec<crate::ledger::PodKey>,
    /// Prompt tokens of its session's turn before, once that was looked up.
    tokens_before: Option<u64>,
    /// How the last try failed.
    failure: Option<(PrefillFailure, String)>,
}

impl Attempt {
    fn first(since: u64) -> Self {
        Self {
            since,
            tried: Vec::new(),
            tokens_before: None,
            failure: None,
        }
    }

    /// What the client hears of the failure when there is no further try.
    fn fault(&self) -> Option<Fault> {
        let (failure, detail) = self.failure.as_ref()?;
        Some(Fault::Prefill {
            failure: *failure,
            detail: detail.clone(),
        })
    }
}
