//! The charges of one VM: which requests it has sent where, and their sum per model and pod.
//!
//! Life of a charge: charged → prefill done (the computing part is given back, the KV stays) →
//! decode sent (pending becomes running) → released. Every step subtracts what the charge stood
//! for before and adds what it stands for after, so sums can neither drift nor go negative, and a
//! step that comes twice or late changes nothing.

use super::{Amounts, PodKey};
use std::collections::{BTreeMap, BTreeSet};

/// Most charges of one VM. Requests beyond it are served and not counted.
pub const MAX_CHARGES: usize = 1 << 20;
/// Most tokens of one charge. With [`MAX_CHARGES`] no sum reaches 2^64, so sums stay exact.
pub const MAX_TOKENS: u64 = 1 << 43;
/// Latest routing time that is counted, in ms (278 years after the clock's start).
const MAX_ROUTED_AT_MS: u64 = 1 << 43;

/// A charge of this VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChargeId(pub u64);

/// What a choice charges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pick {
    /// Charge of the prefill pod; none when one pod serves both phases.
    pub prefill: Option<PrefillCharge>,
    /// Charge of the pod that generates.
    pub decode: Option<DecodeCharge>,
    /// Time after which the charge counts as leaked, in ms; 0 = never.
    pub ttl_ms: u64,
}

/// Charge of a prefill pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillCharge {
    /// The pod.
    pub pod: PodKey,
    /// Cost of the request plus the prompt tokens the pod has to compute.
    pub tokens: u64,
}

/// Charge of a decode pod, or of the one pod of a one-leg request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeCharge {
    /// The pod.
    pub pod: PodKey,
    /// Prompt tokens.
    pub tokens: u64,
}

/// A charge that outlived its TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired {
    /// Its id.
    pub id: ChargeId,
    /// Number of the model's record.
    pub model_slot: u16,
    /// What the prefill pod was charged.
    pub prefill: Option<PrefillCharge>,
    /// What the decode pod was charged.
    pub decode: Option<DecodeCharge>,
    /// Time since it was charged, in ms.
    pub age_ms: u64,
}

/// All charges of a VM.
#[derive(Debug, Default)]
pub struct Book {
    charges: BTreeMap<ChargeId, Entry>,
    models: BTreeMap<u16, Vec<(PodKey, Amounts)>>,
    dirty: BTreeSet<u16>,
    last_id: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    model_slot: u16,
    pick: Pick,
    routed_at_ms: u64,
    prefilled: bool,
    sent: bool,
}

// === impl Book ===

impl Book {
    /// Charges a choice; `None` when [`MAX_CHARGES`] are outstanding.
    pub fn charge(&mut self, model_slot: u16, pick: Pick, now_ms: u64) -> Option<ChargeId> {
        if self.charges.len() >= MAX_CHARGES {
            return None;
        }
        self.last_id = self.last_id.wrapping_add(1);
        let id = ChargeId(self.last_id);
        let entry = Entry {
            model_slot,
            pick: pick.bounded(),
            routed_at_ms: now_ms.min(MAX_ROUTED_AT_MS),
            prefilled: false,
            sent: false,
        };
        self.post(&entry, Amounts::plus);
        self.charges.insert(id, entry);
        Some(id)
    }

    /// The prefill pod has computed the prompt and still holds its KV. Returns the model's slot
    /// when that changed anything.
    pub fn prefill_done(&mut self, id: ChargeId) -> Option<u16> {
        self.step(id, |entry| !std::mem::replace(&mut entry.prefilled, true))
    }

    /// The decode leg was sent. Returns the model's slot when that changed anything.
    pub fn decode_sent(&mut self, id: ChargeId) -> Option<u16> {
        self.step(id, |entry| !std::mem::replace(&mut entry.sent, true))
    }

    /// Gives back whatever is left of a charge. Returns the model's slot when there was one.
    pub fn release(&mut self, id: ChargeId) -> Option<u16> {
        let entry = self.charges.remove(&id)?;
        self.post(&entry, Amounts::minus);
        Some(entry.model_slot)
    }

    /// Charges older than their TTL, oldest id first.
    pub fn expired(&self, now_ms: u64) -> Vec<Expired> {
        let age = |entry: &Entry| now_ms.saturating_sub(entry.routed_at_ms);
        self.charges
            .iter()
            .filter(|(_, entry)| entry.pick.ttl_ms > 0 && age(entry) >= entry.pick.ttl_ms)
            .map(|(id, entry)| Expired {
                id: *id,
                model_slot: entry.model_slot,
                prefill: entry.pick.prefill,
                decode: entry.pick.decode,
                age_ms: age(entry),
            })
            .collect()
    }

