//! A decode leg that failed while the prefill leg is out. When a prefill fails, its decode leg
//! fails too, and either may be heard of first; the client shall hear of the cause. So the failed
//! answer is held until the prefill is heard of, or for a moment.

use super::state::{Decoding, State};
use super::{Effect, Event, Flow};
use crate::worker::Scene;

/// How long the prefill is awaited, in ms. A tick late, it is still a quarter of a second.
const DOUBT_MS: u64 = 100;

/// A failed decode leg that its client has not heard of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doubt {
    /// When the client is told, in ms of the shared clock.
    pub(super) until: u64,
    failed: Failed,
}

/// How a decode leg failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Failed {
    /// By an error answer of the engine; `whole` when all of it is here.
    Answer { whole: bool },
    /// Its stream began with an error.
    HandOver,
}

impl Flow {
    /// Keeps the failure to itself for now.
    pub(super) fn doubt(
        mut leg: Decoding,
        failed: Failed,
        scene: &Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        effects.push(Effect::Hold);
        leg.held = true;
        leg.doubt = Some(Doubt {
            until: scene.now_ms.saturating_add(DOUBT_MS),
            failed,
        });
        State::Decoding(leg)
    }

    /// Something happens while the prefill is awaited; the client is still there.
    pub(super) fn in_doubt(
        &self,
        mut leg: Decoding,
        doubt: Doubt,
        event: Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        match event {
            Event::CallReply { .. } | Event::CallFailed | Event::CallLost(_) => {
                match self.prefill_verdict(leg, event, scene, effects) {
                    State::Decoding(leg) => self.tell_decode_failure(leg, scene, effects),
                    ended => ended,
                }
            }
            Event::ResponseChunk { end, .. } => {
                effects.push(Effect::Hold);
                if let (Failed::Answer { .. }, true) = (doubt.failed, end) {
                    leg.doubt = Some(Doubt {
                        failed: Failed::Answer { whole: true },
                        ..doubt
                    });
                }
                State::Decoding(leg)
            }
            Event::Due if leg.prefill_late(scene.now_ms) => {
                self.prefill_verdict(leg, event, scene, effects)
            }
            Event::Due if scene.now_ms >= doubt.until => {
                self.tell_decode_failure(leg, scene, effects)
            }
            _ => State::Decoding(leg),
        }
    }

    /// The decode leg itself is to blame, as far as anybody knows.
    fn tell_decode_failure(
        &self,
        mut leg: Decoding,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Some(doubt) = leg.doubt.take() else {
            return State::Decoding(leg);
        };
        let Failed::Answer { whole } = doubt.failed else {
            return self.not_taken_over(leg, scene, effects);
        };
        leg.held = false;
        effects.push(Effect::Resume);
        if let Some(status) = leg.status {
            self.judge_status(&leg, status, scene, effects);
        }
        if whole {
            self.answered(leg, scene, effects)
        } else {
            State::Decoding(leg)
        }
    }
}
