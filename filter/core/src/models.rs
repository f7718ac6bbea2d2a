//! What the gateway answers about itself: the models served, and whether it is ready.

use crate::fleet::FleetCache;
use crate::reply::{Fault, Reply};
use pd_wire::knobs::excerpt;
use serde_json::{Value, json};

/// `GET /v1/models`, OpenAI-shaped.
#[must_use]
pub fn list(fleet: &FleetCache) -> Reply {
    let data: Vec<Value> = fleet.models().map(model).collect();
    ok(&json!({ "object": "list", "data": data }))
}

/// `GET /v1/models/{id}`, a request known as `request_id`.
#[must_use]
pub fn one(fleet: &FleetCache, id: &str, request_id: &str) -> Reply {
    match fleet.models().find(|name| *name == id) {
        Some(name) => ok(&model(name)),
        None => Fault::Model(excerpt(id)).reply(Some(request_id)),
    }
}

/// `GET /readyz`, a request known as `request_id`: 200 once a snapshot is held.
#[must_use]
pub fn readiness(fleet: &FleetCache, request_id: &str) -> Reply {
    if fleet.ready() {
        ok(&json!({ "ready": true }))
    } else {
        Fault::NoSnapshot.reply(Some(request_id))
    }
}

fn model(name: &str) -> Value {
    // Pods come and go under a name; no time of creation means anything.
    json!({ "id": name, "object": "model", "created": 0, "owned_by": "pd-router" })
}

fn ok(value: &Value) -> Reply {
    Reply {
        status: 200,
        headers: Vec::new(),
        body: value.to_string().into_bytes(),
    }
}