    /// What this VM has charged to the pods of a model, sorted by pod; no zero entries.
    pub fn sums(&self, model_slot: u16) -> &[(PodKey, Amounts)] {
        self.models.get(&model_slot).map_or(&[], Vec::as_slice)
    }

    /// Charges outstanding.
    pub fn len(&self) -> usize {
        self.charges.len()
    }

    /// True without charges.
    pub fn is_empty(&self) -> bool {
        self.charges.is_empty()
    }

    /// Notes whether the shared record of a model shows this VM's sums.
    pub fn set_dirty(&mut self, model_slot: u16, dirty: bool) {
        if dirty {
            self.dirty.insert(model_slot);
        } else {
            self.dirty.remove(&model_slot);
        }
    }

    /// Notes that no record shows this VM's sums, as after it took another slot.
    pub fn set_all_dirty(&mut self) {
        self.dirty.extend(self.models.keys());
    }

    /// Models whose record does not show this VM's sums.
    pub fn dirty(&self) -> Vec<u16> {
        self.dirty.iter().copied().collect()
    }

    fn step(&mut self, id: ChargeId, change: impl FnOnce(&mut Entry) -> bool) -> Option<u16> {
        let entry = self.charges.get_mut(&id)?;
        let before = *entry;
        if !change(entry) {
            return None;
        }
        let after = *entry;
        // Plus first, so that a sum which stays above zero is never taken out of the list.
        self.post(&after, Amounts::plus);
        self.post(&before, Amounts::minus);
        Some(after.model_slot)
    }

    fn post(&mut self, entry: &Entry, op: fn(&mut Amounts, &Amounts)) {
        let sums = self.models.entry(entry.model_slot).or_default();
        for (pod, amounts) in entry.outstanding() {
            if amounts.is_zero() {
                continue;
            }
            match sums.binary_search_by_key(&pod, |(key, _)| *key) {
                Ok(at) => {
                    let Some((_, sum)) = sums.get_mut(at) else {
                        continue;
                    };
                    op(sum, &amounts);
                    if sum.is_zero() {
                        sums.remove(at);
                    }
                }
                Err(at) => {
                    let mut sum = Amounts::default();
                    op(&mut sum, &amounts);
                    sums.insert(at, (pod, sum));
                }
            }
        }
        if sums.is_empty() {
            self.models.remove(&entry.model_slot);
        }
    }
}

// === impl Entry ===

impl Entry {
    /// What the charge stands for in its present state.
    fn outstanding(&self) -> impl Iterator<Item = (PodKey, Amounts)> + use<> {
        let computing = u64::from(!self.prefilled);
        let prefill = self.pick.prefill.map(|charge| {
            let amounts = Amounts {
                prefill_requests: u32::from(!self.prefilled),
                active_tokens: charge.tokens.saturating_mul(computing),
                kv_tokens: charge.tokens,
                ..Amounts::default()
            };
            (charge.pod, amounts)
        });
        let decode = self.pick.decode.map(|charge| {
            let amounts = Amounts {
                decode_pending: u32::from(!self.sent),
                decode_running: u32::from(self.sent),
                decode_tokens: charge.tokens,
                routed_at_sum_ms: self.routed_at_ms,
                ..Amounts::default()
            };
            (charge.pod, amounts)
        });
        prefill.into_iter().chain(decode)
    }
}

// === impl Pick ===

impl Pick {
    fn bounded(mut self) -> Self {
        if let Some(prefill) = &mut self.prefill {
            prefill.tokens = prefill.tokens.min(MAX_TOKENS);
        }
        if let Some(decode) = &mut self.decode {
            decode.tokens = decode.tokens.min(MAX_TOKENS);
        }
        self
    }
}

// === impl Amounts ===

impl Amounts {
    /// Wraps, so that [`Amounts::minus`] is its exact inverse whatever came in between; the bounds
    /// above keep sums from ever wrapping.
    fn plus(&mut self, other: &Self) {
        self.prefill_requests = self.prefill_requests.wrapping_add(other.prefill_requests);
        self.active_tokens = self.active_tokens.wrapping_add(other.active_tokens);
        self.kv_tokens = self.kv_tokens.wrapping_add(other.kv_tokens);
        self.decode_pending = self.decode_pending.wrapping_add(other.decode_pending);
        self.decode_running = self.decode_running.wrapping_add(other.decode_running);
        self.decode_tokens = self.decode_tokens.wrapping_add(other.decode_tokens);
        self.routed_at_sum_ms = self.routed_at_sum_ms.wrapping_add(other.routed_at_sum_ms);
    }

