//! What a cell's request left at its engines, and until when.

use super::engines::{Journal, Prefill, Release, Taking, taking};
use crate::stand::target;
use pd_failure_matrix::{Cell, Engine, Fault, Left, SOON_MS};
use pd_wasm_tests::{CallRecord, CallState, Outcome};

/// What was left after the end of a request.
#[derive(Debug, Default)]
pub(super) struct Remains {
    /// The last of it, in words; empty for nothing.
    pub(super) told: String,
    /// What is not as it must be.
    pub(super) wrong: Vec<String>,
}

/// The records of a run.
pub(super) struct Records<'r> {
    pub(super) cell: &'r Cell,
    pub(super) journal: &'r Journal,
    /// All calls of the gateway.
    pub(super) calls: &'r [CallRecord],
    pub(super) outcome: &'r Outcome,
}

// === impl Records ===

impl Records<'_> {
    /// Looks at every prefill leg and at the KV it left.
    pub(super) fn remains(&self) -> Remains {
        let mut remains = Remains::default();
        let ended = self.outcome.ended_at_ms;
        let mut last = ended;
        for leg in &self.journal.prefills {
            let Some(call) = self.call(&leg.request_id, &leg.address) else {
                remains.wrong.push("a leg without a call".to_owned());
                continue;
            };
            match self.leg_over(leg, call) {
                Some(over) if over <= ended + SOON_MS => last = last.max(over),
                over => remains
                    .wrong
                    .push(format!("a prefill leg runs until {over:?}")),
            }
            self.kv(leg, call, &mut last, &mut remains);
        }
        if last > ended && remains.told.is_empty() {
            remains.told = format!("{} ms", last - ended);
        }
        remains
    }

    /// When the engine has nothing more to do with a prefill leg.
    fn leg_over(&self, leg: &Prefill, call: &CallRecord) -> Option<u64> {
        let by_itself = leg.done_after.map(|after| call.at_ms + after);
        let gave_up =
            (call.state == CallState::TimedOut).then(|| call.at_ms + u64::from(call.timeout_ms));
        let aborts = self.journal.aborted.iter();
        let aborted = aborts
            .filter(|abort| abort.address == leg.address)
            .filter(|abort| leg.rid.as_ref().is_some_and(|rid| abort.body.contains(rid)))
            .filter_map(|abort| self.at(abort))
            .min();
        // TensorRT-LLM's leg fails when the other one leaves.
        let left_alone = (self.cell.engine == Engine::TrtGenerationFirst
            && self.outcome.upstream.is_some())
        .then_some(self.outcome.ended_at_ms);
        let ways = [by_itself, gave_up, aborted, left_alone];
        ways.into_iter().flatten().min()
    }

    /// The KV that a leg left: taken by the decode engine, freed by a call, or leased.
    fn kv(&self, leg: &Prefill, call: &CallRecord, last: &mut u64, remains: &mut Remains) {
        let (Some(kv), CallState::Answered) = (&leg.kv, call.state) else {
            return;
        };
        let frees = self.journal.freed.iter();
        let mut gone: Vec<u64> = frees
            .filter(|release| release.body.contains(kv.as_str()))
            .filter_map(|release| self.at(release))
            .collect();
        // Nobody can tell whether a silent engine has done it.
        let told_twice = gone.len() == 1 && self.cell.fault == Fault::Stall;
        gone.extend(self.taken(kv));
        if gone.len() > 1 && !told_twice {
            remains
                .wrong
                .push(format!("KV is let go {} times", gone.len()));
        }
        match (gone.into_iter().min(), self.cell.expect.left) {
            (Some(at), _) if at <= self.outcome.ended_at_ms + SOON_MS => *last = (*last).max(at),
            (_, Left::Lease(_)) => "kv until its lease ends".clone_into(&mut remains.told),
            (at, Left::Soon) => {
                "kv".clone_into(&mut remains.told);
                remains.wrong.push(format!("KV is held until {at:?}"));
            }
        }
    }

    /// When the decode engine took the KV, or told the prefill engine that nobody wants it.
    fn taken(&self, kv: &str) -> Option<u64> {
        let upstream = self.outcome.upstream.as_ref()?;
        if !String::from_utf8_lossy(&upstream.body).contains(kv) {
            return None;
        }
        match taking(self.cell) {
            Taking::Takes => Some(upstream.at_ms),
            // vLLM's decode engine tells the prefill engine when its client went away.
            Taking::Waits if self.cell.engine.is_vllm() && upstream.cut => {
                Some(self.outcome.ended_at_ms)
            }
            Taking::Waits | Taking::Fails => None,
        }
    }

    fn at(&self, release: &Release) -> Option<u64> {
        let call = self.call(&release.request_id, &release.address)?;
        Some(call.at_ms)
    }

    /// The call that a leg came by; ids are never used twice at a pod, but by a look-up.
    fn call(&self, request_id: &str, address: &str) -> Option<&CallRecord> {
        self.calls.iter().find(|call| {
            call.header("x-request-id") == Some(request_id)
                && target(call) == address
                && call.path() != "/server_info"
        })
    }
}
