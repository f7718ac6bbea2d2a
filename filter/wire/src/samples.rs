//! *Samples*: what the engines report, pushed in a compact binary form at every refresh.
//!
//! Layout, little endian: magic `PDS`, wire version `u8`; epoch, sequence, topology sequence
//! `u64` each; length-prefixed (`u16`) agent id; count `u32`; then per pod its ordinal `u32`,
//! age `u32` (ms), presence bits `u16` and one `f64` per present field, in the order of
//! [`PodSample`]'s fields. A missing number is absent, never zero. Pods come in ascending order of
//! their ordinals. A presence bit this version does not know still stands for one `f64`, which is
//! skipped: a newer agent may report more.

use crate::topology::{MAX_MESSAGE, MAX_PODS, Stamp, WIRE_VERSION};

const MAGIC: &[u8; 3] = b"PDS";
/// Fields of a sample in the order of their presence bits.
const FIELDS: [&str; 8] = [
    "running",
    "waiting",
    "kv_usage",
    "generation_throughput",
    "drain_rate",
    "prefill_ms",
    "remote_running",
    "remote_decode_tokens",
];

/// Samples of one refresh.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// Sender and order; the epoch is also the topology's.
    pub stamp: Stamp,
    /// Sequence of the topology (same epoch) that the ordinals index; another one is a 409.
    pub topology_sequence: u64,
    /// Pods that have a sample.
    pub pods: Vec<PodSample>,
}

/// What one engine reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PodSample {
    /// Position of the pod in the concatenation of all models' pod lists.
    pub ordinal: u32,
    /// Age of the sample when it was sent, in ms.
    pub age_ms: u32,
    /// Requests running on the engine.
    pub running: Option<f64>,
    /// Requests waiting in the engine's queues.
    pub waiting: Option<f64>,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Generated tokens per second.
    pub generation_throughput: Option<f64>,
    /// Requests finished per second over the last minute.
    pub drain_rate: Option<f64>,
    /// Mean prefill time of a request, in ms.
    pub prefill_ms: Option<f64>,
    /// Requests that other gateway replicas run on the pod.
    pub remote_running: Option<f64>,
    /// Decode tokens that other gateway replicas have charged to the pod.
    pub remote_decode_tokens: Option<f64>,
}

/// Why samples are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplesError {
    /// Larger than [`MAX_MESSAGE`] or with more pods than [`MAX_PODS`] (413).
    #[error("{what} {found} is over the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// How large it is.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// Another wire version (426).
    #[error(
        "wire version {found} is unknown, this filter reads {WIRE_VERSION}: run the agent and the filter of one release"
    )]
    Version {
        /// Version received.
        found: u8,
    },
    /// Does not start as samples do (400).
    #[error("no samples: the message does not start with PDS")]
    Magic,
    /// Ends inside a field (400).
    #[error("ends inside {0}")]
    Truncated(String),
    /// Goes on after the last pod (400).
    #[error("{0} bytes after the last pod")]
    Trailing(usize),
    /// A field holds what it must not hold (400).
    #[error("{path}: {problem}")]
    Invalid {
        /// Where, as `pods[2].running`.
        path: String,
        /// What, and what is allowed.
        problem: String,
    },
}

/// Reads fields from the front of a message.
struct Reader<'a> {
    rest: &'a [u8],
}

// === impl Samples ===

