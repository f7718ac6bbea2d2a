//! The one state of this VM, which all its roots and streams share.

use crate::host::{clock, meter::Meters, store::SharedData};
use crate::registry::{FlowId, Registry};
use crate::root::Settings;
use pd_core::worker::{Scene, Worker};
use std::cell::RefCell;

/// Heap a VM takes at its start, in bytes: somewhat more than storms of small requests were seen
/// to come to.
const HEAP_AT_START: usize = 3 << 20;
/// Flows a VM has room for from its start.
const FLOWS_AT_START: usize = 256;
/// Most warnings between two ticks; more of the same tell nothing new.
const WARNINGS_PER_TICK: u32 = 10;

/// Everything this VM knows.
#[derive(Debug)]
pub struct Vm {
    /// The core's part.
    pub worker: Worker,
    /// Live requests.
    pub flows: Registry,
    /// Calls that wait for the next tick of their own root.
    pub posted: Vec<FlowId>,
    /// Counters.
    pub meters: Meters,
    /// A body callback came while headers were paused: bodies are not hidden from us.
    pub bodies_seen: bool,
    /// The host replaces the first bytes of a body (Envoy 1.40); older ones refuse.
    pub replaces_prefix: bool,
    /// The samples held are older than they may be.
    pub stale: bool,
    /// Warnings since the last tick.
    pub warned: u32,
    /// When the last tick of any root was worked on, in ms.
    pub ticked_at: u64,
    /// When expired charges were looked for, in ms.
    pub swept_at: u64,
}

thread_local! {
    static VM: RefCell<Vm> = RefCell::new(Vm::new());
}

/// Runs with the VM's state. Host calls never call back while this runs.
pub fn with<T>(run: impl FnOnce(&mut Vm) -> T) -> T {
    VM.with_borrow_mut(run)
}

impl Vm {
    fn new() -> Self {
        // Linear memory grows by whole pages and never shrinks: one step now instead of many
        // while requests wait.
        // The black box keeps the compiler from leaving out what looks like nothing.
        drop(std::hint::black_box(Vec::<u8>::with_capacity(
            HEAP_AT_START,
        )));
        let mut seed = [0; 32];
        if getrandom::fill(&mut seed).is_err() {
            // Ids only have to differ between VMs; the clock does for a host without randomness.
            for (place, byte) in seed.iter_mut().zip(clock::now_ms().to_le_bytes()) {
                *place = byte;
            }
        }
        let mut worker = Worker::new(seed);
        worker.unix_ahead_ms = clock::unix_ahead_ms();
        Self {
            worker,
            flows: Registry::with_capacity(FLOWS_AT_START),
            posted: Vec::new(),
            meters: Meters::default(),
            bodies_seen: false,
            replaces_prefix: true,
            stale: false,
            warned: 0,
            ticked_at: clock::now_ms(),
            swept_at: 0,
        }
    }

    /// The part of the state that a transition works on, beside the live flows.
    pub fn scene<'a>(worker: &'a mut Worker, settings: &'a Settings, now_ms: u64) -> Scene<'a> {
        Scene {
            worker,
            config: &settings.config,
            store: &SharedData,
            now_ms,
        }
    }

    /// Tells the operator, a bounded number of times a tick.
    pub fn warn(&mut self, text: std::fmt::Arguments<'_>) {
        self.warned = self.warned.saturating_add(1);
        if self.warned <= WARNINGS_PER_TICK {
            log::warn!("{text}");
        }
    }

    /// A tick has passed: says how many warnings were left out.
    pub fn reset_warnings(&mut self) {
        let left_out = self.warned.saturating_sub(WARNINGS_PER_TICK);
        if left_out > 0 {
            log::warn!("{left_out} more warnings were left out");
        }
        self.warned = 0;
    }
}