    fn minus(&mut self, other: &Self) {
        self.prefill_requests = self.prefill_requests.wrapping_sub(other.prefill_requests);
        self.active_tokens = self.active_tokens.wrapping_sub(other.active_tokens);
        self.kv_tokens = self.kv_tokens.wrapping_sub(other.kv_tokens);
        self.decode_pending = self.decode_pending.wrapping_sub(other.decode_pending);
        self.decode_running = self.decode_running.wrapping_sub(other.decode_running);
        self.decode_tokens = self.decode_tokens.wrapping_sub(other.decode_tokens);
        self.routed_at_sum_ms = self.routed_at_sum_ms.wrapping_sub(other.routed_at_sum_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFILL: PodKey = PodKey(20);
    const DECODE: PodKey = PodKey(10);

    fn pair(tokens: u64) -> Pick {
        Pick {
            prefill: Some(PrefillCharge {
                pod: PREFILL,
                tokens: tokens.saturating_add(3_500),
            }),
            decode: Some(DecodeCharge {
                pod: DECODE,
                tokens,
            }),
            ttl_ms: 1_000,
        }
    }

    #[test]
    fn a_charge_passes_through_its_life_and_leaves_nothing() {
        let mut book = Book::default();
        let id = book.charge(4, pair(100), 50).unwrap();
        let pending = Amounts {
            decode_pending: 1,
            decode_tokens: 100,
            routed_at_sum_ms: 50,
            ..Amounts::default()
        };
        let computing = Amounts {
            prefill_requests: 1,
            active_tokens: 3_600,
            kv_tokens: 3_600,
            ..Amounts::default()
        };
        assert_eq!(book.sums(4), [(DECODE, pending), (PREFILL, computing)]);

        assert_eq!(book.prefill_done(id), Some(4));
        let held = Amounts {
            kv_tokens: 3_600,
            ..Amounts::default()
        };
        assert_eq!(book.sums(4), [(DECODE, pending), (PREFILL, held)]);

        assert_eq!(book.decode_sent(id), Some(4));
        let running = Amounts {
            decode_pending: 0,
            decode_running: 1,
            ..pending
        };
        assert_eq!(book.sums(4), [(DECODE, running), (PREFILL, held)]);

        assert_eq!(book.release(id), Some(4));
        assert_eq!(book.sums(4), []);
        assert!(book.is_empty() && book.models.is_empty());
    }

    #[test]
    fn a_step_that_comes_twice_or_late_changes_nothing() {
        let mut book = Book::default();
        let id = book.charge(0, pair(1), 0).unwrap();
        assert_eq!(book.prefill_done(id), Some(0));
        assert_eq!(book.prefill_done(id), None);
        assert_eq!(book.decode_sent(id), Some(0));
        assert_eq!(book.decode_sent(id), None);
        assert_eq!(book.release(id), Some(0));
        assert_eq!(book.release(id), None);
        assert_eq!(book.prefill_done(id), None);
        assert_eq!(book.sums(0), []);
    }

    #[test]
    fn both_legs_on_one_pod_and_one_leg_alone_end_at_zero() {
        let mut book = Book::default();
        let mut same = pair(7);
        same.decode = Some(DecodeCharge {
            pod: PREFILL,
            tokens: 7,
        });
        let one = Pick {
            prefill: None,
            ..pair(u64::MAX)
        };
        let ids = [book.charge(1, same, 3), book.charge(1, one, 3)];
        assert_eq!(book.sums(1).len(), 2);
        assert_eq!(book.sums(1)[0].1.decode_tokens, MAX_TOKENS);
        for id in ids.into_iter().flatten() {
            book.decode_sent(id);
            book.release(id);
        }
        assert_eq!(book.sums(1), []);
    }

    #[test]
    fn a_charge_expires_after_its_own_ttl_and_never_with_zero() {
        let mut book = Book::default();
        let id = book.charge(1, pair(1), 100).unwrap();
        book.charge(
            1,
            Pick {
                ttl_ms: 0,
                ..pair(1)
            },
            100,
        )
        .unwrap();
        assert_eq!(book.expired(1_099), []);
        let expired = book.expired(1_100);
        assert_eq!(expired.len(), 1);
        assert_eq!((expired[0].id, expired[0].age_ms), (id, 1_000));
    }
}
