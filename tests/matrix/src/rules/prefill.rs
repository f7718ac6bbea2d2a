//! Prefill legs and what is asked before them.

use super::At;
use crate::cell::{Cell, Engine, Fallback, Fault, Leg, Moment, Reach};
use crate::expect::{
    ABORT, Count, Due, Expect, Marker, ORPHAN, PAIR_FAILURE, PREFILL_FAILURE, RETRY, UNUSABLE,
};
use crate::layout::Layout;
use crate::{FAILS_AT_MS, LATE_MS, LOOK_UP_MS, PREFILL_TIMEOUT_MS, VERDICT_MS};

const FAILED: &str = "prefill_failed";
const RETRIED: &str =
    "prefill refused, reset, 429, 502, 503 with nothing sent: once more on another roleset";
const EXHAUSTED: &str =
    "prefill refused, reset, 429, 502, 503: after the retry, and nothing to fall back on, 503";
const TIMED_OUT: &str = "prefill timeout: once more on another roleset, then 504";
const REFUSED: &str = "prefill other 4xx or 5xx: its status, the engine's own message, no retry";
const NOT_JSON: &str = "prefill 200 that is no JSON object: 502 where decode waits for it";
const NOT_TERMINAL: &str =
    "prefill 200 that is no JSON object: not terminal where decode does not wait for it";
const TOGETHER: &str =
    "prefill fails after decode was sent: answered by its own status, decode aborted, pair counted";

/// The cells of one engine and way to answer.
pub(super) fn cells(at: At, cells: &mut Vec<Cell>) {
    if at.engine.is_together() {
        together(at, cells);
        begun(at, cells);
        both(at, cells);
    } else {
        retried(at, cells);
        refused(at, cells);
        hand_over(at, cells);
    }
    if at.engine == Engine::TrtGenerationFirst {
        asked(at, cells);
    }
    if at.engine.aborts() {
        aborts(at, cells);
    }
}

/// How `gateway_pd_prefill_failure_total` names a failure.
fn class(fault: Fault) -> &'static str {
    match fault {
        Fault::Status(_) => "http_status",
        Fault::Stall | Fault::Late => "timeout",
        Fault::BadJson => "bad_response",
        Fault::EmptyInfo => "request_setup",
        _ => "transport",
    }
}

fn failures(expect: Expect, fault: Fault, stage: &str, number: u64) -> Expect {
    let labels = [("class", class(fault)), ("stage", stage)];
    expect.counts(PREFILL_FAILURE, &labels, Count::Is(number))
}

/// Sequential engines: the failures that another roleset may make good.
fn retried(at: At, cells: &mut Vec<Cell>) {
    let faults = [
        Fault::Refused,
        Fault::Reset,
        Fault::Dies,
        Fault::Status(429),
        Fault::Status(503),
        Fault::Stall,
        Fault::Late,
    ];
    for fault in faults {
        let late = matches!(fault, Fault::Stall | Fault::Late);
        let (one, two, why) = if late {
            let (one, two) = (PREFILL_TIMEOUT_MS, 2 * PREFILL_TIMEOUT_MS);
            (Due::timer(one), Due::timer(two), TIMED_OUT)
        } else {
            (Due::AT_ONCE, Due::AT_ONCE, RETRIED)
        };
        // The reply that comes after all names KV, which is freed.
        let freed = |expect: Expect, number| match fault {
            Fault::Late => expect.counts(ORPHAN, &[("result", "freed")], Count::Is(number)),
            _ => expect,
        };
        let put = |expect: Expect, number| {
            let expect = expect.counts(RETRY, &[], Count::Is(1));
            freed(failures(expect, fault, "before_response", number), number)
        };
        let cell = |expect| at.cell(Leg::Prefill, Moment::Prefilling, fault, expect);
        let other = put(Expect::healthy(one, why), 1);
        cells.push(cell(other).with_pods(Layout::TwoRolesets, Reach::First));
        let (status, why) = if late { (504, why) } else { (503, EXHAUSTED) };
        let none = Expect::error(status, Marker::Prefill, (FAILED, ""), two, why);
        cells.push(cell(put(none, 2)).with_pods(Layout::TwoRolesets, Reach::All));
        if matches!(fault, Fault::Refused | Fault::Stall) {
            let alone = Expect::healthy(
                one,
                "prefillFallback decode: a decode pod computes the prompt",
            );
            let expect = failures(alone, fault, "before_response", 1);
            cells.push(Cell {
                fallback: Fallback::Decode,
                ..cell(expect)
            });
        }
    }
}

