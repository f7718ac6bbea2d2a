//! What a cell is made of.

use crate::expect::Expect;
use crate::layout::{Layout, Role};

/// Engine, with its way to hand KV over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Engine {
    /// vLLM, connector `shfs`.
    VllmShfs,
    /// vLLM, connector `nixl`.
    VllmNixl,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM, decode after the context's reply.
    TrtContextFirst,
    /// TensorRT-LLM, both legs at once.
    TrtGenerationFirst,
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Nothing.
    None,
    /// The prefill takes [`crate::SLOW_MS`], which is in time.
    Slow,
    /// The stream has gaps of [`crate::GAP_MS`], just under the limit.
    Gaps,
    /// Nobody listens at the pod, as long as the cell lasts.
    Refused,
    /// The connection breaks.
    Reset,
    /// The engine answers this status with its error object and the message "engine says no".
    Status(u16),
    /// The engine says nothing (more).
    Stall,
    /// The prefill answers well, at [`crate::LATE_MS`].
    Late,
    /// The prefill answers 200 with half of its JSON.
    BadJson,
    /// The prefill answers 200, holds the KV, and its reply names none.
    NoKv,
    /// The prefill answers 200, holds the KV, and the reference in its reply lacks a part.
    UnusableKv,
    /// The engine streams an error event in place of the first content.
    ErrorEvent,
    /// The engine's process ends: its connections break, and nobody listens from then on.
    Dies,
    /// A context worker tells of itself without the metadata that generation first needs.
    EmptyInfo,
    /// The client closes its connection, [`crate::LEAVES_AFTER_MS`] after the moment came.
    ClientLeaves,
}

/// What the fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leg {
    /// The prefill pod.
    Prefill,
    /// The decode pod. Faults that are no state of the pod strike once, so that a call which frees
    /// KV can go to the same pod.
    Decode,
    /// The decode engine answers 500 at once, and the prefill leg fails by the fault at once or
    /// within 100 ms.
    Both,
    /// The abort calls, of a request whose prefill leg has answered 500 at once.
    Abort,
    /// The client.
    Client,
}

/// When the fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// The request's body is not complete.
    Uploading,
    /// The prefill pod is asked where it is found (`/server_info`).
    Asking,
    /// The prefill leg is out, and nothing of an answer has come. With a client that leaves, the
    /// prefill takes [`crate::SLOW_MS`].
    Prefilling,
    /// The second attempt of a prefill leg is out, and takes [`crate::SLOW_MS`]; the first pod by
    /// name answered 503.
    Retrying,
    /// The decode leg is out and unanswered. The prefill of a sequential engine has succeeded. Of a
    /// together engine it has for [`Fault::Stall`] and a client that leaves; else it waits for the
    /// decode engine to take the KV, as it does in reality.
    Decoding,
    /// Response headers of the decode leg have come and no body. A decode engine fails in that
    /// moment, with the prefill succeeded; a prefill leg fails at [`crate::FAILS_AT_MS`] (a stall
    /// at its timeout).
    Headers,
    /// The same, and the chunk that names the role, which is no content. Chat streams only.
    Role,
    /// The same, and two content chunks, or half of an answer that is not streamed.
    Body,
}

/// The pods a fault strikes, among those that its moment concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The first pod by name, which is chosen first.
    First,
    /// All pods of the role.
    All,
}

/// Value of `prefillFallback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fallback {
    /// The error is answered.
    Strict,
    /// A decode pod computes the prompt.
    Decode,
}

/// Where a cell is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RunsOn {
    /// Scripted engines on a driven clock.
    Host,
    /// Simulated engines behind a real Envoy.
    Envoy,
    /// Both.
    Both,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Engine of all its pods.
    pub engine: Engine,
    /// The client asks for a stream.
    pub stream: bool,
    /// What is struck.
    pub leg: Leg,
    /// When.
    pub moment: Moment,
    /// By what.
    pub fault: Fault,
    /// At how many pods.
    pub reach: Reach,
    /// Its pods.
    pub layout: Layout,
    /// What serves when no prefill pod can.
    pub fallback: Fallback,
    /// Where it is run.
    pub runs_on: RunsOn,
    /// What must come of it.
    pub expect: Expect,
}

// === impl Engine ===

impl Engine {
    /// All engines.
    pub const ALL: [Self; 5] = [
        Self::VllmShfs,
        Self::VllmNixl,
        Self::Sglang,
        Self::TrtContextFirst,
        Self::TrtGenerationFirst,
    ];

