//! What the control endpoint tells about ejections.

use super::{Entry, Phase, record};
use crate::fleet::{FleetCache, ModelFleet};
use crate::ledger::PodKey;
use crate::port::SharedStore;
use pd_wire::control::Ejected;

/// Everything ejected, by model in the order of their slots.
pub(super) fn list<S: SharedStore + ?Sized>(
    store: &S,
    fleet: &mut FleetCache,
    now_ms: u64,
) -> Vec<Ejected> {
    let mut slots: Vec<u16> = fleet.slots().collect();
    slots.sort_unstable();
    let mut out = Vec::new();
    for slot in slots {
        let Some(stored) = store.get(&record::key(slot)) else {
            continue;
        };
        let name = fleet.name_of_slot(slot).map(str::to_owned);
        let Some(model) = name.and_then(|name| fleet.model(&name)) else {
            continue;
        };
        let entries = record::decode(&stored.bytes);
        let ejected = entries.iter().filter(|entry| entry.ejected);
        out.extend(ejected.filter_map(|entry| described(entry, &model, now_ms)));
    }
    out
}

/// `None` for pods that left.
fn described(entry: &Entry, model: &ModelFleet, now_ms: u64) -> Option<Ejected> {
    let pods: Option<Vec<String>> = entry.subject.pods().map(|key| name(model, key)).collect();
    Some(Ejected {
        model: model.name.to_string(),
        pods: pods?,
        phase: match entry.phase(now_ms) {
            Phase::InService => return None,
            Phase::Out => "ejected",
            Phase::Due => "trial_due",
            Phase::OnTrial => "on_trial",
        }
        .to_owned(),
        remaining_ms: entry.until_ms.saturating_sub(now_ms),
        cause: entry.cause.name().to_owned(),
        times: u32::from(entry.times),
    })
}

fn name(model: &ModelFleet, key: PodKey) -> Option<String> {
    let pod = model.pods.iter().find(|pod| pod.key == key)?;
    Some(format!("{}/{}", pod.namespace, pod.name))
}
