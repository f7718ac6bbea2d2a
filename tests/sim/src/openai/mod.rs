//! What engines that speak OpenAI's chat and completions API alike have in common: reading a
//! request, generating, answering, counting. Their hand-over of KV is their own ([`Work`]).

mod answer;
mod ask;
mod capacity;
mod meters;
mod run;

pub(crate) use answer::{Finish, Voice};
pub(crate) use ask::{Ask, Members, Problem, Route};
pub(crate) use capacity::Capacity;
pub(crate) use meters::{Ended, Meters};
pub(crate) use run::{Abort, Failure, Ready, Run, Work};
