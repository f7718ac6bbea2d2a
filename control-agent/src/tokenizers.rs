//! Tokenizer files: read, checked, cut down to what a filter needs, and followed.
//!
//! A file that changes is read again; one that became unusable leaves what was read before in
//! place. Pushing is [`crate::push::tokenizers`]' part.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use pd_wire::tokenizer::{MAX_FILE, TokenizerError, TokenizerFile, digest};
use tokio::sync::watch;

use crate::runtime::Stop;

/// A model and the file with its tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name that requests carry in `model`.
    pub model: String,
    /// A Hugging Face `tokenizer.json`.
    pub path: PathBuf,
}

/// A tokenizer that can be pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokenizer {
    /// Name that requests carry in `model`.
    pub model: String,
    /// The pushed form.
    pub file: Bytes,
    /// Identity of the pushed form, as filters show it.
    pub digest: String,
}

/// Where the current tokenizers are published; a new list whenever one changed.
pub type Receiver = watch::Receiver<Arc<Vec<Tokenizer>>>;

/// Why a file gave no tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// It is longer than the limit.
    #[error("longer than {MAX_FILE} bytes")]
    TooLong,
    /// It is refused.
    #[error("{0}")]
    Refused(#[from] TokenizerError),
    /// No model can be built of it.
    #[error("{0}")]
    Impossible(String),
}

// === impl Source ===

impl Source {
    /// Reads and checks the file.
    pub fn read(&self) -> Result<Tokenizer, FileError> {
        let limit = u64::try_from(MAX_FILE).unwrap_or(u64::MAX);
        if std::fs::metadata(&self.path)?.len() > limit {
            return Err(FileError::TooLong);
        }
        let parsed = TokenizerFile::parse(&std::fs::read(&self.path)?)?;
        if let Some(problem) = parsed.impossible_merge() {
            return Err(FileError::Impossible(problem));
        }
        let file = parsed.to_json()?;
        Ok(Tokenizer {
            model: self.model.clone(),
            digest: format!("{:016x}", digest(&file)),
            file: file.into(),
        })
    }
}

/// Follows the files until `stop`; returns only then.
pub async fn follow(
    sources: Vec<Source>,
    poll: Duration,
    current: watch::Sender<Arc<Vec<Tokenizer>>>,
    mut stop: Stop,
) -> anyhow::Result<()> {
    let followed = sources.into_iter().map(|source| (source, None)).collect();
    let mut follower = Follower(followed);
    while !follower.0.is_empty() {
        // Reading and parsing a large file takes a while: off the reactor.
        let changed;
        (follower, changed) = tokio::task::spawn_blocking(move || {
            let changed = follower.changed();
            (follower, changed)
        })
        .await?;
        if !changed.is_empty() {
            current.send_modify(|current| *current = Arc::new(merged(current, changed)));
        }
        tokio::select! {
            () = tokio::time::sleep(poll) => {}
            () = stop.requested() => return Ok(()),
        }
    }
    stop.requested().await;
    Ok(())
}

/// Sources, and time stamp and length of what was read of each last.
struct Follower(Vec<(Source, Option<(SystemTime, u64)>)>);

impl Follower {
    /// Tokenizers of the files that changed and can be used.
    fn changed(&mut self) -> Vec<Tokenizer> {
        let mut changed = Vec::new();
        for (source, last) in &mut self.0 {
            let stamp = stamp(&source.path);
            if stamp.is_some() && stamp == *last {
                continue;
            }
            let is_first_failure = stamp.is_some() || last.is_some();
            *last = stamp;
            match source.read() {
                Ok(tokenizer) => changed.push(tokenizer),
                Err(error) if is_first_failure => {
                    let (model, file) = (&source.model, source.path.display());
                    let error = error.to_string();
                    tracing::warn!(%model, %file, error, "tokenizer not usable, the one before stays");
                }
                Err(_) => {}
            }
        }
        changed
    }
}

fn stamp(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

/// The tokenizers of before with the changed ones in their places.
fn merged(before: &[Tokenizer], changed: Vec<Tokenizer>) -> Vec<Tokenizer> {
    let is_kept = |old: &&Tokenizer| changed.iter().all(|new| new.model != old.model);
    let kept: Vec<_> = before.iter().filter(is_kept).cloned().collect();
    kept.into_iter().chain(changed).collect()
}
