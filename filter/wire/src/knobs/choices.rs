//! Settings that name one of a few: policies, modes, strategies.
//!
//! Every type spells its values exactly as AIBrix does, knows all of them in a fixed order and
//! parses exactly. Whether other cases of letters are accepted is up to the source (variables
//! yes, profiles no).

/// One of a fixed list of names.
pub trait Choice: Copy + Eq + 'static {
    /// All spellings, in the order of documentation.
    const NAMES: &'static [&'static str];
    /// The value spelt `name`, exactly.
    fn from_name(name: &str) -> Option<Self>;
    /// The spelling.
    fn name(self) -> &'static str;
}

macro_rules! choices {
    ($($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? })+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }

        impl Choice for $name {
            const NAMES: &'static [&'static str] = &[$($text),+];

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }

            fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }
        }
    )+};
}

choices! {
    /// How prefill pods are scored.
    PrefillPolicy {
        /// Prefix match first, then requests.
        #[default]
        PrefixCache = "prefix_cache",
        /// Outstanding prefill requests.
        LeastRequest = "least_request",
        /// Estimated time to first token.
        Conductor = "conductor",
        /// Charged prompt tokens.
        TokenLoad = "token_load",
        /// Charged prompt tokens, discounted by the prefix match.
        HybridCacheLoad = "hybrid_cache_load",
    }

    /// How decode pods are scored.
    DecodePolicy {
        /// Running requests and throughput over free KV cache.
        #[default]
        LoadBalancing = "load_balancing",
        /// Running and pending requests.
        LeastRequest = "least_request",
        /// Estimated time between tokens.
        Conductor = "conductor",
        /// Charged prompt tokens and the estimated output.
        TokenLoad = "token_load",
    }

    /// What serves a request when no prefill pod can.
    PrefillFallback {
        /// Nothing: 503.
        Strict = "strict",
        /// A combined pod.
        #[default]
        Combined = "combined",
        /// A combined pod, else a decode pod that computes the prompt itself.
        Decode = "decode",
    }

    /// How a vLLM pod hands KV over.
    KvConnector {
        /// `kv_transfer_params`, as vLLM's NixlConnector understands them.
        #[default]
        Shfs = "shfs",
        /// Neuron: the whole prefill response as `disagg_prefill_resp`.
        Nixl = "nixl",
        /// vLLM's MooncakeConnector.
        Mooncake = "mooncake",
    }

    /// Unit in which adaptive buckets divide traffic.
    BucketServeMode {
        /// Prompt tokens.
        #[default]
        Throughput = "throughput",
        /// Requests.
        Rps = "rps",
    }

    /// When a TensorRT-LLM decode leg is sent.
    TrtScheduleStyle {
        /// After the prefill reply.
        #[default]
        ContextFirst = "context_first",
        /// Together with the prefill leg.
        GenerationFirst = "generation_first",
    }

    /// How a pod (or a pair) is chosen.
    Strategy {
        /// A prefill and a decode pod of one roleset.
        #[default]
        Pd = "pd",
        /// Any pod.
        Random = "random",
        /// The pod with the fewest requests.
        LeastRequest = "least-request",
        /// The pod with the longest known prefix.
        PrefixCache = "prefix-cache",
        /// The pod of the session.
        SessionAffinity = "session-affinity",
    }
}