    /// Part of a cell's id.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::VllmShfs => "vllm-shfs",
            Self::VllmNixl => "vllm-nixl",
            Self::Sglang => "sglang",
            Self::TrtContextFirst => "trt-context-first",
            Self::TrtGenerationFirst => "trt-generation-first",
        }
    }

    /// Value of the engine label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::VllmShfs | Self::VllmNixl => "vllm",
            Self::Sglang => "sglang",
            Self::TrtContextFirst | Self::TrtGenerationFirst => "trtllm",
        }
    }

    /// Value of the KV connector label.
    #[must_use]
    pub fn connector(self) -> Option<&'static str> {
        match self {
            Self::VllmShfs => Some("shfs"),
            Self::VllmNixl => Some("nixl"),
            _ => None,
        }
    }

    /// Both legs are sent at once.
    #[must_use]
    pub fn is_together(self) -> bool {
        matches!(self, Self::Sglang | Self::TrtGenerationFirst)
    }

    /// vLLM of any connector.
    #[must_use]
    pub fn is_vllm(self) -> bool {
        matches!(self, Self::VllmShfs | Self::VllmNixl)
    }

    /// Pods drop a request when `/abort_request` names it.
    #[must_use]
    pub fn aborts(self) -> bool {
        self == Self::Sglang
    }
}

// === impl Fault, Leg, Moment ===

impl Fault {
    /// Part of a cell's id; the same for all statuses.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::None => "healthy",
            Self::Slow => "slow",
            Self::Gaps => "gaps",
            Self::Refused => "refused",
            Self::Reset => "reset",
            Self::Status(_) => "status",
            Self::Stall => "stall",
            Self::Late => "late",
            Self::BadJson => "bad-json",
            Self::NoKv => "no-kv",
            Self::UnusableKv => "unusable-kv",
            Self::ErrorEvent => "error-event",
            Self::Dies => "dies",
            Self::EmptyInfo => "empty-info",
            Self::ClientLeaves => "client-leaves",
        }
    }
}

impl Leg {
    /// Part of a cell's id.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
            Self::Abort => "abort",
            Self::Client => "client",
        }
    }
}

impl Moment {
    /// Part of a cell's id.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Uploading => "uploading",
            Self::Asking => "asking",
            Self::Prefilling => "prefilling",
            Self::Retrying => "retrying",
            Self::Decoding => "decoding",
            Self::Headers => "headers",
            Self::Role => "role",
            Self::Body => "body",
        }
    }
}

// === impl Fallback ===

impl Fallback {
    /// Value of the setting.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Decode => "decode",
        }
    }
}

// === impl Cell ===

impl Cell {
    /// Stable name: engine, way to answer, leg and moment, fault, and what is not as usual.
    #[must_use]
    pub fn id(&self) -> String {
        let way = if self.stream { "stream" } else { "whole" };
        let fault = match self.fault {
            Fault::Status(status) => format!("status-{status}"),
            fault => fault.kind().to_owned(),
        };
        let reach = match self.reach {
            Reach::First => "",
            Reach::All => "/all",
        };
        let fallback = match self.fallback {
            Fallback::Strict => "",
            Fallback::Decode => "/fallback-decode",
        };
        let (engine, layout) = (self.engine.name(), self.layout.name());
        let (leg, moment) = (self.leg.name(), self.moment.name());
        format!("{engine}/{way}/{leg}-{moment}/{fault}{layout}{reach}{fallback}")
    }

    /// The cell's id as a model name, which fits a label.
    #[must_use]
    pub fn model(&self) -> String {
        self.id().replace('/', ".")
    }

    /// Path of the request. Streams of the one have a chunk that names the role before any
    /// content, streams of the other none.
    #[must_use]
    pub fn path(&self) -> &'static str {
        if self.moment == Moment::Headers {
            "/v1/completions"
        } else {
            "/v1/chat/completions"
        }
    }

    /// Body of the request.
    #[must_use]
    pub fn body(&self) -> String {
        let (model, stream) = (self.model(), self.stream);
        let prompt = if self.moment == Moment::Headers {
            r#""prompt":"a few words""#
        } else {
            r#""messages":[{"role":"user","content":"a few words"}]"#
        };
        format!(r#"{{"model":"{model}",{prompt},"max_tokens":4,"stream":{stream}}}"#)
    }

    /// The pods that the fault strikes; none when it is the client's. What strikes both legs
    /// strikes the pods of a role by their part in it.
    #[must_use]
    pub fn struck(&self) -> Vec<&'static str> {
        let role = match self.leg {
            Leg::Prefill => Some(Role::Prefill),
            Leg::Decode => Some(Role::Decode),
            Leg::Both | Leg::Abort => None,
            Leg::Client => return Vec::new(),
        };
        let pods = self.layout.pods().iter();
        let names = pods.filter(|pod| role.is_none_or(|role| pod.role == role));
        let many = match (role, self.reach) {
            (Some(_), Reach::First) => 1,
            _ => usize::MAX,
        };
        names.map(|pod| pod.name).take(many).collect()
    }
}
