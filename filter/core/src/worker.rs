//! What one VM knows, shared by all its requests.

use crate::config::Config;
use crate::eject::Ejections;
use crate::engine::trtllm::ids::DisaggIds;
use crate::engine::trtllm::workers::ContextWorkers;
use crate::fleet::{FleetCache, ModelFleet};
use crate::ids::Ids;
use crate::ledger::Ledger;
use crate::port::SharedStore;
use crate::rate::RateCounts;
use crate::serve::Serve;
use crate::session::Sweep;
use crate::tokens::{Estimates, Tokenizers};
use std::rc::Rc;

/// State of one VM.
#[derive(Debug)]
pub struct Worker {
    /// The snapshot.
    pub fleet: FleetCache,
    /// What this VM has charged.
    pub ledger: Ledger,
    /// Bytes per prompt token of each model.
    pub estimates: Estimates,
    /// Pushed tokenizers.
    pub tokenizers: Tokenizers,
    /// Random number of this VM.
    pub nonce: u32,
    /// Prompt lengths and the rolesets preferred for them.
    pub serve: Serve,
    /// Requests counted against `requestsPerSecond`.
    pub rate: RateCounts,
    /// Pods and pairs that are avoided.
    pub eject: Ejections,
    /// Random words and ids.
    pub ids: Ids,
    /// Ids of TensorRT-LLM requests.
    pub disagg_ids: DisaggIds,
    /// Where TensorRT-LLM's context workers are.
    pub context_workers: ContextWorkers,
    /// How far the Unix clock is ahead of the shared monotonic one, in ms; as of the last tick.
    pub unix_ahead_ms: u64,
    /// Where the round over the session table is.
    pub sessions: Sweep,
    /// Requests in flight, orphaned ones left out.
    pub in_flight: usize,
    /// Requests that are being tried on another roleset.
    pub retrying: usize,
    /// Prefill legs whose client left.
    pub orphans: usize,
}

impl Worker {
    /// A VM that holds nothing; `seed` is 32 random bytes.
    #[must_use]
    pub fn new(seed: [u8; 32]) -> Self {
        let mut ids = Ids::new(seed);
        // The upper half of a random word is as random as the whole.
        let nonce = u32::try_from(ids.word() >> 32).unwrap_or(1);
        Self {
            fleet: FleetCache::new(),
            ledger: Ledger::new(nonce),
            estimates: Estimates::default(),
            tokenizers: Tokenizers::default(),
            nonce,
            serve: Serve::default(),
            rate: RateCounts::default(),
            eject: Ejections::default(),
            ids,
            disagg_ids: DisaggIds::default(),
            context_workers: ContextWorkers::default(),
            unix_ahead_ms: 0,
            sessions: Sweep::default(),
            in_flight: 0,
            retrying: 0,
            orphans: 0,
        }
    }

    /// The model's pods. The snapshot is brought up to date by the tick; a model that is not in
    /// it may have come since.
    pub fn find_model(&mut self, name: &str, store: &dyn SharedStore) -> Option<Rc<ModelFleet>> {
        let known = self.fleet.model(name);
        if known.is_some() || !self.fleet.refresh(store) {
            return known;
        }
        self.fleet.model(name)
    }

    /// A fresh id of a TensorRT-LLM request; `machine` differs between Envoys that share workers.
    pub fn disagg_id(&mut self, store: &dyn SharedStore, machine: u64, now_ms: u64) -> u64 {
        let slot = self.ledger.vm().map(|vm| vm.slot);
        let unix_ms = now_ms.saturating_add(self.unix_ahead_ms);
        let word = self.ids.word();
        self.disagg_ids.next(store, slot, machine, unix_ms, word)
    }

    /// The VM's own duties beside the ledger's beat; call once per tick. The janitor also does
    /// what one VM does for all.
    pub fn tick(
        &mut self,
        config: &Config,
        store: &dyn SharedStore,
        now_ms: u64,
        is_janitor: bool,
    ) {
        self.serve.tick(store, now_ms);
        self.estimates.tick(store, now_ms);
        self.eject.tick(store, &mut self.fleet, now_ms, is_janitor);
        if is_janitor {
            let max_sessions = config.knobs.token_load_max_sessions;
            self.sessions.tick(store, max_sessions, now_ms);
        }
    }

    /// May one more request be tried on another roleset? At most `percent` of the requests in
    /// flight at a time, and three in any case, so that retries never become the load.
    #[must_use]
    pub fn retry_allowed(&self, percent: u64) -> bool {
        let share = u64::try_from(self.in_flight)
            .unwrap_or(u64::MAX)
            .saturating_mul(percent)
            / 100;
        u64::try_from(self.retrying).unwrap_or(u64::MAX) < share.max(3)
    }
}

/// What a transition may read and change beside its own flow.
pub struct Scene<'a> {
    /// The VM.
    pub worker: &'a mut Worker,
    /// Settings of the request's root.
    pub config: &'a Config,
    /// The store that all VMs share.
    pub store: &'a dyn SharedStore,
    /// The shared monotonic clock, in ms.
    pub now_ms: u64,
}
