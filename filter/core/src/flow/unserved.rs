//! Why no pod takes a request, in the client's words.

use super::plan::Plan;
use crate::reply::Fault;
use crate::select::{Refusal, Shape};

impl Plan {
    /// The client's view of a refusal.
    pub(super) fn fault(&self, refusal: &Refusal) -> Fault {
        match refusal {
            _ if refusal.at_capacity() => Fault::Capacity(self.fleet.name.to_string()),
            Refusal::NoPods => self.no_pod(self.what_is_missing().to_owned()),
            _ => self.no_pod(refusal.to_string() + self.filter_hint()),
        }
    }

    pub(super) fn no_pod(&self, detail: String) -> Fault {
        Fault::NoPod {
            model: self.fleet.name.to_string(),
            detail,
        }
    }

    /// Which pod would have been needed, where none could be considered.
    fn what_is_missing(&self) -> &'static str {
        let ready = || {
            (0_u16..)
                .zip(self.fleet.pods.iter())
                .filter(|(_, pod)| pod.usable)
        };
        if ready().next().is_none() {
            "no pod of this model is ready; start one or retry later"
        } else if !ready().any(|(pod, _)| self.allows(pod)) {
            "the header external-filter excludes all of its pods that are ready; widen it"
        } else if self.shape() == Shape::Pair {
            "no ready pod that it may use is a prefill, decode or combined one; start some or retry \
             later"
        } else {
            "it cannot be served in two legs, and no ready pod that it may use answers alone; start \
             a standard pod, or send one prompt with n and best_of 1 to an API that pairs serve"
        }
    }

    /// What the client should know when its own header left too little.
    fn filter_hint(&self) -> &'static str {
        let mut pods = (0_u16..).zip(self.fleet.pods.iter());
        if pods.any(|(pod, _)| !self.allows(pod)) {
            "; the header external-filter excludes some of its pods"
        } else {
            ""
        }
    }
}
