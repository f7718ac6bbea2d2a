//! The scripted engines of the failure matrix: what the pods of a cell answer, and what that leaves
//! at them.
//!
//! Answers depend on the cell alone, so they are planned when a request arrives. What prefill legs
//! leave is noted then, and looked at when the run is over: [`super::remains`].

use crate::stand::{CONTEXT, DONE, ERROR, PARAMS, ROLE, TOKEN, engine_error};
use pd_failure_matrix::{
    Cell, Engine, FAILS_AT_MS, Fault, GAP_MS, LATE_MS, Leg, Moment, PodSpec, Role, SLOW_MS,
};
use pd_wasm_tests::{Gateway, Script, Sent};
use serde_json::json;
use std::cell::RefCell;
use std::rc::Rc;

/// Time between the pieces of an answer, in ms.
const GAP: u64 = 10;

/// A prefill leg that an engine took in.
#[derive(Debug)]
pub(super) struct Prefill {
    pub(super) request_id: String,
    pub(super) address: String,
    /// How the engine knows it, where it can be told to drop it.
    pub(super) rid: Option<String>,
    /// When the engine is done with it by itself, in ms from its arrival.
    pub(super) done_after: Option<u64>,
    /// Name of the KV that it leaves then.
    pub(super) kv: Option<String>,
}

/// A call by which something may be let go.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) request_id: String,
    pub(super) address: String,
    pub(super) body: String,
}

/// What the engines of a cell took in.
#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) prefills: Vec<Prefill>,
    /// Calls to decode pods that free KV.
    pub(super) freed: Vec<Release>,
    /// Aborts that were done.
    pub(super) aborted: Vec<Release>,
}

/// One pod.
struct Pod {
    cell: Rc<Cell>,
    spec: PodSpec,
    address: String,
    journal: Rc<RefCell<Journal>>,
    /// The fault has struck.
    struck: bool,
}

/// Scripts the pods of a cell, and notes what they take in.
pub(super) fn start(
    gateway: &mut Gateway,
    cell: &Rc<Cell>,
    addresses: &[String],
) -> Rc<RefCell<Journal>> {
    let journal = Rc::default();
    for (spec, address) in cell.layout.pods().iter().zip(addresses) {
        let mut pod = Pod {
            cell: Rc::clone(cell),
            spec: *spec,
            address: address.clone(),
            journal: Rc::clone(&journal),
            struck: false,
        };
        gateway.engine(address, move |sent| pod.answer(sent));
    }
    journal
}

/// What becomes of the KV that a decode leg names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taking {
    /// It is taken.
    Takes,
    /// The engine waits, and may take it as long as its client is there.
    Waits,
    /// The engine fails before it takes anything.
    Fails,
}

/// What the decode engine of a cell does.
pub(super) fn taking(cell: &Cell) -> Taking {
    let early = matches!(
        cell.moment,
        Moment::Decoding | Moment::Headers | Moment::Role
    );
    match (cell.leg, cell.fault) {
        (Leg::Decode | Leg::Client, Fault::Stall | Fault::ClientLeaves) if early => Taking::Waits,
        (Leg::Decode, _) if early => Taking::Fails,
        _ => Taking::Takes,
    }
}

// === impl Pod ===

impl Pod {
    fn answer(&mut self, sent: &Sent) -> Script {
        let is_struck = self.cell.struck().contains(&self.spec.name);
        let is_leg = sent.path() != "/server_info";
        let again = is_struck && is_leg && std::mem::replace(&mut self.struck, true);
        match self.cell.fault {
            Fault::Refused if is_struck && self.cell.leg != Leg::Abort && self.is_time(sent) => {
                return Script::refuse();
            }
            Fault::Dies if again => return Script::refuse(),
            _ => {}
        }
        match (sent.path(), self.spec.role) {
            ("/abort_request", _) => self.abort(sent),
            ("/server_info", _) => self.server_info(is_struck),
            (_, Role::Prefill) => self.prefill(sent, is_struck),
            (_, Role::Decode) if sent.cluster.is_some() => self.free(sent),
            (_, Role::Decode) => self.decode(is_struck && !again),
        }
    }

