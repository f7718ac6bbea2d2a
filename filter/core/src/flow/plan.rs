//! What is known of a request before pods are chosen: model, settings, lengths, prefix matches.

use super::Head;
use super::length::Length;
use crate::config::{RequestHints, resolve};
use crate::engine::Engine;
use crate::fleet::ModelFleet;
use crate::ledger::{DecodeCharge, Pick, PrefillCharge};
use crate::prefix::{Chain, PrefixIndex, chain, model_hash};
use crate::reply::Fault;
use crate::request::{Endpoint, Member, Scan};
use crate::select::{Decision, Refusal, Shape, Strategy, Target};
use crate::session::growth;
use crate::tokens::boundary;
use crate::worker::Scene;
use pd_wire::knobs::{self, Choice as _, DecodePolicy, Knobs, PrefillPolicy};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a request body per prompt token, as the reference charges them.
const CHARGED_BYTES_PER_TOKEN: u64 = 4;

/// What is known of a request before pods are chosen.
pub(super) struct Plan {
    pub(super) fleet: Rc<ModelFleet>,
    pub(super) knobs: Arc<Knobs>,
    pub(super) strategy: knobs::Strategy,
    /// Profile by which every pod's own range is looked up.
    pub(super) pod_profile: Option<String>,
    /// Profile chosen by the request's size.
    pub(super) auto_profile: Option<String>,
    pub(super) endpoint: Endpoint,
    /// Both legs are possible: one prompt, one answer, an engine that hands its KV over.
    pub(super) hands_over: bool,
    /// Prompt tokens, estimated or counted.
    pub(super) prompt_tokens: u64,
    /// Prompt tokens as charged: body bytes / 4.
    pub(super) charged_tokens: u64,
    /// Prompt tokens of the session's turn before, if they are known.
    pub(super) tokens_before: Option<u64>,
    pub(super) text_bytes: u64,
    /// Bytes of which the prefill engine's count makes a ratio; 0 = none.
    pub(super) learns_from: u64,
    pub(super) chain: Option<Chain>,
    pub(super) match_percent: Vec<u8>,
}

impl Plan {
    pub(super) fn new(
        body: &[u8],
        scan: &Scan,
        fleet: Rc<ModelFleet>,
        head: &Head,
        scene: &mut Scene<'_>,
    ) -> Result<Self, Fault> {
        let text_bytes = u64::try_from(scan.text_bytes()).unwrap_or(u64::MAX);
        let mut length = Length::new(head.endpoint, body, scan, &fleet, scene);
        let body_bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let mut hints = RequestHints {
            strategy: head.strategy.as_deref(),
            profile: head.profile.as_deref(),
            prompt_tokens: None,
            max_tokens: None,
        };
        let config = fleet
            .config
            .and_then(|index| fleet.configs.get(usize::try_from(index).ok()?));
        if hints.is_auto() {
            let bounds = config.into_iter().flat_map(boundary::of_auto_profiles);
            length.settle(bounds, scene);
            hints.prompt_tokens = Some(length.tokens);
            hints.max_tokens = max_tokens(body, scan);
        }
        let resolved = resolve(scene.config, config, hints, !fleet.rolesets.is_empty())
            .map_err(|error| Fault::Strategy(error.to_string()))?;
        if let Some(policy) = &resolved.knobs.invalid_decode_policy {
            let allowed = DecodePolicy::NAMES.join(", ");
            return Err(Fault::Policy(format!(
                "the profile names the unknown decodeScorePolicy {policy}; use one of {allowed}"
            )));
        }
        let engine = Engine::of_pairs(&fleet);
        if let (Engine::Unsupported(name), knobs::Strategy::Pd) = (&engine, resolved.strategy) {
            return Err(Fault::NoPod {
                model: fleet.name.to_string(),
                detail: format!("this gateway cannot pair pods of engine {name} yet"),
            });
        }
        if resolved.strategy == knobs::Strategy::Pd {
            let (profile, knobs) = (resolved.pod_profile, &resolved.knobs);
            length.settle(boundary::of_pods(&fleet.configs, profile, knobs), scene);
        }
        let (prompt_tokens, learns_from) = (length.tokens, length.learns_from);
        let mut plan = Self {
            knobs: resolved.knobs,
            strategy: resolved.strategy,
            pod_profile: resolved.pod_profile.map(str::to_owned),
            auto_profile: resolved
                .profile_name
                .filter(|_| resolved.auto)
                .map(str::to_owned),
            fleet: Rc::clone(&fleet),
            endpoint: head.endpoint,
            hands_over: scan.hands_over && engine == Engine::Vllm,
            prompt_tokens,
            charged_tokens: body_bytes / CHARGED_BYTES_PER_TOKEN,
            tokens_before: None,
            text_bytes,
            learns_from,
            chain: None,
            match_percent: Vec::new(),
        };
        if plan.reads_prefixes() {
            plan.look_up_prefix(body, scan, scene);
        }
        Ok(plan)
    }

