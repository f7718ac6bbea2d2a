//! From a complete body to the first leg: read, resolve, choose and charge in one step, send.

use super::state::{Choice, Prefilling, State};
use super::{Attempt, BodyEdit, Call, Effect, Flow, Head};
use crate::config::{RequestHints, resolve};
use crate::engine::vllm;
use crate::fleet::{FleetPod, ModelFleet};
use crate::ledger::{Amounts, DecodeCharge, Pick, PrefillCharge};
use crate::meters::{Count, Meter};
use crate::prefix::{Chain, PrefixIndex, chain, model_hash};
use crate::reply::Fault;
use crate::request::{Endpoint, Member, Scan, patch, scan};
use crate::select::{Decision, Query, Refusal, Settings, Shape, Strategy, Target, select};
use crate::worker::Scene;
use pd_wire::knobs::{self, Choice as _, DecodePolicy, Knobs, KvConnector, PrefillPolicy};
use pd_wire::names;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a request body per prompt token, as the reference charges them.
const BYTES_PER_TOKEN: u64 = 4;
/// How much later than our own deadline the host may give up on a call, in ms.
const HOST_GRACE_MS: u64 = 1000;

impl Flow {
    /// Serves a complete body, or says why not.
    pub(super) fn arrive(
        &mut self,
        body: &[u8],
        attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if attempt.failure.is_some() {
            // Engines use the id as a key: an attempt never reuses one.
            self.request_id = scene.worker.ids.request_id();
        }
        scene.worker.fleet.refresh(scene.store);
        if !scene.worker.fleet.ready() {
            return self.wait(attempt.since, scene, effects);
        }
        match self.serve(body, attempt, scene, effects) {
            Ok(state) => state,
            Err(fault) => self.fail(&fault, scene, effects),
        }
    }

