//! The live flows of this VM, the calls they have out, and their deadlines.
//!
//! Flows are known by an id of their own, not by the stream's: an orphaned flow has no stream
//! any more. All roots of the VM share this registry, so a call whose root is gone is still
//! missed in time.

use crate::root::Settings;
use hashbrown::HashMap;
use pd_core::flow::{Call, Flow};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// Longest time a deadline stays unlooked at, in ms.
const LOOK_AGAIN_MS: u64 = 1000;

/// A flow's id in this VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// One live flow.
#[derive(Debug)]
pub struct Entry {
    /// The request.
    pub flow: Flow,
    /// Its stream, while the client is there.
    pub context: Option<u32>,
    /// Settings of the root it came in by.
    pub settings: Rc<Settings>,
    /// Bytes of request body the host holds.
    pub body_len: usize,
    /// A call that waits for its root.
    pub outbox: Option<Call>,
    /// The call that is out.
    call: Option<u32>,
    /// Earliest entry of this flow among the deadlines.
    armed: Option<u64>,
}

/// All live flows.
#[derive(Debug)]
pub struct Registry {
    flows: HashMap<FlowId, Entry>,
    calls: HashMap<u32, FlowId>,
    due: BinaryHeap<Reverse<(u64, FlowId)>>,
    last: u64,
}

impl Registry {
    /// Room for `flows` flows before any memory is asked for.
    pub fn with_capacity(flows: usize) -> Self {
        Self {
            flows: HashMap::with_capacity(flows),
            calls: HashMap::with_capacity(flows),
            due: BinaryHeap::with_capacity(flows.saturating_mul(8)),
            last: 0,
        }
    }

    /// Adds a flow.
    pub fn insert(&mut self, flow: Flow, context: Option<u32>, settings: Rc<Settings>) -> FlowId {
        self.last = self.last.wrapping_add(1);
        let id = FlowId(self.last);
        let entry = Entry {
            flow,
            context,
            settings,
            body_len: 0,
            outbox: None,
            call: None,
            armed: None,
        };
        self.flows.insert(id, entry);
        id
    }

    /// The flow, if it is still live.
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut Entry> {
        self.flows.get_mut(&id)
    }

    /// Number of live flows.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Remembers that a call of the flow is out.
    pub fn called(&mut self, id: FlowId, token: u32) {
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.call = Some(token);
            self.calls.insert(token, id);
        }
    }

    /// True while a call of the flow is out.
    pub fn is_calling(&self, id: FlowId) -> bool {
        self.flows
            .get(&id)
            .is_some_and(|entry| entry.call.is_some())
    }

    /// Forgets the call that is out: whatever answer still comes is nobody's, least of all that
    /// of the flow's next call.
    pub fn give_up_call(&mut self, id: FlowId) {
        let call = self.flows.get_mut(&id).and_then(|entry| entry.call.take());
        if let Some(token) = call {
            self.calls.remove(&token);
        }
    }

    /// The flow whose call was answered; each call is answered once.
    pub fn answered(&mut self, token: u32) -> Option<FlowId> {
        let id = self.calls.remove(&token)?;
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.call = None;
        }
        Some(id)
    }

    /// Adds a flow that takes over the call of another one. The second value is false when that
    /// call has not left: it never will, since its root knows it by the other flow.
    pub fn orphan(&mut self, from: FlowId, flow: Flow) -> Option<(FlowId, bool)> {
        let entry = self.flows.get_mut(&from)?;
        entry.outbox = None;
        let call = entry.call.take();
        let settings = Rc::clone(&entry.settings);
        let id = self.insert(flow, None, settings);
        if let Some(token) = call {
            self.called(id, token);
        }
        Some((id, call.is_some()))
    }

    /// After an event: forgets an ended flow, else sees to its deadline.
    ///
    /// A deadline far away is looked at again sooner, so that flows which end before it do not
    /// stay among the deadlines until then.
    pub fn settle(&mut self, id: FlowId, now_ms: u64) {
        let Some(entry) = self.flows.get_mut(&id) else {
            return;
        };
        if entry.flow.is_ended() {
            self.give_up_call(id);
            self.flows.remove(&id);
            return;
        }
        // A deadline that moved later is looked at again when its old entry comes up.
        if let Some(deadline) = entry.flow.deadline() {
            let at = deadline.min(now_ms.saturating_add(LOOK_AGAIN_MS));
            if entry.armed.is_none_or(|armed| at < armed) {
                entry.armed = Some(at);
                self.due.push(Reverse((at, id)));
            }
        }
    }

    /// For `ms` this worker stood still and heard of no pod.
    pub fn unheard_for(&mut self, ms: u64) {
        for entry in self.flows.values_mut() {
            entry.flow.unheard_for(ms);
        }
    }

    /// At most `max` flows whose deadline has come, the longest due first. A flow that asks again
    /// for a time that has passed is heard at the next call, so a caller never loops.
    pub fn take_due(&mut self, now_ms: u64, max: usize) -> Vec<FlowId> {
        let mut taken = Vec::new();
        let mut later = Vec::new();
        while taken.len() < max
            && self
                .due
                .peek()
                .is_some_and(|Reverse((at, _))| *at <= now_ms)
        {
            let Some(Reverse((at, id))) = self.due.pop() else {
                break;
            };
            let Some(entry) = self.flows.get_mut(&id) else {
                continue;
            };
            if entry.armed != Some(at) {
                continue;
            }
            entry.armed = None;
            match entry.flow.deadline() {
                Some(deadline) if deadline <= now_ms => taken.push(id),
                _ => later.push(id),
            }
        }
        for id in later {
            self.settle(id, now_ms);
        }
        taken
    }
}
