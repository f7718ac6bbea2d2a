//! Where this VM's context workers are, as their `/server_info` told. One look-up per worker at a
//! time; an answer counts for a minute and for one process of the worker, a failure for a second.

use super::ContextWorker;
use crate::fleet::FleetPod;
use crate::ledger::PodKey;
use crate::reply::PrefillFailure;
use hashbrown::HashMap;
use std::rc::Rc;

/// How long a look-up may take, in ms.
pub const LOOK_UP_MS: u64 = 3000;
/// How long an answer counts, in ms.
const KNOWN_MS: u64 = 60_000;
/// How long a failure counts, in ms: those who waited for the answer shall not ask again.
const FAILED_MS: u64 = 1000;
/// Most workers remembered.
const MAX_WORKERS: usize = 1024;
/// Longest answer read, in bytes.
pub const MAX_INFO: usize = 1 << 20;

/// Context workers by pod.
#[derive(Debug, Default)]
pub struct ContextWorkers {
    entries: HashMap<PodKey, Entry>,
}

#[derive(Debug)]
struct Entry {
    address: String,
    restarts: u32,
    state: Known,
    until_ms: u64,
}

#[derive(Debug)]
enum Known {
    /// Somebody asks.
    Asking,
    At(Rc<ContextWorker>),
    Failed(PrefillFailure, String),
}

/// What is known of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookedUp {
    /// Where it is.
    At(Rc<ContextWorker>),
    /// It cannot be used, and why.
    Failed(PrefillFailure, String),
    /// Another request is asking.
    Wait,
    /// Nothing: whoever gets this has to ask, and to tell what became of it.
    Ask,
}

impl ContextWorkers {
    /// What is known of a pod.
    pub fn look_up(&mut self, pod: &FleetPod, now_ms: u64) -> LookedUp {
        let known = self.entries.get(&pod.key).filter(|entry| {
            now_ms < entry.until_ms
                && entry.address == pod.address
                && entry.restarts == pod.restarts
        });
        match known.map(|entry| &entry.state) {
            Some(Known::At(worker)) => LookedUp::At(Rc::clone(worker)),
            Some(Known::Failed(failure, detail)) => LookedUp::Failed(*failure, detail.clone()),
            Some(Known::Asking) => LookedUp::Wait,
            None => {
                self.set(pod, Known::Asking, now_ms.saturating_add(LOOK_UP_MS));
                LookedUp::Ask
            }
        }
    }

    /// A look-up has told where the worker is.
    pub fn found(&mut self, pod: &FleetPod, worker: Rc<ContextWorker>, now_ms: u64) {
        self.set(pod, Known::At(worker), now_ms.saturating_add(KNOWN_MS));
    }

    /// A look-up has failed.
    pub fn failed(&mut self, pod: &FleetPod, why: (PrefillFailure, String), now_ms: u64) {
        let until_ms = now_ms.saturating_add(FAILED_MS);
        self.set(pod, Known::Failed(why.0, why.1), until_ms);
    }

    /// Forgets a worker: whoever asked has left, or it may be another process by now.
    pub fn forget(&mut self, pod: PodKey) {
        self.entries.remove(&pod);
    }

    fn set(&mut self, pod: &FleetPod, state: Known, until_ms: u64) {
        if self.entries.len() >= MAX_WORKERS && !self.entries.contains_key(&pod.key) {
            // More pods than one fleet has: what is forgotten is asked for again.
            self.entries.clear();
        }
        let entry = Entry {
            address: pod.address.clone(),
            restarts: pod.restarts,
            state,
            until_ms,
        };
        self.entries.insert(pod.key, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{model, pod};

    fn fleet_pod(restarts: u32) -> FleetPod {
        let fleet = model("m").pod(pod("ns/p").restarts(restarts)).fleet();
        fleet.pod(0).unwrap().clone()
    }

    fn worker() -> Rc<ContextWorker> {
        let info = r#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":"e"}}"#;
        Rc::new(ContextWorker::read(info.as_bytes()).unwrap())
    }

    #[test]
    fn one_asks_the_others_wait_and_a_minute_later_one_asks_again() {
        let (mut workers, pod) = (ContextWorkers::default(), fleet_pod(0));
        assert_eq!(workers.look_up(&pod, 0), LookedUp::Ask);
        assert_eq!(workers.look_up(&pod, 2999), LookedUp::Wait);
        workers.found(&pod, worker(), 3000);
        assert_eq!(workers.look_up(&pod, 62_999), LookedUp::At(worker()));
        assert_eq!(workers.look_up(&pod, 63_000), LookedUp::Ask);
        // Whoever asked never came back.
        assert_eq!(workers.look_up(&pod, 66_000), LookedUp::Ask);
    }

    #[test]
    fn another_process_is_asked_anew() {
        let (mut workers, pod) = (ContextWorkers::default(), fleet_pod(0));
        workers.found(&pod, worker(), 0);
        assert_eq!(workers.look_up(&fleet_pod(1), 1), LookedUp::Ask);
        workers.found(&pod, worker(), 2);
        let mut moved = fleet_pod(0);
        moved.address = "10.0.0.9:1".to_owned();
        assert_eq!(workers.look_up(&moved, 3), LookedUp::Ask);
        workers.found(&pod, worker(), 4);
        workers.forget(pod.key);
        assert_eq!(workers.look_up(&pod, 5), LookedUp::Ask);
    }

    #[test]
    fn a_failure_counts_for_those_who_waited() {
        let (mut workers, pod) = (ContextWorkers::default(), fleet_pod(0));
        let why = (PrefillFailure::Setup, "no".to_owned());
        workers.failed(&pod, why.clone(), 0);
        assert_eq!(workers.look_up(&pod, 999), LookedUp::Failed(why.0, why.1));
        assert_eq!(workers.look_up(&pod, 1000), LookedUp::Ask);
    }

    #[test]
    fn the_memory_is_bounded() {
        let mut workers = ContextWorkers::default();
        let mut pod = fleet_pod(0);
        for n in 0..5000 {
            pod.key = PodKey(n);
            workers.look_up(&pod, 0);
            assert!(workers.entries.len() <= MAX_WORKERS);
        }
    }
}