    /// Waits for the first snapshot, a bounded time.
    pub(super) fn wait(
        &self,
        since: u64,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> State {
        scene.worker.fleet.refresh(scene.store);
        if scene.worker.fleet.ready() {
            effects.push(Effect::ReadBody);
        } else if scene.now_ms >= since.saturating_add(scene.config.knobs.snapshot_wait_ms) {
            return self.fail(&Fault::NoSnapshot, scene, effects);
        }
        State::Awaiting { since }
    }

    fn serve(
        &mut self,
        body: &[u8],
        attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<State, Fault> {
        let scan = scan(self.head.endpoint, body)?;
        let fleet = scene.worker.fleet.model(&scan.model);
        let fleet = fleet.ok_or_else(|| Fault::Model(scan.model.clone()))?;
        self.model = Some(Rc::clone(&fleet.name));
        let plan = Plan::new(body, &scan, fleet, &self.head, scene)?;
        let choice = self.choose(&plan, &attempt, scene)?;
        effects.push(Effect::Note(note(&choice)));
        if choice.prefill.is_none() {
            return Ok(self.send_decode(choice, BodyEdit::Keep, false, scene, effects));
        }
        self.send_prefill(body, &scan, choice, plan, attempt, scene, effects)
    }

    /// Chooses pods and charges them, in one step.
    fn choose(
        &self,
        plan: &Plan,
        attempt: &Attempt,
        scene: &mut Scene<'_>,
    ) -> Result<Choice, Fault> {
        let knobs = &plan.knobs;
        let settings = Settings::from(&**knobs);
        let excluded = excluded(attempt, &plan.fleet, knobs, scene);
        let tie = scene.worker.ids.word();
        let fleet = &plan.fleet;
        let now_ms = scene.now_ms;
        let mut loads: Vec<Amounts> = Vec::new();
        let charged = scene
            .worker
            .ledger
            .charge(scene.store, fleet.slot, now_ms, |totals| {
                totals.aligned_into(&fleet.pods, &mut loads);
                let decision = select(&Query {
                    fleet,
                    loads: &loads,
                    settings: &settings,
                    profile: plan.pod_profile.as_deref(),
                    now_ms,
                    prompt_tokens: plan.prompt_tokens,
                    text_bytes: plan.text_bytes,
                    match_percent: &plan.match_percent,
                    allowed: &|_| true,
                    excluded_rolesets: &excluded,
                    blocked_pairs: &[],
                    tie,
                    shape: plan.shape(),
                })?;
                let pick = plan.pick(&decision)?;
                Ok((pick, decision))
            });
        let charged = charged.map_err(|refusal: Refusal| plan.fault(&refusal, attempt))?;
        let (prefill, decode) = pods(&charged.decision.target);
        let explained = self.head.explain && knobs.allow_explain;
        Ok(Choice {
            decision: explained.then(|| charged.decision.explanation.render(fleet)),
            fleet: Rc::clone(fleet),
            prefill,
            decode,
            charge: charged.id,
            strategy: plan.strategy.name(),
            knobs: Arc::clone(knobs),
        })
    }

    /// Sends the prefill leg of a chosen pair.
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of one arrival, used up here"
    )]
    fn send_prefill(
        &self,
        body: &[u8],
        scan: &Scan,
        choice: Choice,
        plan: Plan,
        attempt: Attempt,
        scene: &mut Scene<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<State, Fault> {
        let knobs = &plan.knobs;
        let leg = choice.prefill_pod().map(|pod| {
            let connector = connector(pod, knobs);
            let edits = vllm::prefill_edits(self.head.endpoint, scan, connector);
            edits.map(|edits| {
                (
                    pod.address.clone(),
                    connector,
                    patch::build(body, scan, &edits),
                )
            })
        });
        let (address, connector, body_out) = match leg {
            Some(Ok(leg)) => leg,
            Some(Err(error)) => {
                Self::release(&choice, scene);
                return Err(plan.no_pod(error.to_string()));
            }
            None => {
                Self::release(&choice, scene);
                return Err(plan.no_pod("the prefill pod left the snapshot".to_owned()));
            }
        };
        if attempt.failure.is_some() {
            scene.worker.retrying = scene.worker.retrying.saturating_add(1);
            effects.push(Effect::Count(Count::new(
                Meter::PrefillRetry,
                self.model.clone(),
            )));
        }
        let per_kilo = knobs.prefill_timeout_per_kilo_token_ms;
        let growth = per_kilo.saturating_mul(plan.prompt_tokens) / 1000;
        let timeout_ms = knobs.prefill_request_timeout_ms.saturating_add(growth);
        effects.push(Effect::Call(Call {
            address,
            path: self.head.path.clone(),
            headers: self.leg_headers(&self.request_id),
            body: body_out,
            timeout_ms: timeout_ms.saturating_add(HOST_GRACE_MS),
        }));
        Ok(State::Prefilling(Prefilling {
            choice,
            connector,
            lead: body.get(..scan.open).unwrap_or_default().to_vec(),
            chain: plan.chain,
            timeout_ms,
            deadline: scene.now_ms.saturating_add(timeout_ms),
            attempt,
        }))
    }

    /// Headers of a request of our own.
    pub(super) fn leg_headers(&self, request_id: &str) -> Vec<(&'static str, String)> {
        let mut headers = vec![
            ("content-type", "application/json".to_owned()),
            (names::HEADER_REQUEST_ID, request_id.to_owned()),
        ];
        headers.extend(self.head.forwarded.iter().cloned());
        headers
    }
}

/// What is known of a request before pods are chosen.
struct Plan {
    fleet: Rc<ModelFleet>,
    knobs: Arc<Knobs>,
    strategy: knobs::Strategy,
    /// Profile by which every pod's own range is looked up.
    pod_profile: Option<String>,
    endpoint: Endpoint,
    hands_over: bool,
    /// Prompt tokens, estimated from the text.
    prompt_tokens: u64,
    /// Prompt tokens as charged: body bytes / 4.
    charged_tokens: u64,
    text_bytes: u64,
    chain: Option<Chain>,
    match_percent: Vec<u8>,
}

impl Plan {
    fn new(
        body: &[u8],
        scan: &Scan,
        fleet: Rc<ModelFleet>,
        head: &Head,
        scene: &Scene<'_>,
    ) -> Result<Self, Fault> {
        let text_bytes = u64::try_from(scan.text_bytes()).unwrap_or(u64::MAX);
        let body_bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let prompt_tokens = text_bytes / BYTES_PER_TOKEN;
        let mut hints = RequestHints {
            strategy: head.strategy.as_deref(),
            profile: head.profile.as_deref(),
            prompt_tokens: Some(prompt_tokens),
            max_tokens: None,
        };
        if hints.is_auto() {
            hints.max_tokens = max_tokens(body, scan);
        }
        let config = fleet
            .config
            .and_then(|index| fleet.configs.get(usize::try_from(index).ok()?));
        let resolved = resolve(scene.config, config, hints, !fleet.rolesets.is_empty())
            .map_err(|error| Fault::Strategy(error.to_string()))?;
        if let Some(policy) = &resolved.knobs.invalid_decode_policy {
            let allowed = DecodePolicy::NAMES.join(", ");
            return Err(Fault::Policy(format!(
                "the profile names the unknown decodeScorePolicy {policy}; use one of {allowed}"
            )));
        }
        let mut plan = Self {
            knobs: resolved.knobs,
            strategy: resolved.strategy,
            pod_profile: resolved.pod_profile.map(str::to_owned),
            fleet: Rc::clone(&fleet),
            endpoint: head.endpoint,
            hands_over: scan.hands_over,
            prompt_tokens,
            charged_tokens: body_bytes / BYTES_PER_TOKEN,
            text_bytes,
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
        let blocks = chain(scan.identity(body), block, seed);
        let pods: Vec<_> = self.fleet.pods.iter().map(|pod| pod.key).collect();
        self.match_percent = vec![0; pods.len()];
        index(knobs).lookup(
            scene.store,
            model_hash(&self.fleet.name),
            &blocks,
            &pods,
            scene.now_ms,
            &mut self.match_percent,
        );
        self.chain = Some(blocks);
    }

    /// What the request needs.
    fn shape(&self) -> Shape {
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

    /// What the chosen pods are charged.
    fn pick(&self, decision: &Decision) -> Result<Pick, Refusal> {
        let knobs = &self.knobs;
        let (prefill, decode) = pods(&decision.target);
        let key = |position| self.fleet.pod(position).map(|pod| pod.key);
        let new_tokens = match decision.explanation.match_percent {
            Some(percent) if knobs.prefill_score_policy == PrefillPolicy::HybridCacheLoad => {
                let missing = 100_u64.saturating_sub(u64::from(percent));
                self.charged_tokens.saturating_mul(missing) / 100
            }
            _ => self.charged_tokens,
        };
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

    fn no_pod(&self, detail: String) -> Fault {
        Fault::NoPod {
            model: self.fleet.name.to_string(),
            detail,
        }
    }

    /// The client's view of a refusal: the failed prefill leg when there was one.
    fn fault(&self, refusal: &Refusal, attempt: &Attempt) -> Fault {
        match &attempt.failure {
            Some((failure, detail)) => Fault::Prefill {
                failure: *failure,
                detail: detail.clone(),
            },
            None if refusal.at_capacity() => Fault::Capacity(self.fleet.name.to_string()),
            None => self.no_pod(refusal.to_string()),
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

/// Rolesets a retry may not use: those tried, or all of them when no further try is allowed.
fn excluded(attempt: &Attempt, fleet: &ModelFleet, knobs: &Knobs, scene: &Scene<'_>) -> Vec<u16> {
    if attempt.failure.is_none() {
        return Vec::new();
    }
    let tries = u64::try_from(attempt.tried.len()).unwrap_or(u64::MAX);
    let allowed =
        tries <= knobs.prefill_retries && scene.worker.retry_allowed(knobs.retry_budget_percent);
    let was_tried = |position: &u16| {
        fleet
            .pod(*position)
            .is_some_and(|pod| attempt.tried.contains(&pod.key))
    };
    (0u16..)
        .zip(fleet.rolesets.iter())
        .filter(|(_, set)| !allowed || set.prefill.iter().any(was_tried))
        .map(|(position, _)| position)
        .collect()
}

/// The connector of a vLLM pod: its label, else the setting.
fn connector(pod: &FleetPod, knobs: &Knobs) -> KvConnector {
    pod.kv_connector
        .as_deref()
        .and_then(KvConnector::from_name)
        .unwrap_or(knobs.kv_connector_type)
}

/// Prefill pod, if any, and the pod that answers.
fn pods(target: &Target) -> (Option<u16>, u16) {
    match *target {
        Target::Pair(pair) => (Some(pair.prefill), pair.decode),
        Target::Combined(pod) | Target::OneLeg(pod) => (None, pod),
    }
}

/// The facts of a choice for the access log.
fn note(choice: &Choice) -> String {
    let name = |pod: Option<&FleetPod>| pod.map_or("-", |pod| pod.name.as_str()).to_owned();
    format!(
        "strategy={} prefill={} decode={}",
        choice.strategy,
        name(choice.prefill_pod()),
        name(choice.decode_pod())
    )
}
