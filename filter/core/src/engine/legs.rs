//! One attempt with a pair: what its two legs carry and how they follow each other. The order is
//! a fact of the protocol, so whoever sends the legs never asks which engine it is.

use super::sglang::Meeting;
use super::trtllm::{self, ContextWorker, Schedule};
use super::vllm::{self, VllmError};
use super::{Engine, HandOver};
use crate::fleet::FleetPod;
use crate::request::patch::{BodyEdit, Edit, Lead};
use crate::request::{Endpoint, Member, Scan};
use pd_wire::knobs::{Choice as _, Knobs, KvConnector, TrtScheduleStyle};
use pd_wire::names::DEFAULT_BOOTSTRAP_PORT;

/// How the legs of a pair follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// The decode leg waits for the prefill reply and carries parts of it.
    Sequential,
    /// Both are sent at once.
    Together,
    /// Both are sent at once, when the prefill pod has said where it is found.
    AfterLookUp,
}

/// A number that the legs of an attempt share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// A random word.
    Word,
    /// An id of [`trtllm::ids::DisaggIds`].
    DisaggId,
}

/// The legs of one attempt. Nothing in it is ever used for another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Legs {
    /// KV handed over by `kv_transfer_params`.
    Vllm(KvConnector),
    /// Both legs meet in a room.
    Sglang(Meeting),
    /// The generation leg carries what the context reply says.
    ContextFirst(u64),
    /// Both legs meet by an id.
    GenerationFirst(u64),
}

impl Legs {
    /// The legs of a fresh attempt with a prefill pod; `None` when pods of this engine are not
    /// paired. `request_id` is the attempt's own, `draw` gives a number that was never given
    /// before.
    pub fn new(
        engine: &Engine,
        prefill: &FleetPod,
        knobs: &Knobs,
        request_id: &str,
        draw: impl FnOnce(Number) -> u64,
    ) -> Option<Self> {
        Some(match engine {
            Engine::Vllm => Self::Vllm(connector(prefill, knobs)),
            Engine::Sglang => {
                let port = prefill.bootstrap_port.unwrap_or(DEFAULT_BOOTSTRAP_PORT);
                let word = draw(Number::Word);
                Self::Sglang(Meeting::new(prefill.ip(), port, word, request_id))
            }
            Engine::Trtllm => {
                let id = draw(Number::DisaggId);
                match knobs.trt_schedule_style {
                    TrtScheduleStyle::ContextFirst => Self::ContextFirst(id),
                    TrtScheduleStyle::GenerationFirst => Self::GenerationFirst(id),
                }
            }
            Engine::Unknown(_) | Engine::Mixed => return None,
        })
    }

    /// How they follow each other.
    #[must_use]
    pub fn dispatch(&self) -> Dispatch {
        match self {
            Self::Vllm(_) | Self::ContextFirst(_) => Dispatch::Sequential,
            Self::Sglang(_) => Dispatch::Together,
            Self::GenerationFirst(_) => Dispatch::AfterLookUp,
        }
    }

    /// Name of the request at engines that can be told to drop it.
    #[must_use]
    pub fn rid(&self) -> Option<&str> {
        match self {
            Self::Sglang(meeting) => Some(&meeting.rid),
            _ => None,
        }
    }

    /// What turns a client's body into that of the prefill leg.
    ///
    /// # Errors
    /// See [`VllmError`].
    pub fn prefill_edits(
        &self,
        endpoint: Endpoint,
        scan: &Scan,
    ) -> Result<Vec<Edit<'static>>, VllmError> {
        match self {
            Self::Vllm(connector) => vllm::prefill_edits(endpoint, scan, *connector),
            Self::Sglang(meeting) => Ok(meeting.prefill_edits(endpoint, scan)),
            Self::ContextFirst(id) => Ok(trtllm::prefill_edits(scan, *id, Schedule::ContextFirst)),
            Self::GenerationFirst(id) => {
                Ok(trtllm::prefill_edits(scan, *id, Schedule::GenerationFirst))
            }
        }
    }

    /// Members that the decode leg of a together protocol carries; none where they depend on a
    /// reply or a look-up that is not there.
    #[must_use]
    pub fn decode_members(&self, looked_up: Option<&ContextWorker>) -> Vec<u8> {
        match (self, looked_up) {
            (Self::Sglang(meeting), _) => meeting.decode_members(),
            (Self::GenerationFirst(id), Some(worker)) => worker.decode_members(*id),
            _ => Vec::new(),
        }
    }

    /// Reads a prefill reply (status 200): what a sequential protocol takes from it. To the
    /// others only its form matters.
    #[must_use]
    pub fn hand_over(&self, reply: &[u8], prefill: Option<&FleetPod>) -> HandOver {
        match self {
            Self::Vllm(connector) => {
                vllm::hand_over(reply, *connector, prefill.map_or("", FleetPod::ip))
            }
            Self::ContextFirst(_) => trtllm::hand_over(reply),
            Self::Sglang(_) | Self::GenerationFirst(_) => super::hand_over::none(reply),
        }
    }

    /// The prompt as token ids, when the decode leg shall carry it so.
    #[must_use]
    pub fn prompt_ids<'r>(&self, reply: &'r [u8]) -> Option<&'r [u8]> {
        match self {
            Self::ContextFirst(_) => trtllm::prompt_ids(reply),
            _ => None,
        }
    }

    /// The member that [`Legs::prompt_ids`] stand for.
    #[must_use]
    pub fn ids_member(&self, endpoint: Endpoint) -> Option<Member> {
        match self {
            Self::ContextFirst(_) => trtllm::ids_member(endpoint),
            _ => None,
        }
    }

    /// How the client's body carries what a sequential protocol's prefill reply handed over.
    #[must_use]
    pub fn decode_edit(&self, lead: &Lead, endpoint: Endpoint, kv: &KvReference) -> BodyEdit {
        let member = self.ids_member(endpoint);
        lead.edit(&kv.members, member.zip(kv.prompt_ids.as_deref()))
    }

    /// True when the request of [`Legs::release_body`] reads no KV: it may be sent whatever the
    /// decode leg is doing. vLLM refuses it before that; TensorRT-LLM serves it.
    #[must_use]
    pub fn releases_by_refusal(&self) -> bool {
        matches!(self, Self::Vllm(_))
    }

    /// A request to a decode pod that has the KV freed which the prefill pod handed over; `None`
    /// when there is no such request.
    #[must_use]
    pub fn release_body(
        &self,
        model: &str,
        kv: &KvReference,
        endpoint: Endpoint,
    ) -> Option<Vec<u8>> {
        match (self, &kv.prompt_ids) {
            (Self::Vllm(_), _) => Some(vllm::release_body(model, &kv.members, endpoint)),
            (Self::ContextFirst(_), Some(ids)) => {
                Some(trtllm::release_body(model, &kv.members, ids, endpoint))
            }
            _ => None,
        }
    }
}

/// What a prefill reply handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvReference {
    /// Text of the members that name the KV.
    pub members: Vec<u8>,
    /// The prompt as token ids, where the protocol passes it so.
    pub prompt_ids: Option<Vec<u8>>,
}

/// The connector of a vLLM pod: its label, else the setting.
fn connector(pod: &FleetPod, knobs: &Knobs) -> KvConnector {
    pod.kv_connector
        .as_deref()
        .and_then(KvConnector::from_name)
        .unwrap_or(knobs.kv_connector_type)
}
