//! The top-level members that the gateway reads or writes.

macro_rules! members {
    ($($(#[$meta:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// A *controlled* top-level member: read or written by the gateway, so it may occur once.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Member {
            $($(#[$meta])* $variant),+
        }

        impl Member {
            /// All members.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The key, as bodies spell it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }

            /// The member with this (unescaped) key.
            #[allow(non_upper_case_globals, reason = "patterns are named as their variants")]
            pub fn of_key(key: &[u8]) -> Option<Self> {
                const { $(assert!($name.len() <= Self::LONGEST_NAME);)+ }
                $(const $variant: &[u8] = $name.as_bytes();)+
                match key {
                    $($variant => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

members! {
    /// Which model.
    Model = "model",
    /// Chat history.
    Messages = "messages",
    /// Prompt of a completion: text, token ids, or a list of those.
    Prompt = "prompt",
    /// Prompts as embeddings, beside `prompt`.
    PromptEmbeds = "prompt_embeds",
    /// Prompt as token ids, which TensorRT-LLM takes beside `messages`.
    PromptTokenIds = "prompt_token_ids",
    /// Prompt of a response.
    Input = "input",
    /// System prompt of the messages API.
    System = "system",
    /// Tool schemas.
    Tools = "tools",
    /// Whether the answer comes as events.
    Stream = "stream",
    /// Allowed only with `stream`.
    StreamOptions = "stream_options",
    /// Output cap.
    MaxTokens = "max_tokens",
    /// Output cap of chat; wins over `max_tokens`.
    MaxCompletionTokens = "max_completion_tokens",
    /// Output cap of responses.
    MaxOutputTokens = "max_output_tokens",
    /// Output floor; must not exceed the cap.
    MinTokens = "min_tokens",
    /// Number of answers.
    N = "n",
    /// Number of candidates.
    BestOf = "best_of",
    /// Probabilities of output tokens.
    Logprobs = "logprobs",
    /// How many alternatives per output token.
    TopLogprobs = "top_logprobs",
    /// Probabilities of prompt tokens.
    PromptLogprobs = "prompt_logprobs",
    /// Repeat the prompt.
    Echo = "echo",
    /// vLLM: where the KV is.
    KvTransferParams = "kv_transfer_params",
    /// vLLM on Neuron: the prefill reply.
    DisaggPrefillResp = "disagg_prefill_resp",
    /// SGLang: address of the prefill pod.
    BootstrapHost = "bootstrap_host",
    /// SGLang: port of the prefill pod.
    BootstrapPort = "bootstrap_port",
    /// SGLang: meeting point of both legs.
    BootstrapRoom = "bootstrap_room",
    /// TensorRT-LLM: where the KV is.
    DisaggregatedParams = "disaggregated_params",
    /// vLLM: where encoder output is.
    EcTransferParams = "ec_transfer_params",
    /// SGLang: request id, by which others can abort it.
    Rid = "rid",
}

impl Member {
    /// No key is longer, in bytes.
    pub(super) const LONGEST_NAME: usize = 24;

    /// True for members that only the gateway may set: from a client they make engines dial
    /// addresses of its choice, abort others' requests, or crash.
    pub const fn is_reserved(self) -> bool {
        matches!(
            self,
            Self::KvTransferParams
                | Self::DisaggPrefillResp
                | Self::BootstrapHost
                | Self::BootstrapPort
                | Self::BootstrapRoom
                | Self::DisaggregatedParams
                | Self::EcTransferParams
                | Self::Rid
        )
    }
}
