//! After the last token: counting, and KV put under lease for a decode engine.

use super::metrics::{Origin, Timings};
use super::prepare::Ready;
use super::request::Route;
use super::run::Run;
use super::transfer::{Offer, Transfer};
use crate::kv::Allocation;

impl Run {
    /// Counts a finished request; KV for a decode engine is put under lease. Returns the
    /// hand-over parameters of that.
    pub(super) fn settle(&mut self, ready: Ready) -> Option<String> {
        let engine = &self.engine;
        let origin = if ready.pulled.is_some() {
            Origin::Transferred
        } else {
            Origin::Computed
        };
        let timings = Timings {
            queue: ready.started.saturating_duration_since(self.arrived),
            prefill: ready.first.saturating_duration_since(ready.started),
            first_token: ready.first.saturating_duration_since(self.arrived),
            whole: self.arrived.elapsed(),
        };
        let generated = self.tokens.saturating_mul(self.job.sequences());
        let prompt = self.prompt_tokens();
        engine
            .meters
            .answered(origin, prompt, generated, self.finish, timings);
        if self.job.transfer != Transfer::Produce {
            if origin == Origin::Computed {
                engine.tallies.computed_locally.up();
            }
            return None;
        }
        engine.tallies.computed_for_others.up();
        Some(self.hold(ready.allocation))
    }

    /// Puts each sequence's KV under lease; the parameters offered are those of one sequence.
    fn hold(&self, mut allocation: Allocation) -> String {
        let engine = &self.engine;
        let (job, pace) = (&self.job, engine.core.pace());
        let each = engine.kv.blocks(job.prompt.tokens);
        let engine_id = engine.engine_id();
        let mut offered = String::new();
        for sequence in 0..job.sequences() {
            let (prompt, choice) = (sequence / job.n, sequence % job.n);
            let suffix = engine.core.words.next() as u32;
            // With n choices vLLM numbers the children and answers with the second of two.
            let child = if job.n > 1 {
                format!("{choice}_")
            } else {
                String::new()
            };
            let index = match job.route {
                Route::Chat | Route::Messages => String::new(),
                Route::Completions => format!("-{prompt}"),
                Route::Responses => "_0".to_owned(),
            };
            let id = format!("{child}{}{index}-{suffix:08x}", job.id);
            let part = allocation.split(each);
            if prompt == 0 && choice == job.n.saturating_sub(1) {
                offered = Offer {
                    blocks: part.blocks(),
                    engine_id: &engine_id,
                    request_id: &id,
                    host: &engine.advertised_host,
                    port: engine.side_channel_port,
                    tokens: job
                        .prompt
                        .tokens
                        .saturating_add(self.tokens)
                        .saturating_sub(1),
                    one_step: self.tokens == 1,
                }
                .write();
            }
            engine.kv.hold(&id, part, pace.lease());
        }
        offered
    }
}