    /// True when the policy asks the prefix index and there is a choice to make.
    fn reads_prefixes(&self) -> bool {
        use PrefillPolicy::{Conductor, HybridCacheLoad, PrefixCache};
        let policy = self.knobs.prefill_score_policy;
        self.shape() == Shape::Pair
            && matches!(policy, PrefixCache | HybridCacheLoad | Conductor)
            && self
                .fleet
                .rolesets
                .iter()
                .map(|set| set.prefill.len())
                .sum::<usize>()
                > 1
    }

    fn look_up_prefix(&mut self, body: &[u8], scan: &Scan, scene: &Scene<'_>) {
        let knobs = &self.knobs;
        let block = usize::try_from(knobs.prefix_cache_block_size).unwrap_or(usize::MAX);
        let seed = knobs.prefix_cache_hash_seed.unwrap_or(0);
        let mut blocks = chain(scan.identity(body), block, seed);
        let pods: Vec<_> = self.fleet.pods.iter().map(|pod| pod.key).collect();
        self.match_percent = vec![0; pods.len()];
        index(knobs).lookup(
            scene.store,
            model_hash(&self.fleet.name),
            &mut blocks,
            &pods,
            scene.now_ms,
            &mut self.match_percent,
        );
        self.chain = Some(blocks);
    }

    /// What the request needs.
    pub(super) fn shape(&self) -> Shape {
        match self.strategy {
            knobs::Strategy::Pd if self.endpoint == Endpoint::Other => {
                Shape::Plain(Strategy::LeastRequest)
            }
            knobs::Strategy::Pd if self.hands_over => Shape::Pair,
            knobs::Strategy::Pd => Shape::OneLeg,
            knobs::Strategy::Random => Shape::Plain(Strategy::Random),
            knobs::Strategy::PrefixCache => Shape::Plain(Strategy::PrefixCache),
            knobs::Strategy::LeastRequest | knobs::Strategy::SessionAffinity => {
                Shape::Plain(Strategy::LeastRequest)
            }
        }
    }

    /// What the chosen pods are charged. New tokens of the prefill charge are by the first rule
    /// that applies: growth of the session, what the prefix index does not know, whole prompt
    /// (AIBrix, `token_load` scoring).
    pub(super) fn pick(&self, decision: &Decision) -> Result<Pick, Refusal> {
        let knobs = &self.knobs;
        let (prefill, decode) = pods(&decision.target);
        let key = |position| self.fleet.pod(position).map(|pod| pod.key);
        let new_tokens = growth(self.charged_tokens, self.tokens_before)
            .unwrap_or_else(|| self.uncached_tokens(decision));
        let tokens = knobs.token_load_request_cost.saturating_add(new_tokens);
        Ok(Pick {
            prefill: prefill
                .and_then(key)
                .map(|pod| PrefillCharge { pod, tokens }),
            decode: key(decode).map(|pod| DecodeCharge {
                pod,
                tokens: self.charged_tokens,
            }),
            ttl_ms: knobs.token_load_ttl_ms,
        })
    }

    /// The part of the prompt that the prefill pod has not seen, where the policy looked it up.
    fn uncached_tokens(&self, decision: &Decision) -> u64 {
        match decision.explanation.match_percent {
            Some(percent) if self.knobs.prefill_score_policy == PrefillPolicy::HybridCacheLoad => {
                let missing = 100_u64.saturating_sub(u64::from(percent));
                self.charged_tokens.saturating_mul(missing) / 100
            }
            _ => self.charged_tokens,
        }
    }

    pub(super) fn no_pod(&self, detail: String) -> Fault {
        Fault::NoPod {
            model: self.fleet.name.to_string(),
            detail,
        }
    }

    /// The client's view of a refusal.
    pub(super) fn fault(&self, refusal: &Refusal) -> Fault {
        if refusal.at_capacity() {
            Fault::Capacity(self.fleet.name.to_string())
        } else {
            self.no_pod(refusal.to_string())
        }
    }
}

/// Tokens the request allows to generate, if it says so.
fn max_tokens(body: &[u8], scan: &Scan) -> Option<u64> {
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

/// The prefix index the knobs describe.
pub(super) fn index(knobs: &Knobs) -> PrefixIndex {
    PrefixIndex::new(
        knobs.prefix_cache_block_number,
        knobs.prefix_cache_eviction_duration_ms,
    )
}

/// Prefill pod, if any, and the pod that answers.
pub(super) fn pods(target: &Target) -> (Option<u16>, u16) {
    match *target {
        Target::Pair(pair) => (Some(pair.prefill), pair.decode),
        Target::Combined(pod) | Target::OneLeg(pod) => (None, pod),
    }
}
