//! What is known of a request before pods are chosen: model, settings, lengths, prefix matches.

use super::length::{Length, max_tokens};
use super::state::Choice;
use super::{Head, affinity};
use crate::config::{RequestHints, StrategySource, resolve};
use crate::eject::{self, Subject, View};
use crate::engine::Engine;
use crate::fleet::{FleetPod, ModelFleet};
use crate::ledger::{Amounts, DecodeCharge, Pick, PrefillCharge};
use crate::prefix::{Chain, PrefixIndex, chain, model_hash};
use crate::reply::Fault;
use crate::request::{Endpoint, Scan};
use crate::select::{Decision, Query, Refusal, Settings, Shape, Strategy, Target};
use crate::serve::Ask;
use crate::session::growth;
use crate::tokens::boundary;
use crate::worker::Scene;
use pd_wire::knobs::{self, Choice as _, DecodePolicy, Knobs, PrefillFallback, PrefillPolicy};
use pd_wire::topology::Role;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a request body per prompt token, as the reference charges them.
const CHARGED_BYTES_PER_TOKEN: u64 = 4;

/// Requests in flight above which none keeps the set of the prefix index that it has read for when
/// it has something to write there: with sets of 4 KB, what is kept takes at most 4 MB.
const MAX_CARRIED: usize = 1024;

/// What is known of a request before pods are chosen.
pub(super) struct Plan {
    pub(super) fleet: Rc<ModelFleet>,
    pub(super) knobs: Arc<Knobs>,
    pub(super) strategy: knobs::Strategy,
    /// What decided the strategy.
    pub(super) source: StrategySource,
    /// Profile by which every pod's own range is looked up.
    pub(super) pod_profile: Option<String>,
    /// Profile chosen by the request's size.
    pub(super) auto_profile: Option<String>,
    pub(super) endpoint: Endpoint,
    /// Both legs are possible: one prompt, one answer, an engine that hands its KV over.
    pub(super) hands_over: bool,
    /// Engine of the pairs.
    pub(super) engine: Engine,
    /// The client asked for a stream.
    pub(super) streams: bool,
    /// How a pod is chosen when phases do not matter.
    plain: Strategy,
    settings: Settings,
    /// Pods the request may use, by position; empty = all.
    pub(super) pods_allowed: Vec<bool>,
    /// Most requests per second of the profile, over all replicas; 0 = no limit.
    pub(super) requests_per_second: u32,
    /// Prompt tokens, estimated or counted.
    pub(super) prompt_tokens: u64,
    /// Prompt tokens as charged: body bytes / 4.
    pub(super) charged_tokens: u64,
    /// Prompt tokens of the session's turn before, if they are known.
    pub(super) tokens_before: Option<u64>,
    text_bytes: u64,
    /// Bytes of which the prefill engine's count makes a ratio; 0 = none.
    pub(super) learns_from: u64,
    pub(super) chain: Option<Chain>,
    pub(super) match_percent: Vec<u8>,
}