    /// A pod of which only the look-up fails takes legs.
    fn is_time(&self, sent: &Sent) -> bool {
        self.cell.moment != Moment::Asking || sent.path() == "/server_info"
    }

    // --- what pods are asked beside the legs ---

    fn abort(&self, sent: &Sent) -> Script {
        if self.cell.leg == Leg::Abort {
            return match self.cell.fault {
                Fault::Refused => Script::refuse(),
                Fault::Status(status) => engine_error(status),
                _ => Script::stall(),
            };
        }
        let release = self.release(sent);
        self.journal.borrow_mut().aborted.push(release);
        Script::answer(200, "")
    }

    /// The call that has the prefill engine free its KV.
    fn free(&self, sent: &Sent) -> Script {
        let release = self.release(sent);
        self.journal.borrow_mut().freed.push(release);
        if self.cell.engine.is_vllm() {
            engine_error(400)
        } else {
            Script::json(200, &json!({"choices": [{"message": {"content": "a"}}]}))
        }
    }

    fn server_info(&self, is_struck: bool) -> Script {
        let place = json!({"ctx_dp_rank": 0, "ctx_info_endpoint": ["tcp://h:1/a"]});
        let known = Script::json(200, &json!({ "disaggregated_params": place }));
        if self.cell.moment != Moment::Asking {
            return known;
        }
        match (self.cell.leg, self.cell.fault) {
            (Leg::Client, _) => known.after(SLOW_MS),
            _ if !is_struck => known,
            (_, Fault::EmptyInfo) => Script::json(200, &json!({"disaggregated_params": {}})),
            (_, fault) => failing(fault),
        }
    }

    fn release(&self, sent: &Sent) -> Release {
        Release {
            request_id: request_id(sent),
            address: self.address.clone(),
            body: String::from_utf8_lossy(&sent.body).into_owned(),
        }
    }

    // --- the legs ---