/// Sequential engines: the failures that say something of the request.
fn refused(at: At, cells: &mut Vec<Cell>) {
    for status in [400, 500] {
        let fault = Fault::Status(status);
        let expect = Expect::engine(status, Marker::Prefill, Due::AT_ONCE, REFUSED);
        let expect = failures(expect, fault, "before_response", 1);
        let cell = at.cell(Leg::Prefill, Moment::Prefilling, fault, expect);
        cells.push(cell.with_pods(Layout::TwoRolesets, Reach::First));
    }
    let expect = Expect::error(502, Marker::Prefill, (FAILED, ""), Due::AT_ONCE, NOT_JSON);
    let expect = failures(expect, Fault::BadJson, "before_response", 1)
        .leased("the reply cannot be read, so nobody knows what to free");
    cells.push(at.cell(Leg::Prefill, Moment::Prefilling, Fault::BadJson, expect));
}

/// Sequential engines: replies that hand nothing over that can be used. The second connector passes
/// the reply on as a whole.
fn hand_over(at: At, cells: &mut Vec<Cell>) {
    if at.engine == Engine::VllmNixl {
        return;
    }
    let why = "hand-over not usable: it is not passed on, the decode engine computes the prompt";
    let expect = || {
        Expect::healthy(Due::AT_ONCE, why)
            .counts(UNUSABLE, &[], Count::Is(1))
            .leased("without a usable reference nobody can be asked to free the KV")
    };
    let cell = |fault| at.cell(Leg::Prefill, Moment::Prefilling, fault, expect());
    cells.push(cell(Fault::NoKv));
    if at.engine == Engine::VllmShfs {
        cells.push(cell(Fault::UnusableKv));
    }
}

/// Together engines: the decode leg is out, and nothing of it has come.
fn together(at: At, cells: &mut Vec<Cell>) {
    let faults = [
        Fault::Refused,
        Fault::Reset,
        Fault::Dies,
        Fault::Status(400),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Status(503),
        Fault::Stall,
        Fault::Late,
    ];
    for fault in faults {
        if at.engine == Engine::TrtGenerationFirst && fault == Fault::Refused {
            // Nobody listens at the look-up then: see `asked`.
            continue;
        }
        let due = match fault {
            Fault::Stall | Fault::Late => Due::timer(PREFILL_TIMEOUT_MS),
            _ => Due::AT_ONCE,
        };
        let expect = failed(at, fault, due);
        let cell = at.cell(Leg::Prefill, Moment::Prefilling, fault, expect);
        // Another roleset is there, and must not be asked.
        cells.push(cell.with_pods(Layout::TwoRolesets, Reach::First));
    }
    let expect = Expect::healthy(Due::AT_ONCE, NOT_TERMINAL);
    let labels = [("class", "bad_response")];
    let expect = expect.counts(PREFILL_FAILURE, &labels, Count::Is(1));
    cells.push(at.cell(Leg::Prefill, Moment::Prefilling, Fault::BadJson, expect));
}

/// What comes of a prefill leg that fails while the client can still be told.
fn failed(at: At, fault: Fault, due: Due) -> Expect {
    let expect = match fault {
        Fault::Status(status) => Expect::engine(status, Marker::Prefill, due, TOGETHER),
        Fault::Stall | Fault::Late => {
            let why = "prefill timeout after decode was sent: 504, decode aborted";
            Expect::error(504, Marker::Prefill, (FAILED, ""), due, why)
        }
        _ => Expect::error(503, Marker::Prefill, (FAILED, ""), due, TOGETHER),
    };
    torn(at, failures(expect, fault, "before_response", 1), fault)
}

