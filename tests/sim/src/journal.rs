//! What arrived at an engine: a bounded ring for the admin endpoint, and optionally a file.
//!
//! The hot path moves the request's parts into the ring; text is made when somebody reads. The
//! file is written by its own thread behind a bounded queue; when that is full requests wait, since
//! a log with holes would mislead a test.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use hyper::http::request::Parts;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh64::xxh64;

use crate::config::EngineConfig;
use crate::core::unix_ms;
use crate::fault::On;
use crate::state::Held;

/// Records queued for the file.
const FILE_QUEUE: usize = 8192;

/// One request as it arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Number of the record, from 0, per engine.
    pub seq: u64,
    /// Arrival in Unix milliseconds.
    pub unix_ms: u64,
    /// Name of the engine.
    pub engine: String,
    /// Which leg the engine took it for; none when it could not tell.
    pub leg: Option<On>,
    /// HTTP method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Headers, names in lower case; repeated ones joined by ", ".
    pub headers: BTreeMap<String, String>,
    /// The body when it is no longer than the limit; invalid UTF-8 is replaced.
    pub body: Option<String>,
    /// Length of the body, bytes.
    pub body_length: usize,
    /// XXH64, seed 0, of the body, as 16 hex digits.
    pub body_hash: String,
    /// The client's address.
    pub peer: String,
    /// What the engine held when the request arrived, itself included.
    #[serde(flatten)]
    pub held: Held,
}

struct Entry {
    seq: u64,
    unix_ms: u64,
    leg: Option<On>,
    parts: Parts,
    body: Option<Bytes>,
    body_length: usize,
    body_hash: u64,
    peer: SocketAddr,
    held: Held,
}

/// The log of one engine.
pub(crate) struct Journal {
    engine: String,
    body_limit: usize,
    capacity: usize,
    ring: Mutex<Ring>,
    file: Option<SyncSender<Job>>,
}

/// Work of the thread that writes the file.
enum Job {
    Write(Arc<Entry>),
    /// Drops this when all before is in the file.
    Tell(SyncSender<()>),
}

#[derive(Default)]
struct Ring {
    next: u64,
    entries: VecDeque<Arc<Entry>>,
}

// === impl Journal ===

impl Journal {
    /// Opens the log an engine's configuration asks for.
    ///
    /// # Errors
    /// The log file cannot be opened.
    pub(crate) fn open(config: &EngineConfig) -> io::Result<Self> {
        let file = match &config.log {
            None => None,
            Some(path) => {
                let file = File::options().create(true).append(true).open(path)?;
                let (sender, receiver) = sync_channel(FILE_QUEUE);
                let engine = config.name.clone();
                std::thread::Builder::new()
                    .name("journal".to_owned())
                    .spawn(move || write_all(file, &engine, &receiver))?;
                Some(sender)
            }
        };
        Ok(Self {
            engine: config.name.clone(),
            body_limit: config.log_body_limit,
            capacity: config.log_ring,
            ring: Mutex::default(),
            file,
        })
    }

    /// Notes a request.
    pub(crate) fn note(
        &self,
        parts: Parts,
        body: &Bytes,
        peer: SocketAddr,
        leg: Option<On>,
        held: impl FnOnce() -> Held,
    ) {
        if self.capacity == 0 && self.file.is_none() {
            return;
        }
        let mut entry = Entry {
            seq: 0,
            unix_ms: unix_ms(),
            leg,
            parts,
            body: (body.len() <= self.body_limit).then(|| body.clone()),
            body_length: body.len(),
            body_hash: xxh64(body, 0),
            peer,
            held: held(),
        };
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        entry.seq = ring.next;
        ring.next = ring.next.wrapping_add(1);
        let entry = Arc::new(entry);
        if self.capacity > 0 {
            if ring.entries.len() >= self.capacity {
                ring.entries.pop_front();
            }
            ring.entries.push_back(Arc::clone(&entry));
        }
        drop(ring);
        if let Some(file) = &self.file {
            // Fails only when the writer gave up on its file, which it reported.
            let _ = file.send(Job::Write(entry));
        }
    }

    /// The newest records, oldest first.
    pub(crate) fn last(&self, count: usize) -> Vec<Record> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let skip = ring.entries.len().saturating_sub(count);
        let entries: Vec<_> = ring.entries.iter().skip(skip).cloned().collect();
        drop(ring);
        entries.iter().map(|e| e.record(&self.engine)).collect()
    }

    /// Waits until the file has all that was noted. Blocks the thread.
    pub(crate) fn flush(&self) {
        let Some(file) = &self.file else {
            return;
        };
        let (done, wait) = sync_channel(0);
        if file.send(Job::Tell(done)).is_ok() {
            // Ends with the error that the sender was dropped: nothing is ever sent.
            let _ = wait.recv();
        }
    }

    /// Forgets the records in the ring.
    pub(crate) fn clear(&self) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.entries.clear();
    }
}

fn write_all(file: File, engine: &str, jobs: &Receiver<Job>) {
    let mut out = BufWriter::new(file);
    let mut next = jobs.recv().ok();
    while let Some(job) = next {
        let written = match job {
            Job::Write(entry) => serde_json::to_writer(&mut out, &entry.record(engine))
                .map_err(io::Error::from)
                .and_then(|()| out.write_all(b"\n")),
            Job::Tell(done) => out.flush().map(|()| drop(done)),
        };
        // Flushed when nothing is queued, so that a reader sees a finished request soon.
        let waiting = jobs.try_recv();
        let written = match waiting {
            Ok(_) => written,
            Err(_) => written.and_then(|()| out.flush()),
        };
        if let Err(error) = written {
            eprintln!("{engine}: the request log cannot be written: {error}");
            return;
        }
        next = waiting.ok().or_else(|| jobs.recv().ok());
    }
}

// === impl Entry ===

impl Entry {
    fn record(&self, engine: &str) -> Record {
        let mut headers = BTreeMap::<String, String>::new();
        for (name, value) in &self.parts.headers {
            let value = String::from_utf8_lossy(value.as_bytes());
            headers
                .entry(name.as_str().to_owned())
                .and_modify(|all| {
                    all.push_str(", ");
                    all.push_str(&value);
                })
                .or_insert_with(|| value.clone().into_owned());
        }
        let path = self.parts.uri.path_and_query();
        Record {
            seq: self.seq,
            unix_ms: self.unix_ms,
            engine: engine.to_owned(),
            leg: self.leg,
            method: self.parts.method.to_string(),
            path: path.map_or_else(String::new, ToString::to_string),
            headers,
            body: self
                .body
                .as_ref()
                .map(|body| String::from_utf8_lossy(body).into_owned()),
            body_length: self.body_length,
            body_hash: format!("{:016x}", self.body_hash),
            peer: self.peer.to_string(),
            held: self.held,
        }
    }
}
