//! Whom a choice avoids: the ejected, as far as the model can do without them.
//!
//! Counted are *pairs* (each prefill pod of a roleset with each of its decode pods) and *singles*
//! (standard pods, and decode pods of no roleset that serves). An ejected pod takes its pairs along.
//! Ejections are taken in the order they end, and one that would take more than `percent` of the
//! pairs or of the singles, or the last of them, is passed over; a lone single may go while
//! there are pairs. The rule is applied here, at every look, and not only when something is
//! ejected: the fleet may have shrunk since.

use super::entry::{Entry, Phase, Subject};
use crate::fleet::{ModelFleet, Roleset};
use crate::ledger::PodKey;
use crate::select::Shape;
use pd_wire::topology::Role;

/// Whom a choice avoids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// By position.
    out: Vec<bool>,
    blocked: Vec<(u16, u16)>,
    /// Who may be chosen for a trial, with positions.
    due: Vec<(Subject, Place)>,
}

/// A subject by positions in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Pod(u16),
    Pair(u16, u16),
}

/// What a model has, and what was taken of it.
struct Stock<'a> {
    fleet: &'a ModelFleet,
    /// Positions by key, sorted.
    positions: Vec<(PodKey, u16)>,
    taken: Vec<bool>,
    blocked: Vec<(u16, u16)>,
    pairs: Budget,
    singles: Budget,
}

/// How many of a kind may be taken.
struct Budget {
    left: u64,
}

// === impl View ===

impl View {
    /// Whom to avoid at `now_ms`; `None` when nobody.
    pub(super) fn of(
        fleet: &ModelFleet,
        entries: &[Entry],
        percent: u64,
        now_ms: u64,
    ) -> Option<Self> {
        let ejected = in_order(entries);
        if ejected.is_empty() {
            return None;
        }
        let mut stock = Stock::new(fleet, &ejected, percent);
        let mut view = Self {
            out: vec![false; fleet.pods.len()],
            ..Self::default()
        };
        for entry in ejected {
            let Some(place) = stock.place(entry.subject).filter(|at| stock.take(*at)) else {
                continue;
            };
            match (entry.phase(now_ms), place) {
                (Phase::Due, place) => view.due.push((entry.subject, place)),
                (_, Place::Pod(pod)) => {
                    if let Some(out) = view.out.get_mut(usize::from(pod)) {
                        *out = true;
                    }
                }
                (_, Place::Pair(prefill, decode)) => view.blocked.push((prefill, decode)),
            }
        }
        Some(view)
    }

    /// True when the model can do without one more.
    pub(super) fn may_take(
        fleet: &ModelFleet,
        entries: &[Entry],
        subject: Subject,
        percent: u64,
    ) -> bool {
        let ejected = in_order(entries);
        let wanted = Entry::new(subject);
        let all: Vec<&Entry> = ejected.iter().copied().chain([&wanted]).collect();
        let mut stock = Stock::new(fleet, &all, percent);
        for entry in ejected {
            if let Some(place) = stock.place(entry.subject) {
                stock.take(place);
            }
        }
        stock.place(subject).is_some_and(|place| stock.take(place))
    }

    /// True for pods that may be chosen.
    #[must_use]
    pub fn allows(&self, pod: u16) -> bool {
        !self.out.get(usize::from(pod)).copied().unwrap_or(false)
    }

    /// Pairs (prefill, decode) that may not meet.
    #[must_use]
    pub fn blocked_pairs(&self) -> &[(u16, u16)] {
        &self.blocked
    }

    /// Whose trial a request of this shape could be.
    pub(super) fn due_for(&self, fleet: &ModelFleet, shape: Shape) -> Option<Place> {
        let suits = |place: &&(Subject, Place)| match place.1 {
            Place::Pair(..) => shape == Shape::Pair,
            Place::Pod(pod) => {
                let role = fleet.pod(pod).map(|pod| pod.role);
                match shape {
                    Shape::Pair => role != Some(Role::Standard),
                    Shape::OneLeg | Shape::Plain(_) => role != Some(Role::Prefill),
                }
            }
        };
        self.due.iter().find(suits).map(|(_, place)| *place)
    }

    /// Whose trial a request would be that goes to these pods.
    #[must_use]
    pub fn trials(&self, prefill: Option<u16>, decode: u16) -> Vec<Subject> {
        let concerns = |place: &Place| match *place {
            Place::Pod(pod) => Some(pod) == prefill || pod == decode,
            Place::Pair(left, right) => Some(left) == prefill && right == decode,
        };
        let due = self.due.iter().filter(|(_, place)| concerns(place));
        due.map(|(subject, _)| *subject).collect()
    }
}

// === impl Place ===

