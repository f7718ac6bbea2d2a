//! What a guest can reach: the state of its VM ([`Host`]) and of the process ([`World`]).

pub(crate) mod abi;
pub(crate) mod buffers;
pub(crate) mod calls;
pub(crate) mod clock;
pub(crate) mod headers;
pub(crate) mod http;
pub(crate) mod memory;
pub(crate) mod meters;
pub(crate) mod properties;
pub(crate) mod shared;
pub(crate) mod stream;
pub(crate) mod wasi;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use wasmtime::{Memory, TypedFunc};

use calls::{Calls, Reply};
use clock::Clock;
use headers::HeaderMap;
use meters::{Defined, Meters};
use shared::{SharedQueues, SharedStore};
use stream::{Side, Stream};

/// Index of a VM in its gateway; never reused.
pub(crate) type VmKey = usize;

/// Result codes of the ABI (proxy-wasm-cpp-host `WasmResult`); `Ok` is `Result::Ok`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "names of the ABI")]
pub enum Status {
    NotFound = 1,
    BadArgument = 2,
    ParseFailure = 4,
    InvalidMemoryAccess = 6,
    Empty = 7,
    CasMismatch = 8,
    InternalFailure = 10,
}

/// Severity of a log line, as the ABI numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "names of the ABI")]
pub enum LogLevel {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
    Critical,
}

/// A line a guest logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Index of the VM.
    pub vm: VmKey,
    /// Severity; what a guest writes to stderr (a panic) is an error.
    pub level: LogLevel,
    /// The text.
    pub text: String,
}

/// A misuse of the host, or the loss of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A local reply and a resume of one stream in one callback: Envoy does both.
    ReplyAndResume {
        /// The stream's context.
        stream: u32,
    },
    /// Two local replies to one stream in one callback.
    ReplyTwice {
        /// The stream's context.
        stream: u32,
    },
    /// A resume of a side that is not paused.
    ResumeNotPaused {
        /// The stream's context.
        stream: u32,
    },
    /// A stream action while the effective context was a root.
    NoStream {
        /// The hostcall.
        call: &'static str,
    },
    /// A message left with a `content-length` that is not the length of its body.
    ContentLength {
        /// The stream's context.
        stream: u32,
        /// What the header said.
        declared: String,
        /// What was sent, bytes.
        sent: usize,
    },
    /// The guest trapped; its VM is lost.
    Trap {
        /// Index of the VM.
        vm: VmKey,
        /// What wasmtime said.
        message: String,
    },
}

/// What the streams of a gateway left for its engines to see.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forwarded {
    pub(crate) vm: VmKey,
    pub(crate) stream: u32,
}

/// State of the process: shared by every VM of a gateway.
pub(crate) struct World {
    pub(crate) clock: Clock,
    pub(crate) shared: SharedStore,
    pub(crate) queues: SharedQueues,
    pub(crate) meters: Meters,
    pub(crate) calls: Calls,
    pub(crate) logs: Vec<LogLine>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) forwarded: VecDeque<Forwarded>,
    pub(crate) properties: BTreeMap<String, Vec<u8>>,
    pub(crate) clusters: Option<Vec<String>>,
    pub(crate) stop_iteration: bool,
    pub(crate) first_byte_edit: bool,
    pub(crate) request_body_buffer_limit: usize,
    pub(crate) log_level: LogLevel,
}

/// Something asked for in a callback and done after it returned.
#[derive(Debug)]
pub(crate) enum Action {
    Resume(u32, Side),
    Reply(u32, LocalReply),
    Reset(u32),
    RootDone(u32),
}

/// A response made by the proxy.
#[derive(Debug, Clone)]
pub(crate) struct LocalReply {
    pub(crate) status: u32,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) details: String,
}

/// One root context.
#[derive(Debug, Default)]
pub(crate) struct Root {
    pub(crate) period_ms: u32,
    /// Monotonic nanoseconds of the next tick.
    pub(crate) next_tick: Option<u64>,
    /// `on_done` said "not yet": waiting for `proxy_done`.
    pub(crate) pending_done: bool,
}

/// State of one VM.
pub(crate) struct Host {
    pub(crate) world: Rc<RefCell<World>>,
    pub(crate) vm: VmKey,
    pub(crate) vm_id: String,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) vm_config: Vec<u8>,
    /// The plugin configuration, readable during `on_configure` only.
    pub(crate) configuring: Option<Vec<u8>>,
    pub(crate) roots: BTreeMap<u32, Root>,
    pub(crate) streams: BTreeMap<u32, Stream>,
    /// Streams of a lost VM that Envoy did not fail yet.
    pub(crate) orphans: BTreeMap<u32, Stream>,
    pub(crate) current: u32,
    pub(crate) effective: u32,
    /// A local reply was asked for: whatever the callback returns is a pause.
    pub(crate) stop: bool,
    pub(crate) actions: VecDeque<Action>,
    /// Replies and resumes of this callback, per stream.
    pub(crate) acts: BTreeMap<u32, (u32, u32)>,
    /// The call reply being delivered, and its root.
    pub(crate) reply: Option<(u32, Reply)>,
    pub(crate) metrics: Defined,
    pub(crate) last_token: u32,
    pub(crate) random: u64,
    pub(crate) memory: Option<Memory>,
    pub(crate) allocate: Option<TypedFunc<u32, u32>>,
}

// === impl LogLevel ===

impl LogLevel {
    pub(crate) fn from_abi(level: u32) -> Self {
        match level {
            0 => Self::Trace,
            1 => Self::Debug,
            2 => Self::Info,
            3 => Self::Warn,
            4 => Self::Error,
            _ => Self::Critical,
        }
    }
}

// === impl Host ===

impl Host {
    /// The context a hostcall acts on: the effective one while it exists, else the true one.
    pub(crate) fn target(&self) -> u32 {
        let effective = self.effective;
        if effective != 0 && self.knows(effective) {
            effective
        } else {
            self.current
        }
    }

    pub(crate) fn knows(&self, context: u32) -> bool {
        self.roots.contains_key(&context) || self.streams.contains_key(&context)
    }

    /// Root of a context; a root is its own.
    pub(crate) fn root_of(&self, context: u32) -> u32 {
        self.streams
            .get(&context)
            .map_or(context, |stream| stream.root)
    }

    /// The stream a hostcall acts on.
    pub(crate) fn stream(&mut self) -> Option<&mut Stream> {
        let target = self.target();
        self.streams.get_mut(&target)
    }

    pub(crate) fn fault(&self, fault: Fault) {
        self.world.borrow_mut().faults.push(fault);
    }

    pub(crate) fn log(&self, level: LogLevel, text: String) {
        self.world.borrow_mut().logs.push(LogLine {
            vm: self.vm,
            level,
            text,
        });
    }

    /// The next word of this VM's random sequence (splitmix64).
    pub(crate) fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}