impl Samples {
    /// The pushed form. Pods are written in the order of their ordinals.
    pub fn encode(&self) -> Vec<u8> {
        let mut pods: Vec<&PodSample> = self.pods.iter().collect();
        pods.sort_by_key(|pod| pod.ordinal);
        let agent: &[u8] = self.stamp.agent.as_bytes();
        let mut out = Vec::with_capacity(64 + agent.len() + pods.len() * 74);
        out.extend_from_slice(MAGIC);
        out.push(u8::try_from(self.stamp.version).unwrap_or(u8::MAX));
        for word in [
            self.stamp.epoch,
            self.stamp.sequence,
            self.topology_sequence,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        // Longer ids than the limit are refused by every reader; the length only has to be true.
        let len = u16::try_from(agent.len()).unwrap_or(u16::MAX);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend(agent.iter().take(usize::from(len)));
        out.extend_from_slice(&u32::try_from(pods.len()).unwrap_or(u32::MAX).to_le_bytes());
        pods.iter().for_each(|pod| pod.encode_into(&mut out));
        out
    }

    /// Reads and checks pushed samples.
    ///
    /// # Errors
    /// Says which field is wrong and how.
    pub fn decode(bytes: &[u8]) -> Result<Self, SamplesError> {
        if bytes.len() > MAX_MESSAGE {
            let (found, limit) = (bytes.len(), MAX_MESSAGE);
            return Err(SamplesError::TooLarge {
                what: "message size",
                found,
                limit,
            });
        }
        let mut reader = Reader { rest: bytes };
        if reader
            .take::<3>("the magic")
            .map_err(|_| SamplesError::Magic)?
            != *MAGIC
        {
            return Err(SamplesError::Magic);
        }
        let [version] = reader.take("the version")?;
        if u32::from(version) != WIRE_VERSION {
            return Err(SamplesError::Version { found: version });
        }
        let epoch = u64::from_le_bytes(reader.take("the epoch")?);
        let sequence = u64::from_le_bytes(reader.take("the sequence")?);
        let topology_sequence = u64::from_le_bytes(reader.take("the topology sequence")?);
        let len = u16::from_le_bytes(reader.take("the length of the agent id")?);
        let agent = reader.slice(usize::from(len), || "the agent id".to_owned())?;
        let agent = std::str::from_utf8(agent)
            .map_err(|_| invalid("agent", "is not UTF-8"))?
            .to_owned();
        let stamp = Stamp {
            version: WIRE_VERSION,
            agent,
            epoch,
            sequence,
        };
        if let Some(mistake) = stamp.mistakes().pop() {
            return Err(SamplesError::Invalid {
                path: mistake.path,
                problem: mistake.problem,
            });
        }
        let count = u32::from_le_bytes(reader.take("the number of pods")?);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > MAX_PODS {
            let limit = MAX_PODS;
            return Err(SamplesError::TooLarge {
                what: "number of pods",
                found: count,
                limit,
            });
        }
        let mut pods: Vec<PodSample> = Vec::with_capacity(count);
        for at in 0..count {
            let pod = reader.pod(at)?;
            if pods.last().is_some_and(|last| last.ordinal >= pod.ordinal) {
                let problem = "is not above the ordinal before: sort pods, each once";
                return Err(invalid(format!("pods[{at}].ordinal"), problem));
            }
            pods.push(pod);
        }
        if reader.rest.is_empty() {
            Ok(Self {
                stamp,
                topology_sequence,
                pods,
            })
        } else {
            Err(SamplesError::Trailing(reader.rest.len()))
        }
    }
}

// === impl PodSample ===

impl PodSample {
    /// Appends the pushed form of one pod.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let fields = self.fields();
        let mut bits = 0_u16;
        for (at, field) in fields.iter().enumerate() {
            bits |= u16::from(field.is_some()) << at;
        }
        out.extend_from_slice(&self.ordinal.to_le_bytes());
        out.extend_from_slice(&self.age_ms.to_le_bytes());
        out.extend_from_slice(&bits.to_le_bytes());
        for value in fields.into_iter().flatten() {
            out.extend_from_slice(&value.to_le_bytes());
        }
    }

    /// Reads one pod from the front and returns what follows it.
    ///
    /// # Errors
    /// When it is cut short or holds a number that is not finite.
    pub fn decode_from(bytes: &[u8]) -> Result<(Self, &[u8]), SamplesError> {
        let mut reader = Reader { rest: bytes };
        let pod = reader.pod(0)?;
        Ok((pod, reader.rest))
    }

    fn fields(&self) -> [Option<f64>; FIELDS.len()] {
        [
            self.running,
            self.waiting,
            self.kv_usage,
            self.generation_throughput,
            self.drain_rate,
            self.prefill_ms,
            self.remote_running,
            self.remote_decode_tokens,
        ]
    }
}

// === impl Reader ===

impl<'a> Reader<'a> {
    fn slice(&mut self, len: usize, what: impl Fn() -> String) -> Result<&'a [u8], SamplesError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or_else(|| SamplesError::Truncated(what()))?;
        self.rest = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self, what: &str) -> Result<[u8; N], SamplesError> {
        let taken = self.slice(N, || what.to_owned())?;
        taken
            .first_chunk::<N>()
            .copied()
            .ok_or_else(|| SamplesError::Truncated(what.to_owned()))
    }

    fn pod(&mut self, at: usize) -> Result<PodSample, SamplesError> {
        let what = || format!("pods[{at}]");
        let head = self.slice(10, what)?;
        let word = |at: usize| {
            let bytes = head.get(at..).and_then(|bytes| bytes.first_chunk::<4>());
            bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        let bits = head
            .last_chunk::<2>()
            .map_or(0, |bytes| u16::from_le_bytes(*bytes));
        let mut values = [None; FIELDS.len()];
        for (field, (name, value)) in FIELDS.iter().zip(&mut values).enumerate() {
            if bits & (1 << field) == 0 {
                continue;
            }
            let raw = self.slice(8, what)?;
            let number = f64::from_le_bytes(raw.first_chunk::<8>().copied().unwrap_or_default());
            if !number.is_finite() {
                let path = format!("pods[{at}].{name}");
                return Err(invalid(path, format!("{number} is not a finite number")));
            }
            *value = Some(number);
        }
        let unknown = usize::try_from((bits >> FIELDS.len()).count_ones()).unwrap_or_default();
        self.slice(unknown * 8, what)?;
        let [
            running,
            waiting,
            kv_usage,
            generation_throughput,
            drain_rate,
            prefill_ms,
            remote_running,
            remote_decode_tokens,
        ] = values;
        Ok(PodSample {
            ordinal: word(0),
            age_ms: word(4),
            running,
            waiting,
            kv_usage,
            generation_throughput,
            drain_rate,
            prefill_ms,
            remote_running,
            remote_decode_tokens,
        })
    }
}

fn invalid(path: impl Into<String>, problem: impl Into<String>) -> SamplesError {
    SamplesError::Invalid {
        path: path.into(),
        problem: problem.into(),
    }
}

#[cfg(test)]
mod tests;
