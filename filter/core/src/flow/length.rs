//! The length of one request's prompt, in tokens: estimated, and counted where it decides. And of
//! what it may be answered.

use crate::fleet::ModelFleet;
use crate::request::{Endpoint, Member, Scan, prompt};
use crate::tokens::boundary;
use crate::worker::Scene;

/// A prompt and what is known of its length.
pub(super) struct Length<'a> {
    endpoint: Endpoint,
    body: &'a [u8],
    scan: &'a Scan,
    fleet: &'a ModelFleet,
    /// Tokens.
    pub(super) tokens: u64,
    /// Bytes from which the estimate is made and learned; 0 when there is nothing to learn.
    pub(super) learns_from: u64,
    exact: bool,
}

impl<'a> Length<'a> {
    /// Estimated from the bytes of the prompt; exact when it is given as token ids.
    pub(super) fn new(
        endpoint: Endpoint,
        body: &'a [u8],
        scan: &'a Scan,
        fleet: &'a ModelFleet,
        scene: &mut Scene<'_>,
    ) -> Self {
        let ids = prompt::token_ids(endpoint, body, scan);
        let bytes = u64::try_from(scan.text_bytes()).unwrap_or(u64::MAX);
        let estimates = &mut scene.worker.estimates;
        Self {
            endpoint,
            body,
            scan,
            fleet,
            tokens: ids
                .unwrap_or_else(|| estimates.tokens(scene.store, fleet.slot, &fleet.name, bytes)),
            learns_from: if ids.is_none() { bytes } else { 0 },
            exact: ids.is_some(),
        }
    }

    /// Counts the text with the model's own tokenizer, if there is one, when the estimate is near
    /// one of the bounds and counting is quick.
    pub(super) fn settle(&mut self, mut bounds: impl Iterator<Item = u64>, scene: &mut Scene<'_>) {
        let tokenizers = &mut scene.worker.tokenizers;
        if self.exact
            || !tokenizers.holds(&self.fleet.name)
            || !bounds.any(|bound| boundary::is_near(self.tokens, bound))
        {
            return;
        }
        let counted = tokenizers.count(&self.fleet.name, self.learns_from, || {
            prompt::text(self.endpoint, self.body, self.scan)
        });
        if let Some(tokens) = counted {
            self.tokens = tokens;
            self.exact = true;
        }
    }
}

/// Tokens the request allows to generate, if it says so.
pub(super) fn max_tokens(body: &[u8], scan: &Scan) -> Option<u64> {
    [Member::MaxTokens, Member::MaxCompletionTokens]
        .into_iter()
        .find_map(|member| {
            std::str::from_utf8(scan.value(body, member)?)
                .ok()?
                .trim()
                .parse()
                .ok()
        })
}
