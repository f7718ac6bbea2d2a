//! What the control endpoint tells about charges and VMs.

use super::{Amounts, Expired, Ledger, MODEL_SLOTS, PodKey, Totals};
use crate::fleet::{FleetCache, ModelFleet};
use crate::port::SharedStore;
use pd_wire::control::{Charged, Ledgers, ModelLedger, PodLedger, VmStatus};

impl Ledger {
    /// What all VMs have charged to every pod, by the names the fleet knows. Models are in the
    /// order of their ledger slots.
    pub fn ledgers<S: SharedStore + ?Sized>(
        &mut self,
        store: &S,
        fleet: &mut FleetCache,
    ) -> Ledgers {
        let mut out = Ledgers::default();
        for slot in 0..MODEL_SLOTS {
            let totals = self.totals(store, slot);
            if totals.is_zero() {
                continue;
            }
            let model = model_name(fleet, slot);
            let pods = named(&totals, fleet.model(&model).as_deref());
            pods.iter().for_each(|pod| out.total.add(&pod.charged));
            out.models.push(ModelLedger { model, pods });
        }
        out
    }

    /// The live VMs of this format, as of now.
    pub fn vms<S: SharedStore + ?Sized>(&self, store: &S) -> Vec<VmStatus> {
        let stored = store.get(&super::slots::key(self.format()));
        let table = stored.and_then(|stored| super::slots::Table::parse(&stored.bytes).ok());
        let table = table.as_ref().unwrap_or(self.peers.table());
        table
            .owners()
            .map(|(vm, slot)| VmStatus {
                slot: u32::from(vm.slot),
                generation: vm.generation,
                beat: slot.beat,
                live_flows: slot.vitals.live_flows,
                memory_pages: slot.vitals.memory_pages,
            })
            .collect()
    }
}

impl Expired {
    /// What it was and how long it was held, by the names the fleet knows.
    pub fn describe(&self, fleet: &mut FleetCache) -> String {
        let model = model_name(fleet, self.model_slot);
        let known = fleet.model(&model);
        let name = |key| {
            let (namespace, name) = pod_name(key, known.as_deref());
            format!("{namespace}/{name}")
        };
        let prefill = self.prefill.map(|charge| {
            format!(
                ", {} tokens at prefill pod {}",
                charge.tokens,
                name(charge.pod)
            )
        });
        let decode = self.decode.map(|charge| {
            format!(
                ", {} tokens at decode pod {}",
                charge.tokens,
                name(charge.pod)
            )
        });
        format!(
            "a charge of model {model}, held for {} ms{}{}",
            self.age_ms,
            prefill.unwrap_or_default(),
            decode.unwrap_or_default()
        )
    }
}

/// Name of the model that owns a slot. One that left and whose slot was not given away by name
/// is called by the slot.
fn model_name(fleet: &FleetCache, slot: u16) -> String {
    fleet
        .name_of_slot(slot)
        .map_or_else(|| format!("slot-{slot}"), str::to_owned)
}

/// Namespace and name of a pod; one that the model no longer has is called by its key.
fn pod_name(key: PodKey, model: Option<&ModelFleet>) -> (String, String) {
    let pod = model.and_then(|model| model.pods.iter().find(|pod| pod.key == key));
    pod.map_or_else(
        || (String::new(), format!("{:016x}", key.0)),
        |pod| (pod.namespace.clone(), pod.name.clone()),
    )
}

/// The pods with charges, sorted by name; those the model no longer has by their key, first.
fn named(totals: &Totals, model: Option<&ModelFleet>) -> Vec<PodLedger> {
    let mut pods: Vec<PodLedger> = totals
        .sorted()
        .into_iter()
        .map(|(key, amounts)| {
            let (namespace, name) = pod_name(key, model);
            PodLedger {
                namespace,
                name,
                charged: amounts.into(),
            }
        })
        .collect();
    pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    pods
}

impl From<Amounts> for Charged {
    fn from(amounts: Amounts) -> Self {
        Self {
            prefill_requests: u64::from(amounts.prefill_requests),
            active_tokens: amounts.active_tokens,
            kv_tokens: amounts.kv_tokens,
            decode_pending: u64::from(amounts.decode_pending),
            decode_running: u64::from(amounts.decode_running),
            decode_tokens: amounts.decode_tokens,
        }
    }
}
