//! What a test reads off a gateway: outcomes, calls, logs, metrics, the store, the VMs.

use std::cell::Ref;
use std::sync::MutexGuard;

use crate::exchange::{Flight, Outcome};
use crate::gateway::Gateway;
use crate::host::calls::{CallRecord, CallState};
use crate::host::meters::Meters;
use crate::host::shared::SharedData;
use crate::host::{Fault, LogLine};

impl Gateway {
    /// What was seen of a request so far.
    pub fn outcome(&self, flight: Flight) -> Outcome {
        let state = &self.flights[flight.0];
        let seen = state.seen.borrow().clone();
        let headers = seen.headers.unwrap_or_default();
        Outcome {
            status: headers
                .text(":status")
                .and_then(|status| status.parse().ok()),
            headers,
            headers_at_ms: seen.headers_at_ms,
            chunks: seen.chunks,
            ending: seen.ending,
            ended_at_ms: seen.ended_at_ms,
            upstream: seen.upstream,
            calls: self.world.borrow().calls.all[state.first_call..].to_vec(),
            code_details: seen.code_details,
            filter_state: seen.filter_state,
            callbacks: seen.callbacks,
            deleted: seen.deleted,
        }
    }

    /// Every call dispatched so far, in order.
    pub fn calls(&self) -> Vec<CallRecord> {
        self.world.borrow().calls.all.clone()
    }

    /// The calls nobody answered yet.
    pub fn pending_calls(&self) -> Vec<CallRecord> {
        let world = self.world.borrow();
        let calls = world.calls.all.iter();
        calls
            .filter(|call| call.state == CallState::Pending)
            .cloned()
            .collect()
    }

    /// Everything the guests logged.
    pub fn logs(&self) -> Vec<LogLine> {
        self.world.borrow().logs.clone()
    }

    /// Metrics by name.
    pub fn meters(&self) -> Ref<'_, Meters> {
        Ref::map(self.world.borrow(), |world| &world.meters)
    }

    /// The shared store, to read, to write as another process would, or to stage a race.
    pub fn shared(&self) -> MutexGuard<'_, SharedData> {
        self.config.shared.lock()
    }

    /// A shared value of this gateway's space.
    pub fn shared_value(&self, key: &str) -> Option<Vec<u8>> {
        self.config
            .shared
            .lock()
            .get(&self.config.vm_id, key)
            .ok()
            .map(|(value, _)| value)
    }

    /// Items waiting in a shared queue of this gateway's space; `None` when nobody registered it.
    pub fn queue_len(&self, name: &str) -> Option<usize> {
        self.world.borrow().queues.waiting(&self.config.vm_id, name)
    }

    /// Linear memory of a worker's VM, in 64 KiB pages.
    pub fn memory_pages(&mut self, worker: usize) -> u64 {
        self.vms[self.workers[worker]].memory_pages()
    }

    /// Streams the VM of a worker still holds.
    pub fn live_streams(&mut self, worker: usize) -> usize {
        self.vms[self.workers[worker]].host().streams.len()
    }

    /// Roots of a worker's VM, old ones included.
    pub fn live_roots(&mut self, worker: usize) -> usize {
        self.vms[self.workers[worker]].host().roots.len()
    }

    /// Whether a worker's VM is gone (trapped or killed).
    pub fn is_lost(&self, worker: usize) -> bool {
        self.vms[self.workers[worker]].lost
    }

    /// Takes the faults recorded so far, for tests that provoke one.
    pub fn take_faults(&mut self) -> Vec<Fault> {
        std::mem::take(&mut self.world.borrow_mut().faults)
    }
}
