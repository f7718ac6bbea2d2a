//! The gateway: several VMs that share one store and choose with the real code.

use crate::workload::Segment;
use pd_core::fleet::ModelFleet;
use pd_core::ids::Ids;
use pd_core::ledger::{
    Amounts, ChargeId, DecodeCharge, Ledger, Pick, PodKey, PrefillCharge, Vitals,
};
use pd_core::prefix::{Chain, PrefixIndex, chain, model_hash};
use pd_core::select::{Decision, Query, Refusal, Settings, Shape, Target, select};
use pd_core::serve::{Ask, Serve};
use pd_core::testkit::MemoryStore;
use pd_wire::knobs::{BucketServeMode, Knobs, PrefillPolicy};
use pd_wire::samples::PodSample;

/// Workers of the Envoy.
const VMS: u64 = 4;
/// Bytes of text per token, and bytes of a block of the prefix index.
const TOKEN_BYTES: u64 = 4;
const BLOCK_BYTES: usize = 128;

/// An Envoy with its workers.
pub(crate) struct Gateway {
    pub(crate) fleet: ModelFleet,
    store: MemoryStore,
    vms: Vec<Vm>,
    ids: Ids,
    index: PrefixIndex,
    keys: Vec<PodKey>,
    settings: Settings,
    bands: Option<BucketServeMode>,
    request_cost: u64,
}

struct Vm {
    ledger: Ledger,
    serve: Serve,
}

/// A request that was sent to a pair.
pub(crate) struct Routed {
    pub(crate) prefill: usize,
    pub(crate) decode: usize,
    vm: usize,
    charge: ChargeId,
    chain: Option<Chain>,
}

// === impl Gateway ===

