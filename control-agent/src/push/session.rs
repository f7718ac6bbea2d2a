//! What one Envoy holds of ours, and the stamp of the next message: epochs and sequences.
//!
//! The filter keeps the highest sequence of the newest epoch and answers 409 with what it
//! holds otherwise. Every attempt takes a new sequence, also after a push whose fate is
//! unknown. A new process starts with the wall clock's seconds as epoch, above its dead
//! predecessor's unless that had to climb; then, and whenever another agent pushed, the 409
//! names the epoch to go above.

use std::sync::Arc;

use pd_wire::control::PushReply;
use pd_wire::topology::{Stamp, WIRE_VERSION};

use super::Kind;
use crate::snapshot::Fleet;

/// State of the exchange with one Envoy.
#[derive(Debug)]
pub struct Session {
    agent: String,
    epoch: u64,
    topology: u64,
    samples: u64,
    held: Option<Held>,
}

#[derive(Debug)]
struct Held {
    fleet: Arc<Fleet>,
    sequence: u64,
}

impl Session {
    /// Nothing is held yet.
    pub fn new(agent: String, epoch: u64) -> Self {
        Self {
            agent,
            epoch: epoch.max(1),
            topology: 0,
            samples: 0,
            held: None,
        }
    }

    /// True when the Envoy acknowledged this very fleet.
    pub fn holds(&self, fleet: &Arc<Fleet>) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| Arc::ptr_eq(&held.fleet, fleet))
    }

    /// Stamp of the next topology.
    pub fn topology_stamp(&mut self) -> Stamp {
        self.topology = self.topology.saturating_add(1);
        self.stamp(self.topology)
    }

    /// The topology of this stamp was accepted.
    pub fn topology_accepted(&mut self, fleet: Arc<Fleet>, stamp: &Stamp) {
        self.held = Some(Held {
            fleet,
            sequence: stamp.sequence,
        });
    }

    /// Stamp of the next samples and the sequence of the topology they index; `None` while
    /// the Envoy holds none.
    pub fn samples_stamp(&mut self) -> Option<(Stamp, u64)> {
        let topology_sequence = self.held.as_ref()?.sequence;
        self.samples = self.samples.saturating_add(1);
        Some((self.stamp(self.samples), topology_sequence))
    }

    fn stamp(&self, sequence: u64) -> Stamp {
        Stamp {
            version: WIRE_VERSION,
            agent: self.agent.clone(),
            epoch: self.epoch,
            sequence,
        }
    }

    /// A push was refused (409) because of what the Envoy holds. Names the other agent when
    /// it is one's snapshot that is held.
    pub fn refused(&mut self, kind: Kind, held: &PushReply) -> Option<String> {
        let other =
            (!held.agent.is_empty() && held.agent != self.agent).then(|| held.agent.clone());
        let above = held.epoch > self.epoch || (held.epoch == self.epoch && other.is_some());
        if above {
            self.epoch = held.epoch.saturating_add(1);
            self.topology = 0;
            self.samples = 0;
            self.held = None;
        } else if held.epoch < self.epoch {
            // A restarted Envoy that holds nothing, or an older agent's snapshot.
            self.held = None;
        } else {
            self.topology = self.topology.max(held.topology_sequence);
            match kind {
                Kind::Topology => self.topology = self.topology.max(held.sequence),
                Kind::Samples => self.samples = self.samples.max(held.sequence),
                // Their stamps are counted by the task that pushes them.
                Kind::Tokenizer => {}
            }
            let ours = self.held.as_ref().map(|ours| ours.sequence);
            if kind == Kind::Topology || ours != Some(held.topology_sequence) {
                self.held = None;
            }
        }
        other
    }

    /// What the Envoy holds is unknown: everything is pushed again.
    pub fn lost(&mut self) {
        self.held = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(agent: &str, epoch: u64, sequence: u64, topology_sequence: u64) -> PushReply {
        let agent = agent.to_owned();
        PushReply {
            error: "old".to_owned(),
            epoch,
            sequence,
            topology_sequence,
            agent,
        }
    }

    fn accepted(epoch: u64) -> (Session, Arc<Fleet>) {
        let fleet = Arc::new(Fleet::default());
        let mut session = Session::new("me".to_owned(), epoch);
        let stamp = session.topology_stamp();
        session.topology_accepted(fleet.clone(), &stamp);
        (session, fleet)
    }

    #[test]
    fn samples_wait_for_a_topology_and_index_it() {
        let mut session = Session::new("me".to_owned(), 7);
        assert_eq!(session.samples_stamp(), None);
        let fleet = Arc::new(Fleet::default());
        let lost = session.topology_stamp();
        let stamp = session.topology_stamp();
        assert_eq!((lost.sequence, stamp.sequence, stamp.epoch), (1, 2, 7));
        session.topology_accepted(fleet.clone(), &stamp);
        assert!(session.holds(&fleet));
        assert!(!session.holds(&Arc::new(Fleet::default())));
        let (samples, topology_sequence) = session.samples_stamp().unwrap();
        assert_eq!(
            (samples.epoch, samples.sequence, topology_sequence),
            (7, 1, 2)
        );
    }

    #[test]
    fn a_newer_epoch_is_topped_and_the_other_agent_named() {
        let (mut session, fleet) = accepted(7);
        assert_eq!(
            session.refused(Kind::Samples, &reply("they", 9, 4, 3)),
            Some("they".to_owned())
        );
        assert!(!session.holds(&fleet));
        let stamp = session.topology_stamp();
        assert_eq!((stamp.epoch, stamp.sequence), (10, 1));
    }

    #[test]
    fn another_agent_of_the_same_epoch_is_topped_too() {
        let (mut session, _) = accepted(7);
        assert_eq!(
            session.refused(Kind::Topology, &reply("they", 7, 1, 1)),
            Some("they".to_owned())
        );
        assert_eq!(session.topology_stamp().epoch, 8);
    }

    #[test]
    fn a_restarted_envoy_gets_the_topology_again_in_the_same_epoch() {
        let (mut session, fleet) = accepted(7);
        assert_eq!(session.refused(Kind::Samples, &reply("", 0, 0, 0)), None);
        assert!(!session.holds(&fleet));
        let stamp = session.topology_stamp();
        assert_eq!((stamp.epoch, stamp.sequence), (7, 2));
    }

    #[test]
    fn an_older_agents_snapshot_is_replaced_without_climbing() {
        let (mut session, _) = accepted(7);
        assert_eq!(
            session.refused(Kind::Samples, &reply("they", 3, 1, 1)),
            Some("they".to_owned())
        );
        assert_eq!(session.topology_stamp().epoch, 7);
    }

    #[test]
    fn only_the_sequence_that_is_behind_is_moved_on() {
        let (mut session, fleet) = accepted(7);
        assert_eq!(session.refused(Kind::Samples, &reply("me", 7, 41, 1)), None);
        assert!(session.holds(&fleet), "the topology held is ours");
        assert_eq!(session.samples_stamp().unwrap().0.sequence, 42);
        // Samples that index another topology than the one held.
        assert_eq!(session.refused(Kind::Samples, &reply("me", 7, 42, 5)), None);
        assert!(!session.holds(&fleet));
        assert_eq!(session.topology_stamp().sequence, 6);
    }
}
