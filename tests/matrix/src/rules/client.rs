//! Clients that leave.

use super::At;
use crate::cell::{Cell, Engine, Fault, Leg, Moment, Reach};
use crate::expect::{ABORT, Count, Expect, ORPHAN};
use crate::layout::Layout;

const DURING_PREFILL: &str = "client leaves during prefill: the flow goes on, KV that comes is freed, charges end with the work";
const DURING_DECODE: &str =
    "client leaves during decode: the leg is reset, SGLang's is aborted too";

/// The cells of one engine and way to answer.
pub(super) fn cells(at: At, cells: &mut Vec<Cell>) {
    let moments = [
        Moment::Uploading,
        Moment::Asking,
        Moment::Prefilling,
        Moment::Retrying,
        Moment::Decoding,
        Moment::Headers,
        Moment::Role,
        Moment::Body,
    ];
    for moment in moments {
        let sense = match moment {
            Moment::Asking => at.engine == Engine::TrtGenerationFirst,
            Moment::Retrying => !at.engine.is_together(),
            Moment::Headers | Moment::Role => at.stream,
            _ => true,
        };
        if !sense {
            continue;
        }
        let prefilling = matches!(moment, Moment::Prefilling | Moment::Retrying);
        let why = if prefilling {
            DURING_PREFILL
        } else {
            DURING_DECODE
        };
        let mut expect = Expect::gone(why);
        if moment == Moment::Retrying {
            expect = expect.counts(crate::expect::RETRY, &[], Count::Is(1));
        }
        if prefilling && !at.engine.is_together() {
            expect = expect.counts(ORPHAN, &[("result", "freed")], Count::Is(1));
        }
        let uploading = matches!(moment, Moment::Uploading | Moment::Asking);
        if at.engine.aborts() && !uploading {
            let labels = [("prefill_failure_class", "canceled"), ("result", "ok")];
            expect = expect.counts(ABORT, &labels, Count::AtLeast(1));
        }
        let waits = matches!(moment, Moment::Decoding | Moment::Headers | Moment::Role);
        if at.engine == Engine::TrtContextFirst && waits {
            expect = expect.leased(
                "whether a cut generation worker lets the context go is TensorRT-LLM's own affair",
            );
        }
        if at.engine.is_vllm() && at.stream && moment == Moment::Decoding {
            // A stream of vLLM begins as soon as its engine has read the request.
            expect = expect.leased("an engine that never read the request never hears of the KV");
        }
        let cell = at.cell(Leg::Client, moment, Fault::ClientLeaves, expect);
        cells.push(if moment == Moment::Retrying {
            cell.with_pods(Layout::TwoRolesets, Reach::First)
        } else {
            cell
        });
    }
}
