//! The session rule of a request: what its prompt adds to the turn before.

use super::plan::Plan;
use super::{Attempt, Effect, Head};
use crate::meters::{Count, Meter};
use crate::select::Shape;
use crate::session::{SessionKey, SessionTable, Turn};
use crate::worker::Scene;
use pd_wire::knobs::PrefillPolicy;
use std::rc::Rc;

impl Plan {
    /// Looks up the request's session, where the rule applies. What it was before the first
    /// attempt counts for further ones too: the engines have not computed the prompt yet.
    pub(super) fn recall_session(
        &mut self,
        head: &Head,
        attempt: &mut Attempt,
        scene: &Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Turn> {
        let key = head.session.filter(|_| self.reads_sessions())?;
        if attempt.failure.is_some() {
            self.tokens_before = attempt.tokens_before;
            return None;
        }
        let SessionKey::Hash(key) = key else {
            let model = Some(Rc::clone(&self.fleet.name));
            effects.push(Effect::Count(Count::new(Meter::SessionKeyTooLong, model)));
            return None;
        };
        let turn = self
            .sessions()
            .recall(scene.store, &self.fleet.name, key, scene.now_ms);
        attempt.tokens_before = turn.tokens_before();
        self.tokens_before = attempt.tokens_before;
        Some(turn)
    }

    /// Remembers the prompt's size, now that it is charged.
    pub(super) fn remember_session(&self, turn: Turn, scene: &Scene<'_>) {
        let tokens = self.charged_tokens;
        // A size that could not be written makes the next turn cost more, which is all.
        let _written = self
            .sessions()
            .remember(scene.store, turn, tokens, scene.now_ms);
    }

    /// The rule belongs to the policies that weigh tokens.
    fn reads_sessions(&self) -> bool {
        use PrefillPolicy::{HybridCacheLoad, TokenLoad};
        self.knobs.token_load_session_ttl_ms > 0
            && matches!(self.knobs.prefill_score_policy, TokenLoad | HybridCacheLoad)
            && self.shape() == Shape::Pair
    }

    fn sessions(&self) -> SessionTable {
        SessionTable::new(
            self.knobs.token_load_max_sessions,
            self.knobs.token_load_session_ttl_ms,
        )
    }
}
