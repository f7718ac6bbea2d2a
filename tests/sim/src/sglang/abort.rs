//! Requests in work by their `rid`, and the calls that abort them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use tokio::sync::watch;

use crate::core::Count;
use crate::openai::Abort;
use crate::state::AbortState;

/// Different ids whose calls are counted.
const MOST_IDS: usize = 4096;

/// The requests in work and what was asked about them.
#[derive(Default)]
pub(crate) struct Aborts {
    alive: Mutex<BTreeMap<String, watch::Sender<bool>>>,
    calls: Count,
    ended: Count,
    by_id: Mutex<BTreeMap<String, u64>>,
}

/// Keeps a request among those in work.
pub(super) struct Alive {
    aborts: Arc<Aborts>,
    rid: String,
    abort: Abort,
}

#[derive(Deserialize)]
struct Call {
    #[serde(default)]
    rid: String,
    #[serde(default)]
    abort_all: bool,
}

impl Aborts {
    /// A request comes into work; `None` when one of its name is.
    pub(super) fn enter(self: &Arc<Self>, rid: &str) -> Option<Alive> {
        let mut alive = self.alive();
        if alive.contains_key(rid) {
            return None;
        }
        let (sender, receiver) = watch::channel(false);
        alive.insert(rid.to_owned(), sender);
        Some(Alive {
            aborts: Arc::clone(self),
            rid: rid.to_owned(),
            abort: Abort::new(receiver),
        })
    }

    /// Counts a call.
    pub(super) fn called(&self, body: &[u8]) {
        self.calls.up();
        if let Ok(Call { rid, .. }) = serde_json::from_slice(body) {
            let mut by_id = self.by_id();
            if by_id.len() < MOST_IDS || by_id.contains_key(&rid) {
                let count = by_id.entry(rid).or_default();
                *count = count.saturating_add(1);
            }
        }
    }

    /// Does what a call asks for. Only an id in work aborts anything, and then all that start
    /// with it.
    ///
    /// # Errors
    /// The body is no such call.
    pub(super) fn call(&self, body: &[u8]) -> Result<(), String> {
        let Call { rid, abort_all } =
            serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let alive = self.alive();
        if !abort_all && !alive.contains_key(&rid) {
            return Ok(());
        }
        let from = if abort_all { "" } else { rid.as_str() };
        let meant = alive.range::<str, _>((Bound::Included(from), Bound::Unbounded));
        for (_, sender) in meant.take_while(|(id, _)| abort_all || id.starts_with(&rid)) {
            if !sender.send_replace(true) {
                self.ended.up();
            }
        }
        Ok(())
    }

    /// What was counted.
    pub(crate) fn state(&self) -> AbortState {
        AbortState {
            abort_calls: self.calls.get(),
            aborted_by_call: self.ended.get(),
            abort_rids: self.by_id().clone(),
        }
    }

    /// Zeroes the counts.
    pub(super) fn reset(&self) {
        self.calls.reset();
        self.ended.reset();
        self.by_id().clear();
    }

    fn alive(&self) -> MutexGuard<'_, BTreeMap<String, watch::Sender<bool>>> {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn by_id(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Alive {
    /// Tells when the request is aborted.
    pub(super) fn abort(&self) -> Abort {
        self.abort.clone()
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.aborts.alive().remove(&self.rid);
    }
}
