//! The rules that make the table.
//!
//! Combinations that make no sense are left out: a stream's faults for whole answers, faults of
//! replies that an engine does not give, retries where both legs are out.

mod client;
mod decode;
mod prefill;

use crate::cell::{Cell, Engine, Fallback, Fault, Leg, Moment, Reach, RunsOn};
use crate::expect::{Due, Expect};
use crate::layout::Layout;

/// The table.
#[must_use]
pub fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for engine in Engine::ALL {
        for stream in [true, false] {
            let at = At { engine, stream };
            healthy(at, &mut cells);
            prefill::cells(at, &mut cells);
            decode::cells(at, &mut cells);
            client::cells(at, &mut cells);
        }
    }
    cells
}

/// Whose cells are made.
#[derive(Clone, Copy, Debug)]
struct At {
    engine: Engine,
    stream: bool,
}

impl At {
    /// A cell with a pair, whose fault strikes the first pods.
    fn cell(self, leg: Leg, moment: Moment, fault: Fault, expect: Expect) -> Cell {
        Cell {
            engine: self.engine,
            stream: self.stream,
            leg,
            moment,
            fault,
            reach: Reach::First,
            layout: Layout::OnePair,
            fallback: Fallback::Strict,
            runs_on: runs_on(self.engine, leg, moment, fault),
            expect,
        }
    }
}

impl Cell {
    fn with_pods(mut self, layout: Layout, reach: Reach) -> Self {
        (self.layout, self.reach) = (layout, reach);
        self
    }
}

/// Nothing breaks, or nothing more than what is allowed.
fn healthy(at: At, cells: &mut Vec<Cell>) {
    let why = "a timer ends no request that is in time";
    let slow = Expect::healthy(Due::timer(crate::SLOW_MS), why);
    let whole = Expect::healthy(Due::AT_ONCE, why);
    cells.push(at.cell(Leg::Prefill, Moment::Prefilling, Fault::None, whole));
    cells.push(at.cell(Leg::Prefill, Moment::Prefilling, Fault::Slow, slow));
    if at.stream {
        let gaps = Expect::healthy(Due::between(crate::GAP_MS, 3 * crate::GAP_MS), why);
        cells.push(at.cell(Leg::Decode, Moment::Body, Fault::Gaps, gaps));
    }
}

/// A real Envoy with simulated engines runs all of vLLM's and SGLang's; of the second connector
/// and of TensorRT-LLM what another protocol can change. A simulated engine cannot fail a prefill
/// leg with a status after its decode leg has begun.
fn runs_on(engine: Engine, leg: Leg, moment: Moment, fault: Fault) -> RunsOn {
    let begun = matches!(moment, Moment::Headers | Moment::Role | Moment::Body);
    if leg == Leg::Prefill && begun && !(moment == Moment::Body && fault == Fault::Reset) {
        return RunsOn::Host;
    }
    let on_envoy = match engine {
        Engine::VllmShfs | Engine::Sglang => true,
        Engine::VllmNixl => matches!(
            fault,
            Fault::None | Fault::Late | Fault::ErrorEvent | Fault::Refused
        ),
        Engine::TrtContextFirst | Engine::TrtGenerationFirst => {
            moment == Moment::Asking
                || matches!(
                    fault,
                    Fault::None
                        | Fault::Refused
                        | Fault::Reset
                        | Fault::Stall
                        | Fault::Status(500)
                        | Fault::NoKv
                        | Fault::ClientLeaves
                )
        }
    };
    if on_envoy { RunsOn::Both } else { RunsOn::Host }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ids_and_models_name_one_cell_each() {
        let cells = cells();
        let ids: BTreeSet<String> = cells.iter().map(Cell::id).collect();
        let models: BTreeSet<String> = cells.iter().map(Cell::model).collect();
        assert_eq!((ids.len(), models.len()), (cells.len(), cells.len()));
        assert!(models.iter().all(|model| model.len() < 128));
    }

    #[test]
    fn the_table_is_large_enough_and_most_of_it_runs_in_the_host() {
        let cells = cells();
        let count = |place: fn(RunsOn) -> bool| cells.iter().filter(|c| place(c.runs_on)).count();
        let host = count(|place| place != RunsOn::Envoy);
        let envoy = count(|place| place != RunsOn::Host);
        println!(
            "{} cells, {host} in the host, {envoy} on Envoy",
            cells.len()
        );
        assert!(cells.len() >= 120);
        assert!(host * 2 >= cells.len());
    }

    #[test]
    fn every_kind_of_fault_of_every_leg_meets_a_real_envoy() {
        let cells = cells();
        let kinds = |envoy: bool| -> BTreeSet<_> {
            let run = cells
                .iter()
                .filter(|cell| !envoy || cell.runs_on != RunsOn::Host);
            run.map(|cell| (cell.leg, cell.fault.kind())).collect()
        };
        assert_eq!(kinds(true), kinds(false));
    }

    /// Faults that only a stream, or only a whole answer, can have.
    #[test]
    fn every_fault_of_every_engine_strikes_streams_and_whole_answers() {
        let of_streams = [Fault::Gaps, Fault::ErrorEvent];
        let cells = cells();
        let faults = |stream: bool| -> BTreeSet<_> {
            cells
                .iter()
                .filter(|cell| cell.stream == stream && !of_streams.contains(&cell.fault))
                .map(|cell| (cell.engine, cell.leg, cell.fault))
                .collect()
        };
        assert_eq!(faults(true), faults(false));
    }

    #[test]
    fn bounds_are_the_knob_and_what_is_allowed_on_top() {
        for cell in cells() {
            let due = cell.expect.due;
            let beyond = crate::TICK_MS + crate::SLACK_MS;
            assert!(due.to_ms >= due.from_ms + beyond, "{}", cell.id());
            assert!(!cell.expect.why.is_empty());
        }
    }
}