impl Place {
    /// True for its own pods, and for all pods of roles that it does not fill.
    pub(super) fn favours(self, fleet: &ModelFleet, pod: u16) -> bool {
        let role = |at: u16| fleet.pod(at).map(|pod| pod.role);
        let fills = |own: u16| own == pod || role(own) != role(pod);
        match self {
            Self::Pod(own) => fills(own),
            Self::Pair(prefill, decode) => fills(prefill) && fills(decode),
        }
    }
}

/// The ejected, by the end of their time.
fn in_order(entries: &[Entry]) -> Vec<&Entry> {
    let mut ejected: Vec<&Entry> = entries.iter().filter(|entry| entry.ejected).collect();
    ejected.sort_unstable_by_key(|entry| (entry.until_ms, entry.subject));
    ejected
}

/// The rolesets that pairs can be chosen from; pods of the others serve alone.
fn serving_sets(fleet: &ModelFleet) -> impl Iterator<Item = &Roleset> {
    fleet.rolesets.iter().filter(|set| set.serves())
}

// === impl Stock ===

impl<'a> Stock<'a> {
    fn new(fleet: &'a ModelFleet, ejected: &[&Entry], percent: u64) -> Self {
        let mut keys: Vec<PodKey> = ejected
            .iter()
            .flat_map(|entry| entry.subject.pods())
            .collect();
        keys.sort_unstable();
        let mut positions: Vec<(PodKey, u16)> = (0_u16..)
            .zip(fleet.pods.iter())
            .filter(|(_, pod)| pod.usable && keys.binary_search(&pod.key).is_ok())
            .map(|(at, pod)| (pod.key, at))
            .collect();
        positions.sort_unstable();
        let pairs: u64 = serving_sets(fleet)
            .map(|set| count(set.prefill.len()).saturating_mul(count(set.decode.len())))
            .fold(0, u64::saturating_add);
        let paired: usize = serving_sets(fleet).map(|set| set.decode.len()).sum();
        let serving = fleet
            .pods
            .iter()
            .filter(|pod| pod.usable && pod.role != Role::Prefill)
            .count();
        let singles = count(serving.saturating_sub(paired));
        Self {
            fleet,
            positions,
            taken: vec![false; fleet.pods.len()],
            blocked: Vec::new(),
            pairs: Budget::new(pairs, percent),
            singles: if singles == 1 && pairs > 0 && percent > 0 {
                Budget { left: 1 }
            } else {
                Budget::new(singles, percent)
            },
        }
    }

    fn place(&self, subject: Subject) -> Option<Place> {
        let position = |key: PodKey| {
            let at = self.positions.binary_search_by_key(&key, |(key, _)| *key);
            self.positions.get(at.ok()?).map(|(_, position)| *position)
        };
        Some(match subject {
            Subject::Pod(pod) => Place::Pod(position(pod)?),
            Subject::Pair(prefill, decode) => Place::Pair(position(prefill)?, position(decode)?),
        })
    }

    fn is_taken(&self, pod: u16) -> bool {
        self.taken.get(usize::from(pod)).copied().unwrap_or(true)
    }

    fn is_open(&self, prefill: u16, decode: u16) -> bool {
        !self.is_taken(prefill)
            && !self.is_taken(decode)
            && !self.blocked.contains(&(prefill, decode))
    }

    /// Takes a subject, if the model can do without it.
    fn take(&mut self, place: Place) -> bool {
        match place {
            Place::Pair(prefill, decode) => {
                let cost = u64::from(self.is_open(prefill, decode));
                let taken = self.pairs.take(cost);
                if taken {
                    self.blocked.push((prefill, decode));
                }
                taken
            }
            Place::Pod(pod) => {
                let mut sets = serving_sets(self.fleet);
                let set = sets.find(|set| set.prefill.contains(&pod) || set.decode.contains(&pod));
                let taken = match set {
                    None => self.singles.take(1),
                    Some(set) if set.prefill.contains(&pod) => {
                        let open = set.decode.iter().filter(|other| self.is_open(pod, **other));
                        let cost = count(open.count());
                        self.pairs.take(cost)
                    }
                    Some(set) => {
                        let open = set
                            .prefill
                            .iter()
                            .filter(|other| self.is_open(**other, pod));
                        let cost = count(open.count());
                        self.pairs.take(cost)
                    }
                };
                if let Some(slot) = self.taken.get_mut(usize::from(pod)).filter(|_| taken) {
                    *slot = true;
                }
                taken
            }
        }
    }
}

// === impl Budget ===

impl Budget {
    /// At most a share of `all`, and never the last.
    fn new(all: u64, percent: u64) -> Self {
        let share = all.saturating_mul(percent) / 100;
        Self {
            left: share.min(all.saturating_sub(1)),
        }
    }

    fn take(&mut self, cost: u64) -> bool {
        match self.left.checked_sub(cost) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }
}

/// Lengths of lists that positions of 16 bits index.
fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
