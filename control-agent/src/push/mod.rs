//! Feeding the Envoys: one task per Envoy keeps its filter's snapshot the newest.
//!
//! Each Envoy has its own epoch and sequences ([`session`]), because each may hold something
//! else. Samples are pushed at every refresh and at least once a second, so their refusal also
//! tells within that time that an Envoy restarted and holds nothing.

pub mod client;
pub mod feed;
pub mod session;
mod tokenizers;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

pub use client::{Credentials, EnvoyUrl};

use crate::metrics::AckAge;
use client::ControlClient;

/// What is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Models and pods.
    Topology,
    /// What the engines report.
    Samples,
    /// How a model's prompts become tokens.
    Tokenizer,
}

impl Kind {
    /// Label value for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Topology => "topology",
            Self::Samples => "samples",
            Self::Tokenizer => "tokenizer",
        }
    }
}

/// One Envoy: how to reach it and what it acknowledged.
#[derive(Debug)]
pub struct Target {
    /// Its control endpoint.
    pub client: ControlClient,
    acknowledged: Mutex<Acknowledged>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Acknowledged {
    topology: Option<Instant>,
    samples: Option<Instant>,
}

impl Target {
    /// An Envoy that acknowledged nothing yet.
    pub fn new(client: ControlClient) -> Self {
        Self {
            client,
            acknowledged: Mutex::default(),
        }
    }

    /// Host and port, for logs and labels.
    pub fn name(&self) -> &str {
        self.client.name()
    }

    fn lock(&self) -> MutexGuard<'_, Acknowledged> {
        self.acknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A push was accepted.
    pub fn acknowledge(&self, kind: Kind, now: Instant) {
        let mut acknowledged = self.lock();
        match kind {
            Kind::Topology => acknowledged.topology = Some(now),
            Kind::Samples => acknowledged.samples = Some(now),
            // Pushed once: its age says nothing.
            Kind::Tokenizer => {}
        }
    }

    /// True once a topology was accepted.
    pub fn fed(&self) -> bool {
        self.lock().topology.is_some()
    }

    /// Time since the last acknowledgement of each kind there was.
    pub fn ages(&self, now: Instant) -> Vec<AckAge> {
        let Acknowledged { topology, samples } = *self.lock();
        let age = |kind: Kind, at: Option<Instant>| {
            let age: Option<Duration> = at.map(|at| now.saturating_duration_since(at));
            age.map(|age| AckAge {
                target: self.name().to_owned(),
                kind: kind.label(),
                age,
            })
        };
        [age(Kind::Topology, topology), age(Kind::Samples, samples)]
            .into_iter()
            .flatten()
            .collect()
    }
}
