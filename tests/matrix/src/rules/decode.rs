//! Decode legs.

use super::At;
use crate::cell::{Cell, Engine, Fault, Leg, Moment, Reach};
use crate::expect::{ABORT, Count, Due, Expect, Marker, PAIR_FAILURE, WATCHDOG};
use crate::layout::Layout;
use crate::{FIRST_RESPONSE_MS, RESPONSE_MS, STREAM_IDLE_MS, VERDICT_MS};

const FAILED: (&str, &str) = ("decode_failed", "");
const UNREACHABLE: &str = "decode refused or reset before headers: 503";
const PASSED_ON: &str = "decode error status: an engine's own error passes through untouched";
const ERROR_EVENT: &str = "decode stream opens with an error: 502, not a 200 that carries one";
const WATCHED: &str = "decode hangs: 504 while nothing reached the client";
const WATCHED_CUT: &str = "decode hangs: counted with 504 even when the client saw a cut 200";
const BROKEN: &str = "decode breaks after headers: the answer is cut, and counted once";
const ITS_OWN: &str =
    "whether a cut generation worker lets the context go is TensorRT-LLM's own affair";
const ASKED_ONCE: &str = "a generation worker that had the request may have taken the context, which is not asked for twice";
const NOBODY: &str =
    "the only decode pod cannot be reached, so no engine can be asked to free the KV";

/// The cells of one engine and way to answer.
pub(super) fn cells(at: At, cells: &mut Vec<Cell>) {
    unreachable(at, cells);
    refused(at, cells);
    silent(at, cells);
    broken(at, cells);
    if at.stream {
        error_event(at, cells);
    }
}

/// Where the KV goes when the decode leg failed and did not take it: a sequential engine's is freed
/// by a call to a decode pod, if one `answers`; of together engines the leg that waits is aborted
/// or ended.
fn let_go(at: At, expect: Expect, answers: bool) -> Expect {
    if at.engine.is_together() || answers {
        expect
    } else {
        expect.leased(NOBODY)
    }
}

/// The same when the decode engine had the request.
fn let_go_later(at: At, expect: Expect) -> Expect {
    if at.engine == Engine::TrtContextFirst {
        expect.leased(ASKED_ONCE)
    } else {
        let_go(at, expect, true)
    }
}

/// No response headers.
fn unreachable(at: At, cells: &mut Vec<Cell>) {
    for fault in [Fault::Refused, Fault::Reset, Fault::Dies] {
        for layout in [Layout::OnePair, Layout::TwoDecodes] {
            let answers = fault == Fault::Reset || layout == Layout::TwoDecodes;
            if layout == Layout::TwoDecodes && (fault == Fault::Reset || at.engine.is_together()) {
                continue;
            }
            let expect = Expect::error(503, Marker::Decode, FAILED, Due::AT_ONCE, UNREACHABLE);
            let expect = expect.leaves_open(PAIR_FAILURE);
            let expect = if fault != Fault::Refused && answers {
                let_go_later(at, expect)
            } else {
                let_go(at, expect, answers)
            };
            let cell = at.cell(Leg::Decode, Moment::Decoding, fault, expect);
            cells.push(cell.with_pods(layout, Reach::First));
        }
    }
}

/// An error of the engine's own. Of a together engine it may wait for the prefill's verdict.
fn refused(at: At, cells: &mut Vec<Cell>) {
    for status in [400, 429, 500, 503] {
        let due = if at.engine.is_together() {
            Due::by(VERDICT_MS)
        } else {
            Due::AT_ONCE
        };
        let expect = Expect::engine(status, Marker::None, due, PASSED_ON);
        let expect = let_go_later(at, expect.leaves_open(PAIR_FAILURE));
        cells.push(at.cell(Leg::Decode, Moment::Decoding, Fault::Status(status), expect));
    }
}

/// The engine says nothing, or no more, after the prefill has succeeded.
fn silent(at: At, cells: &mut Vec<Cell>) {
    let moments: &[Moment] = if at.stream {
        &[
            Moment::Decoding,
            Moment::Headers,
            Moment::Role,
            Moment::Body,
        ]
    } else {
        &[Moment::Decoding, Moment::Body]
    };
    for &moment in moments {
        let (limit, phase, class) = match (at.stream, moment) {
            (false, _) => (RESPONSE_MS, "first_response", "watchdog_first_response"),
            (true, Moment::Decoding | Moment::Headers) => (
                FIRST_RESPONSE_MS,
                "first_response",
                "watchdog_first_response",
            ),
            (true, _) => (STREAM_IDLE_MS, "stream_idle", "watchdog_stream_idle"),
        };
        let due = Due::timer(limit);
        let expect = if moment == Moment::Body {
            Expect::cut("pd_decode_watchdog", Some(504), due, WATCHED_CUT)
        } else {
            Expect::error(504, Marker::Decode, ("decode_timeout", ""), due, WATCHED)
        };
        let expect =
            expect
                .leaves_open(PAIR_FAILURE)
                .counts(WATCHDOG, &[("phase", phase)], Count::Is(1));
        let expect = if at.engine.aborts() {
            let labels = [("prefill_failure_class", class), ("result", "ok")];
            expect.counts(ABORT, &labels, Count::Is(1))
        } else {
            expect
        };
        // vLLM's decode engine tells the prefill engine when its client goes away.
        let expect = if moment != Moment::Body && at.engine == Engine::TrtContextFirst {
            expect.leased(ITS_OWN)
        } else {
            expect
        };
        cells.push(at.cell(Leg::Decode, moment, Fault::Stall, expect));
    }
}

/// The connection breaks after response headers.
fn broken(at: At, cells: &mut Vec<Cell>) {
    let moments: &[Moment] = if at.stream {
        &[Moment::Headers, Moment::Role, Moment::Body]
    } else {
        &[Moment::Body]
    };
    for &moment in moments {
        for fault in [Fault::Reset, Fault::Dies] {
            if fault == Fault::Dies && moment != Moment::Body {
                continue;
            }
            let expect =
                Expect::cut("engine_cut", None, Due::AT_ONCE, BROKEN).leaves_open(PAIR_FAILURE);
            let expect = if moment == Moment::Body {
                expect
            } else {
                let_go_later(at, expect)
            };
            cells.push(at.cell(Leg::Decode, moment, fault, expect));
        }
    }
}

/// The stream opens with an error.
fn error_event(at: At, cells: &mut Vec<Cell>) {
    for moment in [Moment::Headers, Moment::Role] {
        let expect = Expect::error(502, Marker::Decode, FAILED, Due::AT_ONCE, ERROR_EVENT).counts(
            PAIR_FAILURE,
            &[],
            Count::Is(1),
        );
        let expect = let_go_later(at, expect);
        cells.push(at.cell(Leg::Decode, moment, Fault::ErrorEvent, expect));
    }
}
