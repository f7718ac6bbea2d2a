//! A pods file, read again whenever its content changes.
//!
//! Polled instead of watched: polling sees atomic renames, replaced symbolic links (how
//! Kubernetes mounts config maps) and network file systems alike, and half a second is soon
//! enough for a list people or scripts write. What cannot be read leaves the pods known before
//! in place.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use super::document;
use super::index::Index;
use super::settings::Source;
use crate::metrics::Metrics;
use crate::runtime::Stop;
use crate::snapshot::Fleet;

/// Largest pods file, in bytes: twice what 8192 pods of kubectl's output usually take.
const MAX_FILE: u64 = 128 << 20;
/// A file changed this recently may change again without another time stamp.
const UNSETTLED: Duration = Duration::from_secs(2);

/// Where the current fleet is published: `None` until pods were loaded once.
pub type FleetSender = watch::Sender<Option<Arc<Fleet>>>;

/// Why a pods file gave no pods.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// It is longer than the limit.
    #[error("longer than {MAX_FILE} bytes")]
    TooLong,
    /// Its text is refused.
    #[error(transparent)]
    Text(#[from] document::DocumentError),
}

/// Reads the text of a pods file.
pub fn read(path: &Path) -> Result<String, FileError> {
    if std::fs::metadata(path)?.len() > MAX_FILE {
        return Err(FileError::TooLong);
    }
    Ok(std::fs::read_to_string(path)?)
}

/// Text → index and fleet; the fleet carries every warning.
pub fn load(text: &str) -> Result<(Index, Fleet), FileError> {
    let document = document::parse(text)?;
    let mut index = Index::new(Source::File);
    index.reset(document.pods.iter().map(|(name, pod)| (name, pod)));
    let mut fleet = Fleet::of(&index);
    fleet.warnings.splice(0..0, document.warnings);
    Ok((index, fleet))
}

/// Follows the file until `stop`; returns only then.
pub async fn follow(
    path: PathBuf,
    poll: Duration,
    fleets: FleetSender,
    metrics: Arc<Metrics>,
    mut stop: Stop,
) -> anyhow::Result<()> {
    let mut follower = Follower {
        path,
        last: None,
        hash: None,
        said: BTreeSet::new(),
        failing: false,
    };
    loop {
        // Reading and parsing a large list takes a while: off the reactor.
        let step;
        (follower, step) = tokio::task::spawn_blocking(move || {
            let step = follower.step();
            (follower, step)
        })
        .await?;
        match step {
            Step::Same => {}
            Step::Failed(error) => {
                metrics.pods_file_failed();
                follower.failing = true;
                if follower.said.insert(error.clone()) {
                    tracing::warn!(file = %follower.path.display(), error, "pods file not usable, the pods known before stay");
                }
            }
            Step::Loaded(fleet) => {
                follower.report(&fleet);
                metrics.pods_loaded(&fleet);
                let (models, pods) = (fleet.models.len(), fleet.members.len());
                let changed = fleets.send_if_modified(|current| {
                    let changed = current.as_deref() != Some(&fleet);
                    if changed {
                        *current = Some(Arc::new(fleet));
                    }
                    changed
                });
                let repaired = std::mem::take(&mut follower.failing);
                if changed {
                    tracing::info!(models, pods, "pods loaded");
                } else if repaired {
                    tracing::info!(
                        models,
                        pods,
                        "pods file usable again, the pods are the same"
                    );
                }
            }
        }
        tokio::select! {
            () = tokio::time::sleep(poll) => {}
            () = stop.requested() => return Ok(()),
        }
    }
}

enum Step {
    Same,
    Failed(String),
    Loaded(Fleet),
}

struct Follower {
    path: PathBuf,
    /// Time stamp and length of what was read last.
    last: Option<(SystemTime, u64)>,
    hash: Option<u64>,
    /// Warnings already logged that still hold.
    said: BTreeSet<String>,
    /// It was not usable when it was read last.
    failing: bool,
}

impl Follower {
    fn step(&mut self) -> Step {
        match self.read_if_changed() {
            Ok(None) => Step::Same,
            Ok(Some(text)) => match load(&text) {
                Ok((_, fleet)) => Step::Loaded(fleet),
                Err(error) => Step::Failed(error.to_string()),
            },
            Err(error) => {
                // A file that comes back with the same content is loaded again.
                self.last = None;
                self.hash = None;
                Step::Failed(error.to_string())
            }
        }
    }

    fn read_if_changed(&mut self) -> Result<Option<String>, FileError> {
        let metadata = std::fs::metadata(&self.path)?;
        let stamp = (metadata.modified()?, metadata.len());
        let settled = stamp.0.elapsed().is_ok_and(|age| age > UNSETTLED);
        if settled && self.last == Some(stamp) {
            return Ok(None);
        }
        let text = read(&self.path)?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = Some(hasher.finish());
        self.last = Some(stamp);
        if hash == self.hash {
            return Ok(None);
        }
        self.hash = hash;
        Ok(Some(text))
    }

    /// Logs each warning when it first appears.
    fn report(&mut self, fleet: &Fleet) {
        let warnings: BTreeSet<String> = fleet.warnings.iter().cloned().collect();
        for warning in warnings.difference(&self.said) {
            tracing::warn!(warning, "pods file");
        }
        self.said = warnings;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "- {metadata: {name: a, labels: {model.aibrix.ai/name: m}}, status: {podIP: 10.0.0.1}}";

    /// Waits until the log says `line`.
    async fn logged(log: &Path, line: &str) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !std::fs::read_to_string(log).unwrap().contains(line) {
            assert!(
                tokio::time::Instant::now() < deadline,
                "never logged: {line}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_repaired_file_is_said_to_be_usable_again_once() {
        let folder = tempfile::tempdir().unwrap();
        let (pods, log) = (folder.path().join("pods.yaml"), folder.path().join("log"));
        let writer = Arc::new(std::fs::File::create(&log).unwrap());
        let subscriber = tracing_subscriber::fmt()
            .with_writer(writer)
            .with_ansi(false);
        // For this thread, on which the follower logs.
        let _guard = tracing::subscriber::set_default(subscriber.finish());
        let replace = |text: &str| {
            let fresh = folder.path().join("fresh");
            std::fs::write(&fresh, text).unwrap();
            std::fs::rename(&fresh, &pods).unwrap();
        };
        replace(GOOD);
        let (fleets, mut fleet) = watch::channel(None);
        let (stop_all, stop) = Stop::channel();
        let poll = Duration::from_millis(1);
        let following = tokio::spawn(follow(pods.clone(), poll, fleets, Arc::default(), stop));
        logged(&log, "pods loaded").await;
        replace("a: b: c");
        logged(&log, "not usable").await;
        replace(GOOD);
        logged(&log, "usable again").await;
        // What comes after is a change like any other.
        replace(&GOOD.replace("name: a", "name: b"));
        let is_b = |fleet: &Option<Arc<Fleet>>| {
            fleet
                .iter()
                .flat_map(|fleet| &fleet.members)
                .any(|member| member.key.name == "b")
        };
        let changed = tokio::time::timeout(Duration::from_secs(20), fleet.wait_for(is_b));
        drop(changed.await.unwrap().unwrap());
        stop_all.send_replace(true);
        following.await.unwrap().unwrap();
        let log = std::fs::read_to_string(&log).unwrap();
        assert_eq!(log.matches("usable again").count(), 1, "{log}");
        assert_eq!(log.matches("not usable").count(), 1, "{log}");
        assert_eq!(log.matches("pods loaded").count(), 2, "{log}");
    }
}