impl Gateway {
    /// `bands` switches adaptive bucket serving on.
    pub(crate) fn new(
        fleet: ModelFleet,
        settings: Settings,
        bands: Option<BucketServeMode>,
        seed: u64,
    ) -> Self {
        let mut bytes = [0xa5; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let knobs = Knobs::default();
        let blocks = knobs.prefix_cache_block_number;
        let vm = |nonce| Vm {
            ledger: Ledger::new(nonce),
            serve: Serve::default(),
        };
        Self {
            store: MemoryStore::new(),
            vms: (1..).take(VMS as usize).map(vm).collect(),
            ids: Ids::new(bytes),
            index: PrefixIndex::new(blocks, knobs.prefix_cache_eviction_duration_ms),
            keys: fleet.pods.iter().map(|pod| pod.key).collect(),
            request_cost: knobs.token_load_request_cost,
            settings,
            bands,
            fleet,
        }
    }

    /// New samples are pushed.
    pub(crate) fn push(&mut self, samples: Vec<(PodSample, u64)>) {
        self.fleet.samples = samples.into_iter().map(Some).collect();
    }

    /// The root tick of every VM.
    pub(crate) fn tick(&mut self, now_ms: u64) {
        for vm in &mut self.vms {
            vm.ledger.tick(&self.store, Vitals::default());
            vm.serve.tick(&self.store, now_ms);
        }
    }

    /// A request arrives at one of the VMs: it chooses a pair and charges it.
    pub(crate) fn route(&mut self, prompt: &[Segment], now_ms: u64) -> Routed {
        let nth = (self.ids.word() % VMS) as usize;
        let vm = &mut self.vms[nth];
        let tokens: u64 = prompt.iter().map(|segment| segment.tokens).sum();
        let mut matched = vec![0; self.keys.len()];
        let (store, keys) = (&self.store, &self.keys);
        let chain = reads_prefixes(&self.settings).then(|| {
            let mut blocks = chain([text(prompt).as_slice()], BLOCK_BYTES, 0);
            let model = model_hash(&self.fleet.name);
            self.index
                .lookup(store, model, &mut blocks, keys, now_ms, &mut matched);
            blocks
        });
        let banded_roleset = self.bands.and_then(|mode| {
            let ask = Ask {
                fleet: &self.fleet,
                profile: None,
                mode,
                prompt_tokens: tokens,
                now_ms,
            };
            vm.serve.record(&ask);
            vm.serve.roleset_for(&ask)
        });
        let query = Query {
            fleet: &self.fleet,
            loads: &[],
            settings: &self.settings,
            profile: None,
            now_ms,
            prompt_tokens: tokens,
            text_bytes: tokens * TOKEN_BYTES,
            match_percent: &matched,
            allowed: &|_| true,
            excluded_rolesets: &[],
            blocked_pairs: &[],
            banded_roleset,
            tie: self.ids.word(),
            shape: Shape::Pair,
            listed: 0,
        };
        let (fleet, settings, cost) = (&self.fleet, &self.settings, self.request_cost);
        let charged = vm.ledger.charge(store, fleet.slot, now_ms, |totals| {
            let loads: Vec<Amounts> = totals.aligned(&fleet.pods);
            let decision = select(&Query {
                loads: &loads,
                ..query
            })?;
            let Target::Pair(pair) = decision.target else {
                panic!("these fleets have pairs: {decision:?}")
            };
            let prefill = PrefillCharge {
                pod: keys[usize::from(pair.prefill)],
                tokens: cost + new_tokens(settings, tokens, &decision),
            };
            let decode = DecodeCharge {
                pod: keys[usize::from(pair.decode)],
                tokens,
            };
            let pick = Pick {
                prefill: Some(prefill),
                decode: Some(decode),
                ttl_ms: 0,
            };
            Ok::<_, Refusal>((pick, pair))
        });
        let charged = charged.unwrap();
        Routed {
            prefill: usize::from(charged.decision.prefill),
            decode: usize::from(charged.decision.decode),
            vm: nth,
            charge: charged.id,
            chain,
        }
    }

    /// The prefill pod answered; the decode leg goes.
    pub(crate) fn hand_over(&mut self, routed: &mut Routed, now_ms: u64) {
        let ledger = &mut self.vms[routed.vm].ledger;
        ledger.prefill_done(routed.charge);
        ledger.decode_sent(routed.charge);
        if let Some(chain) = &mut routed.chain {
            let (model, pod) = (model_hash(&self.fleet.name), self.keys[routed.prefill]);
            self.index.learn(&self.store, model, chain, pod, now_ms);
        }
    }

    /// The decode pod answered. Others see it at the VM's next charge or tick.
    pub(crate) fn end(&mut self, routed: &Routed) {
        self.vms[routed.vm].ledger.release(routed.charge);
    }

    /// True when nothing is charged any more, once every VM has ticked.
    pub(crate) fn is_quiet(&mut self, now_ms: u64) -> bool {
        self.tick(now_ms);
        let slot = self.fleet.slot;
        self.vms[0].ledger.totals(&self.store, slot).is_zero()
    }
}

fn reads_prefixes(settings: &Settings) -> bool {
    use PrefillPolicy::{LeastRequest, TokenLoad};
    !matches!(settings.prefill_policy, LeastRequest | TokenLoad)
}

/// What the pod has to compute, as it is charged: only `hybrid_cache_load` minds the match.
fn new_tokens(settings: &Settings, tokens: u64, decision: &Decision) -> u64 {
    match decision.explanation.match_percent {
        Some(percent) if settings.prefill_policy == PrefillPolicy::HybridCacheLoad => {
            tokens * u64::from(100 - percent) / 100
        }
        _ => tokens,
    }
}

/// A text that is equal for equal segments: 32 tokens of four bytes each make a block, and a block
/// repeats one word.
fn text(prompt: &[Segment]) -> Vec<u8> {
    let mut text = Vec::new();
    for segment in prompt {
        let len = (segment.tokens * TOKEN_BYTES) as usize;
        for (nth, start) in (0..len).step_by(BLOCK_BYTES).enumerate() {
            let word = segment.id.rotate_left(32) ^ nth as u64;
            let block = word.to_le_bytes().repeat(BLOCK_BYTES / 8);
            text.extend_from_slice(&block[..BLOCK_BYTES.min(len - start)]);
        }
    }
    text
}
