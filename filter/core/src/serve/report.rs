//! What the control endpoint tells about bands.

use super::{Group, Histogram, Plan, key};
use crate::config::{Config, RequestHints, resolve};
use crate::fleet::FleetCache;
use crate::ledger::MODEL_SLOTS;
use crate::port::SharedStore;
use crate::prefix::model_hash;
use pd_wire::control::Band;

/// The bands in force for requests that name no profile, as the shared records give them. Models
/// are in the order of their ledger slots, bands in the order of lengths.
pub fn bands<S: SharedStore + ?Sized>(
    fleet: &mut FleetCache,
    config: &Config,
    store: &S,
) -> Vec<Band> {
    let mut out = Vec::new();
    if !config.knobs.bucket_serve {
        return out;
    }
    for slot in 0..MODEL_SLOTS {
        let Some(stored) = store.get(&key(slot)) else {
            continue;
        };
        let name = fleet.name_of_slot(slot).map(str::to_owned);
        let Some(model) = name.and_then(|name| fleet.model(&name)) else {
            continue;
        };
        let annotation = model
            .config
            .and_then(|index| model.configs.get(usize::try_from(index).ok()?));
        let hints = RequestHints::default();
        let Ok(resolved) = resolve(config, annotation, hints, true) else {
            continue;
        };
        let seen = Histogram::decode(&stored.bytes, model_hash(&model.name));
        let (true, Some(seen)) = (resolved.knobs.bucket_serve, seen) else {
            continue;
        };
        let groups = Group::all(&model, resolved.pod_profile);
        let plan = Plan::of(&seen, &groups, resolved.knobs.bucket_serve_mode);
        out.extend(plan.bands().iter().filter_map(|band| {
            let roleset = model.rolesets.get(usize::from(band.roleset))?;
            Some(Band {
                model: model.name.to_string(),
                namespace: roleset.namespace.clone(),
                roleset: roleset.name.clone(),
                low: band.low,
                high: Some(band.high).filter(|high| *high < u64::MAX),
            })
        }));
    }
    out
}