/// What a choice depends on beside the request.
pub(super) struct Circumstances<'a> {
    /// What is charged to the model's pods.
    pub(super) loads: &'a [Amounts],
    /// Rolesets tried before.
    pub(super) excluded_rolesets: &'a [u16],
    /// The roleset that adaptive buckets prefer.
    pub(super) banded_roleset: Option<u16>,
    /// Pods and pairs that are avoided, if any are.
    pub(super) ejected: Option<&'a View>,
    /// The request may be the trial of an ejected pod.
    pub(super) may_try: bool,
    /// Random word for ties.
    pub(super) tie: u64,
    pub(super) now_ms: u64,
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
        if let (Some(policy), knobs::Strategy::Pd) =
            (&resolved.knobs.invalid_decode_policy, resolved.strategy)
        {
            let allowed = DecodePolicy::NAMES.join(", ");
            return Err(Fault::Policy(format!(
                "the profile names the unknown decodeScorePolicy {policy}; use one of {allowed}"
            )));
        }
        let pods_allowed = match &head.filter {
            None => Vec::new(),
            Some(Ok(selector)) => {
                let pods = fleet.pods.iter();
                pods.map(|pod| selector.matches(&pod.labels)).collect()
            }
            Some(Err(mistake)) => return Err(Fault::Filter(mistake.clone())),
        };
        let engine = Engine::of_pairs(&fleet, |pod| allows(&pods_allowed, pod));
        if (&engine, resolved.strategy) == (&Engine::Mixed, knobs::Strategy::Pd) {
            return Err(Fault::NoPod {
                model: fleet.name.to_string(),
                detail: "its pods are of several engines, which cannot be paired".to_owned(),
            });
        }
        let mut settings = Settings::from(&*resolved.knobs);
        if !engine.decodes_alone() {
            settings.local_prefill_max_tokens = 0;
            if settings.prefill_fallback == PrefillFallback::Decode {
                settings.prefill_fallback = PrefillFallback::Combined;
            }
        }
        if resolved.strategy == knobs::Strategy::Pd {
            let (profile, knobs) = (resolved.pod_profile, &resolved.knobs);
            length.settle(boundary::of_pods(&fleet.configs, profile, knobs), scene);
        }
        let (prompt_tokens, learns_from) = (length.tokens, length.learns_from);
        let plain = match resolved.strategy {
            knobs::Strategy::Random => Strategy::Random,
            knobs::Strategy::PrefixCache => Strategy::PrefixCache,
            knobs::Strategy::SessionAffinity => affinity::strategy(head, &fleet),
            knobs::Strategy::Pd | knobs::Strategy::LeastRequest => Strategy::LeastRequest,
        };
        let mut plan = Self {
            plain,
            pods_allowed,
            requests_per_second: resolved.requests_per_second,
            settings,
            knobs: resolved.knobs,
            strategy: resolved.strategy,
            source: resolved.source,
            pod_profile: resolved.pod_profile.map(str::to_owned),
            auto_profile: resolved
                .profile_name
                .filter(|_| resolved.auto)
                .map(str::to_owned),
            fleet: Rc::clone(&fleet),
            endpoint: head.endpoint,
            hands_over: scan.hands_over && engine.pairs_on(head.endpoint),
            engine,
            streams: scan.stream,
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

    /// True when the choice asks the prefix index and there is a choice to make.
    fn reads_prefixes(&self) -> bool {
        use PrefillPolicy::{Conductor, HybridCacheLoad, PrefixCache};
        let policy = self.knobs.prefill_score_policy;
        let choice = |pods: usize| pods > 1;
        match self.shape() {
            Shape::Pair if self.knobs.local_prefill_max_tokens > 0 => true,
            Shape::Pair => {
                let sets = self.fleet.rolesets.iter();
                matches!(policy, PrefixCache | HybridCacheLoad | Conductor)
                    && choice(sets.map(|set| set.prefill.len()).sum())
            }
            Shape::Plain(Strategy::PrefixCache) => choice(self.fleet.pods.len()),
            Shape::Plain(_) | Shape::OneLeg => false,
        }
    }

    /// The prompt, when the pod that answers shall be remembered as a holder of its prefix: under
    /// `prefix-cache`, and where decode pods may compute what little they do not hold.
    pub(super) fn answer_chain(&mut self) -> Option<Chain> {
        let wanted = match self.shape() {
            Shape::Pair => self.knobs.local_prefill_max_tokens > 0,
            Shape::Plain(strategy) => strategy == Strategy::PrefixCache,
            Shape::OneLeg => false,
        };
        self.chain.take().filter(|_| wanted)
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
        if scene.worker.in_flight > MAX_CARRIED {
            blocks.forget_read();
        }
        self.chain = Some(blocks);
    }

    /// What the request needs.
    pub(super) fn shape(&self) -> Shape {
        match self.strategy {
            knobs::Strategy::Pd if self.endpoint == Endpoint::Other => Shape::Plain(self.plain),
            knobs::Strategy::Pd if self.hands_over => Shape::Pair,
            knobs::Strategy::Pd => Shape::OneLeg,
            _ => Shape::Plain(self.plain),
        }
    }

    /// Chooses, and says whose trial that would be. The explanation lists the first `listed`
    /// scores of each kind.
    pub(super) fn decide(
        &self,
        given: &Circumstances<'_>,
        listed: usize,
    ) -> Result<(Decision, Vec<Subject>), Refusal> {
        let query = Query {
            fleet: &self.fleet,
            loads: given.loads,
            settings: &self.settings,
            profile: self.pod_profile.as_deref(),
            now_ms: given.now_ms,
            prompt_tokens: self.prompt_tokens,
            text_bytes: self.text_bytes,
            match_percent: &self.match_percent,
            allowed: &|pod| self.may_serve(pod),
            excluded_rolesets: given.excluded_rolesets,
            blocked_pairs: &[],
            banded_roleset: given.banded_roleset,
            tie: given.tie,
            shape: self.shape(),
            listed,
        };
        eject::choose(&query, given.ejected, given.may_try)
    }

    /// True when the request may use the pod. Outside a pair, a decode pod that cannot answer alone
    /// is of no use.
    fn may_serve(&self, pod: u16) -> bool {
        let useless = || {
            self.shape() != Shape::Pair
                && self
                    .fleet
                    .pod(pod)
                    .is_some_and(|pod| pod.role == Role::Decode)
        };
        self.allows(pod) && (self.engine.decodes_alone() || !useless())
    }

    /// True when the request's own header lets it use the pod.
    pub(super) fn allows(&self, pod: u16) -> bool {
        allows(&self.pods_allowed, pod)
    }

    /// What adaptive buckets are asked; `None` when they do not matter to the request.
    pub(super) fn band(&self, now_ms: u64) -> Option<Ask<'_>> {
        (self.knobs.bucket_serve && self.shape() == Shape::Pair).then(|| Ask {
            fleet: &self.fleet,
            profile: self.pod_profile.as_deref(),
            mode: self.knobs.bucket_serve_mode,
            prompt_tokens: self.prompt_tokens,
            now_ms,
        })
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
}

/// True when the request may use the pod.
fn allows(pods_allowed: &[bool], pod: u16) -> bool {
    pods_allowed.is_empty()
        || pods_allowed
            .get(usize::from(pod))
            .is_some_and(|allowed| *allowed)
}

/// Remembers that a pod of the choice holds the prompt's KV.
pub(super) fn learn(choice: &Choice, pod: Option<&FleetPod>, chain: &mut Chain, scene: &Scene<'_>) {
    if let Some(pod) = pod {
        let model = model_hash(&choice.fleet.name);
        index(&choice.knobs).learn(scene.store, model, chain, pod.key, scene.now_ms);
    }
}

/// The prefix index the knobs describe.
fn index(knobs: &Knobs) -> PrefixIndex {
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
