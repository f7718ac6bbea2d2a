//! Clients that send one request after the other until told to stop.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::client::{Answer, Call};

/// What became of the requests of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Complete answers by status.
    pub complete: BTreeMap<u16, u64>,
    /// Answers that were cut, by status.
    pub cut: BTreeMap<u16, u64>,
    /// Requests without an answer, by reason.
    pub lost: BTreeMap<String, u64>,
    /// One answer that is not a complete 200, for messages.
    pub sample: Option<String>,
}

/// A running load. Dropping it ends it at once.
pub struct Load {
    lanes: Vec<JoinHandle<Outcomes>>,
    ending: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

// === impl Outcomes ===

impl Outcomes {
    /// Requests sent.
    pub fn total(&self) -> u64 {
        let answered: u64 = self.complete.values().chain(self.cut.values()).sum();
        answered + self.lost.values().sum::<u64>()
    }

    /// Adds what became of one request.
    pub fn note(&mut self, result: &anyhow::Result<Answer>) {
        let (table, good) = match result {
            Ok(answer) if answer.complete => (&mut self.complete, answer.status == 200),
            Ok(_) => (&mut self.cut, false),
            Err(error) => {
                *self.lost.entry(format!("{error:#}")).or_default() += 1;
                return;
            }
        };
        if let Ok(answer) = result {
            *table.entry(answer.status).or_default() += 1;
            if !good {
                self.sample = Some(answer.shown());
            }
        }
    }

    /// Adds another load's outcomes.
    pub fn add(&mut self, other: Self) {
        let add = |to: &mut BTreeMap<u16, u64>, from: BTreeMap<u16, u64>| {
            for (status, count) in from {
                *to.entry(status).or_default() += count;
            }
        };
        add(&mut self.complete, other.complete);
        add(&mut self.cut, other.cut);
        for (reason, count) in other.lost {
            *self.lost.entry(reason).or_default() += count;
        }
        self.sample = self.sample.take().or(other.sample);
    }

    /// Panics unless every request got a complete 200; returns how many there were.
    pub fn expect_all_good(&self) -> u64 {
        let good = self.complete.get(&200).copied().unwrap_or_default();
        assert_eq!(good, self.total(), "{self:#?}");
        good
    }
}

// === impl Load ===

impl Load {
    /// Starts clients; each makes its calls by number on a new connection per request, so that a
    /// connection closed between requests cannot be mistaken for a lost request.
    pub fn start(
        to: SocketAddr,
        lanes: usize,
        make: impl Fn(u64) -> Call + Send + Sync + 'static,
    ) -> Self {
        let (ending, done) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (make, next) = (Arc::new(make), Arc::new(AtomicU64::new(0)));
        let lane = |_| {
            let (ending, done) = (Arc::clone(&ending), Arc::clone(&done));
            let (make, next) = (Arc::clone(&make), Arc::clone(&next));
            tokio::spawn(async move {
                let mut outcomes = Outcomes::default();
                while !ending.load(Ordering::Relaxed) {
                    let call = make(next.fetch_add(1, Ordering::Relaxed));
                    outcomes.note(&call.send(to).await);
                    done.fetch_add(1, Ordering::Relaxed);
                }
                outcomes
            })
        };
        let lanes = (0..lanes).map(lane).collect();
        Self {
            lanes,
            ending,
            done,
        }
    }

    /// Waits until this many more requests have ended.
    pub async fn more(&self, count: u64) {
        let goal = self.done.load(Ordering::Relaxed) + count;
        let done = || async {
            let now = self.done.load(Ordering::Relaxed);
            if now >= goal { Ok(()) } else { Err(now) }
        };
        crate::within(Duration::from_secs(60), "the load goes on", done).await;
    }

    /// Lets every client finish its request.
    pub async fn stop(mut self) -> Outcomes {
        self.ending.store(true, Ordering::Relaxed);
        let mut all = Outcomes::default();
        for lane in std::mem::take(&mut self.lanes) {
            match lane.await {
                Ok(outcomes) => all.add(outcomes),
                Err(error) => panic!("a client failed: {error}"),
            }
        }
        all
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for lane in &self.lanes {
            lane.abort();
        }
    }
}
