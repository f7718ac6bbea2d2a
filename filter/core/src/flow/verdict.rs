//! What the end of a leg says about the pods that served it, handed to the ejections.
//!
//! | what happened | who | says |
//! |---|---|---|
//! | prefill 200 with an object | prefill pod | works |
//! | prefill 200 with anything else, refused, cut, late, 5xx but 503 | prefill pod | fails |
//! | decode refused or cut, before or after it began | decode pod | fails |
//! | 5xx but 503, or silence, of a decode leg that took KV over | pair | fails |
//! | the same of any other leg | its pod | fails |
//! | first event of a stream is an error | pair | fails |
//! | first content, or a whole answer, after KV was handed over | pair | works |
//! | answer below 400 begins, ends | decode pod | answers, works |
//! | 4xx, 503, a client that left, a call that never left, the call that frees KV | – | nothing |

use super::state::{Choice, Decoding};
use super::{Effect, Event, Flow, Lost};
use crate::eject::{Cause, Change, Evidence, Outcome, Rules, Subject};
use crate::engine::HandOver;
use crate::fleet::{FleetPod, ModelFleet};
use crate::meters::{Count, Meter};
use crate::worker::Scene;

/// Who is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The prefill pod.
    Prefill,
    /// The pod that answers.
    Decode,
    /// Both together.
    Pair,
}

impl Flow {
    /// Tells the ejections how a leg went, and the operator what they made of it.
    pub(super) fn judge(
        &self,
        choice: &Choice,
        part: Part,
        outcome: Outcome,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let keys = (
            choice.prefill_pod().map(|pod| pod.key),
            choice.decode_pod().map(|pod| pod.key),
        );
        let subject = match (part, keys) {
            (Part::Prefill, (Some(pod), _)) | (Part::Decode, (_, Some(pod))) => Subject::Pod(pod),
            (Part::Pair, (Some(prefill), Some(decode))) => Subject::Pair(prefill, decode),
            _ => return,
        };
        if let (Outcome::Fails(_), Some(pod)) = (outcome, keys.0) {
            // It may be another process by now, at another place.
            scene.worker.context_workers.forget(pod);
        }
        let evidence = Evidence {
            subject,
            outcome,
            chosen_at_ms: choice.chosen_at_ms,
        };
        let rules = Rules::from(&*choice.knobs);
        let change =
            scene
                .worker
                .eject
                .report(scene.store, &choice.fleet, &evidence, &rules, scene.now_ms);
        let Some(change) = change else { return };
        effects.push(Effect::Warn(describe(
            &choice.fleet,
            subject,
            outcome,
            change,
        )));
        if let (Change::Ejected { .. }, Outcome::Fails(cause)) = (change, outcome) {
            let kind = match part {
                Part::Pair => "pair",
                Part::Prefill => "prefill",
                Part::Decode if choice.prefill.is_some() => "decode",
                Part::Decode => "one_leg",
            };
            effects.push(Effect::Count(
                Count::new(Meter::Ejection, self.model.clone())
                    .word("kind", kind)
                    .word("class", cause.name()),
            ));
        }
    }

    /// What became of a prefill call; what a 200 says depends on its body.
    pub(super) fn judge_prefill(
        &self,
        choice: &Choice,
        deadline: u64,
        event: &Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(cause) = cause_of_call(event, scene.now_ms >= deadline) {
            self.judge(choice, Part::Prefill, Outcome::Fails(cause), scene, effects);
        }
    }

    /// The same for legs that go together. Each waits for the other, so only a broken connection
    /// speaks of the prefill pod alone.
    pub(super) fn judge_together(
        &self,
        choice: &Choice,
        event: &Event<'_>,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(cause) = cause_of_call(event, true) else {
            return;
        };
        let part = match cause {
            Cause::Transport | Cause::Cut => Part::Prefill,
            _ => Part::Pair,
        };
        self.judge(choice, part, Outcome::Fails(cause), scene, effects);
    }

    /// What a prefill engine's 200 says.
    pub(super) fn judge_answer(
        &self,
        choice: &Choice,
        handed_over: &HandOver,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let outcome = match handed_over {
            HandOver::NotAnObject => Outcome::Fails(Cause::BadResponse),
            HandOver::Members(_) | HandOver::Unusable(_) | HandOver::Nothing => Outcome::Works,
        };
        self.judge(choice, Part::Prefill, outcome, scene, effects);
    }

    /// The decode engine's answer has begun.
    pub(super) fn judge_status(
        &self,
        leg: &Decoding,
        status: u16,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) {
        if status < 400 {
            self.judge(&leg.choice, Part::Decode, Outcome::Answers, scene, effects);
        } else if let Some(cause) = Cause::of_status(status) {
            self.judge(
                &leg.choice,
                leg.liable(),
                Outcome::Fails(cause),
                scene,
                effects,
            );
        }
    }
}

impl Decoding {
    /// Who answers for a leg that goes wrong in the engine.
    pub(super) fn liable(&self) -> Part {
        if self.took_kv {
            Part::Pair
        } else {
            Part::Decode
        }
    }
}

/// What the end of a prefill call says about its pod, `is_late` or not.
fn cause_of_call(event: &Event<'_>, is_late: bool) -> Option<Cause> {
    match *event {
        Event::CallReply { status, .. } => Cause::of_status(status),
        Event::CallFailed => Some(Cause::Transport),
        Event::CallLost(Lost::Cut) => Some(Cause::Cut),
        Event::Due if is_late => Some(Cause::Timeout),
        _ => None,
    }
}

/// What the proxy's words for an answer of its own say about the pod.
pub(super) fn cause_of(details: &str) -> Option<Cause> {
    let reason = details.strip_prefix("upstream_reset_before_response_started")?;
    if reason.contains("overflow") {
        // The proxy's own limit.
        None
    } else if reason.contains("connection_termination") {
        Some(Cause::Cut)
    } else {
        Some(Cause::Transport)
    }
}

fn describe(fleet: &ModelFleet, subject: Subject, outcome: Outcome, change: Change) -> String {
    let name = |key| {
        let pod = fleet.pods.iter().find(|pod| pod.key == key);
        pod.map_or_else(
            String::new,
            |FleetPod {
                 namespace, name, ..
             }| format!("{namespace}/{name}"),
        )
    };
    let who = match subject {
        Subject::Pod(pod) => format!("pod {}", name(pod)),
        Subject::Pair(prefill, decode) => format!("pair {} + {}", name(prefill), name(decode)),
    };
    match (change, outcome) {
        (Change::Ejected { for_ms, failures }, Outcome::Fails(cause)) => format!(
            "{who} of model {} is ejected for {} s: {} after {failures} failures in a row",
            fleet.name,
            for_ms.div_ceil(1000),
            cause.name(),
        ),
        _ => format!("{who} of model {} serves again", fleet.name),
    }
}