/// What else comes of it.
fn torn(at: At, expect: Expect, fault: Fault) -> Expect {
    // Whether a refusal of the request itself is the pair's failure is nowhere said.
    let expect = match fault {
        Fault::Status(400..=499) => expect.leaves_open(PAIR_FAILURE),
        _ => expect.counts(PAIR_FAILURE, &[], Count::Is(1)),
    };
    if at.engine.aborts() {
        let labels = [("prefill_failure_class", class(fault)), ("result", "ok")];
        expect.counts(ABORT, &labels, Count::AtLeast(1))
    } else {
        expect
    }
}

/// Together engines: the decode leg has begun.
fn begun(at: At, cells: &mut Vec<Cell>) {
    let moments: &[Moment] = if at.stream {
        &[Moment::Headers, Moment::Role, Moment::Body]
    } else {
        &[Moment::Headers, Moment::Body]
    };
    for &moment in moments {
        for fault in [Fault::Status(500), Fault::Reset, Fault::Stall] {
            let due = match fault {
                Fault::Stall => Due::timer(PREFILL_TIMEOUT_MS),
                _ => Due::by(FAILS_AT_MS),
            };
            let expect = if moment == Moment::Body {
                let why = "prefill fails after a chunk went out: the stream is cut";
                let cut = Expect::cut("pd_prefill_failure", None, due, why);
                torn(at, failures(cut, fault, "after_response", 1), fault)
            } else {
                failed(at, fault, due)
            };
            cells.push(at.cell(Leg::Prefill, moment, fault, expect));
        }
    }
}

/// Together engines: the decode leg is refused for want of the prefill leg, which is to blame.
fn both(at: At, cells: &mut Vec<Cell>) {
    for fault in [Fault::Status(400), Fault::Reset] {
        let expect = failed(at, fault, Due::by(VERDICT_MS));
        // By then the decode leg is over.
        let expect = expect.leaves_open(ABORT).leaves_open(PAIR_FAILURE);
        cells.push(at.cell(Leg::Both, Moment::Decoding, fault, expect));
    }
}

/// Generation first: the prefill pod is asked where it is found.
fn asked(at: At, cells: &mut Vec<Cell>) {
    let faults = [
        Fault::Refused,
        Fault::Reset,
        Fault::Status(500),
        Fault::EmptyInfo,
        Fault::Stall,
    ];
    for fault in faults {
        let why =
            "/server_info fails: before it succeeded nothing is sent, so another pair is tried";
        let (one, two, status) = match fault {
            Fault::Stall => (Due::timer(LOOK_UP_MS), Due::timer(2 * LOOK_UP_MS), 504),
            _ => (Due::AT_ONCE, Due::AT_ONCE, 503),
        };
        let says = match fault {
            Fault::EmptyInfo => "transceiver_runtime: PYTHON",
            _ => "",
        };
        let put = |expect: Expect| expect.counts(RETRY, &[], Count::Is(1));
        let cell = |expect| at.cell(Leg::Prefill, Moment::Asking, fault, put(expect));
        let other = Expect::healthy(one, why);
        cells.push(cell(other).with_pods(Layout::TwoRolesets, Reach::First));
        let none = Expect::error(status, Marker::Prefill, (FAILED, says), two, why);
        cells.push(cell(none).with_pods(Layout::TwoRolesets, Reach::All));
    }
}

/// Engines that abort: the abort call itself fails. The client has its answer before.
fn aborts(at: At, cells: &mut Vec<Cell>) {
    for fault in [Fault::Stall, Fault::Refused, Fault::Status(500)] {
        let cause = Fault::Status(500);
        let why = "abort fails: tried twice, and the leg's own connection is cut all the same";
        let expect = Expect::engine(500, Marker::Prefill, Due::AT_ONCE, why);
        let labels = [("prefill_failure_class", class(cause)), ("result", "error")];
        let expect = failures(expect, cause, "before_response", 1)
            .counts(PAIR_FAILURE, &[], Count::Is(1))
            .counts(ABORT, &labels, Count::AtLeast(2));
        cells.push(at.cell(Leg::Abort, Moment::Prefilling, fault, expect));
    }
}

const _: () = assert!(LATE_MS > PREFILL_TIMEOUT_MS && LATE_MS < 2 * PREFILL_TIMEOUT_MS);