    fn prefill(&self, sent: &Sent, is_struck: bool) -> Script {
        use Moment::{Body, Decoding, Headers, Prefilling, Retrying, Role};
        let (cell, together) = (&*self.cell, self.cell.engine.is_together());
        let journal = &mut *self.journal.borrow_mut();
        let number = journal.prefills.len();
        let fault = cell.fault;
        let (script, done_after, leaves_kv) = match (cell.leg, cell.moment) {
            (Leg::Prefill, Prefilling) if is_struck => match fault {
                Fault::None => (self.computed(number), Some(0), true),
                Fault::Slow => (self.computed(number).after(SLOW_MS), Some(SLOW_MS), true),
                Fault::Late => (self.computed(number).after(LATE_MS), Some(LATE_MS), true),
                Fault::BadJson => (Script::answer(200, r#"{"id":"cm"#), Some(0), true),
                Fault::NoKv => (Script::answer(200, r#"{"choices":[]}"#), Some(0), true),
                Fault::UnusableKv => {
                    let body = json!({"kv_transfer_params": {"do_remote_prefill": true}});
                    (Script::json(200, &body), Some(0), true)
                }
                Fault::Stall => (Script::stall(), None, false),
                fault => (failing(fault), Some(0), false),
            },
            (Leg::Prefill, Headers | Role | Body) if is_struck => {
                let done = (fault != Fault::Stall).then_some(FAILS_AT_MS);
                (failing(fault).after(FAILS_AT_MS), done, false)
            }
            (Leg::Both, _) => (failing(fault).after(50), Some(50), false),
            (Leg::Abort, _) => (engine_error(500), Some(0), false),
            (Leg::Client, Retrying) if self.spec.name == "r0-p0" => {
                (engine_error(503), Some(0), false)
            }
            (Leg::Client, Prefilling | Retrying) => {
                (self.computed(number).after(SLOW_MS), Some(SLOW_MS), true)
            }
            // It waits for the decode engine.
            (Leg::Decode, Decoding) if together && fault != Fault::Stall => {
                (Script::stall(), None, false)
            }
            _ => (self.computed(number), Some(0), true),
        };
        journal.prefills.push(Prefill {
            request_id: request_id(sent),
            address: self.address.clone(),
            rid: sent.json()["rid"].as_str().map(str::to_owned),
            done_after,
            kv: (leaves_kv && !together).then(|| self.kv(number)),
        });
        script
    }

    /// What names the KV of a prefill leg in the decode leg.
    fn kv(&self, number: usize) -> String {
        if self.cell.engine == Engine::TrtContextFirst {
            format!("922337203685477580{number}")
        } else {
            format!("cmpl-kv-{number}")
        }
    }

    fn computed(&self, number: usize) -> Script {
        let body = match self.cell.engine {
            Engine::TrtContextFirst => CONTEXT.replace("9223372036854775807", &self.kv(number)),
            _ => {
                let params = PARAMS.replace("cmpl-1", &self.kv(number));
                format!(r#"{{"id":"cmpl-1","choices":[],"kv_transfer_params":{params}}}"#)
            }
        };
        Script::answer(200, body).header("content-type", "application/json")
    }

    /// The client's own request; `strikes` says that a fault of this pod is due.
    fn decode(&self, strikes: bool) -> Script {
        use Moment::{Body, Decoding, Headers, Prefilling, Role};
        let (cell, together) = (&*self.cell, self.cell.engine.is_together());
        match (cell.leg, cell.moment) {
            (Leg::Both, _) => engine_error(500),
            // The KV does not come, so neither does an answer.
            (Leg::Prefill | Leg::Abort, Prefilling)
                if together && !matches!(cell.fault, Fault::None | Fault::BadJson) =>
            {
                match cell.fault {
                    Fault::Slow => self.whole().after(SLOW_MS),
                    _ => Script::stall(),
                }
            }
            (Leg::Client, Prefilling | Decoding) => Script::stall(),
            (Leg::Client | Leg::Prefill, Headers | Role | Body) => self.until_moment().then_stall(),
            (Leg::Decode, Decoding) if strikes => failing(cell.fault),
            (Leg::Decode, Headers | Role | Body) if strikes => match cell.fault {
                Fault::Gaps => Script::stream(GAP_MS, &[ROLE, TOKEN, DONE]),
                Fault::ErrorEvent if cell.moment == Role => {
                    Script::stream(GAP, &[ROLE, ERROR, DONE])
                }
                Fault::ErrorEvent => Script::stream(GAP, &[ERROR, DONE]),
                Fault::Stall => self.until_moment().then_stall(),
                _ => self.until_moment().then_reset(),
            },
            _ => self.whole(),
        }
    }

    /// A whole answer.
    fn whole(&self) -> Script {
        if self.cell.stream {
            Script::stream(GAP, &[ROLE, TOKEN, TOKEN, DONE])
        } else {
            Script::json(200, &json!({"choices": [{"message": {"content": "aa"}}]}))
        }
    }

    /// An answer up to the cell's moment.
    fn until_moment(&self) -> Script {
        let pieces: &[&str] = match (self.cell.stream, self.cell.moment) {
            (_, Moment::Headers) => &[],
            (true, Moment::Role) => &[ROLE],
            (true, _) => &[ROLE, TOKEN, TOKEN],
            (false, _) => &[r#"{"choices":[{"mess"#],
        };
        let script = Script::stream(GAP, pieces);
        if self.cell.stream {
            script
        } else {
            script.typed("application/json")
        }
    }
}

/// What a failing pod answers.
fn failing(fault: Fault) -> Script {
    match fault {
        Fault::Refused => Script::refuse(),
        Fault::Status(status) => engine_error(status),
        Fault::Stall => Script::stall(),
        _ => Script::reset(),
    }
}

fn request_id(sent: &Sent) -> String {
    sent.header("x-request-id").unwrap_or_default().to_owned()
}
