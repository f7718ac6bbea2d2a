//! The control listener: snapshots in, state out. Refused everywhere else.

use crate::host::{clock, raw, store::SharedData, stream};
use crate::root::Settings;
use crate::vm;
use pd_core::eject::Ejections;
use pd_core::fleet::{accept_samples, accept_topology};
use pd_core::token;
use pd_wire::control::{PushReply, Status};
use pd_wire::{names, topology};
use proxy_wasm::types::{Action, BufferType};
use std::rc::Rc;

/// A request of the agent or an operator.
pub struct Control {
    command: Command,
    authorised: bool,
    /// Bytes of body the host holds.
    received: usize,
    settings: Rc<Settings>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    PutTopology,
    PutSamples,
    Ledgers,
    Status,
    Unknown,
}

impl Control {
    /// Takes a request that came by the control listener; `None` for all others. Only paths that
    /// look like ours ask the host where the request came from.
    pub fn claim(
        method: &str,
        path: &str,
        authorization: &str,
        settings: &Rc<Settings>,
    ) -> Option<Self> {
        if !path.starts_with("/pd/") || !on_control_listener() {
            return None;
        }
        let command = match (method, path) {
            ("PUT", names::PATH_TOPOLOGY) => Command::PutTopology,
            ("PUT", names::PATH_SAMPLES) => Command::PutSamples,
            ("GET", names::PATH_LEDGERS) => Command::Ledgers,
            ("GET", names::PATH_STATUS) => Command::Status,
            _ => Command::Unknown,
        };
        let tokens = &settings.config.knobs.control_tokens;
        Some(Self {
            command,
            authorised: token::accepted(authorization, tokens),
            received: 0,
            settings: Rc::clone(settings),
        })
    }

    /// Headers are complete.
    pub fn headers(&mut self, end: bool) -> Action {
        if !self.authorised {
            let error = "missing or unknown bearer token".to_owned();
            reply_json(
                401,
                &PushReply {
                    error,
                    ..PushReply::default()
                },
            );
            return Action::Pause;
        }
        match self.command {
            Command::Ledgers => self.ledgers(),
            Command::Status => self.status(),
            Command::Unknown => not_found(),
            Command::PutTopology | Command::PutSamples if end => self.accept(&[]),
            Command::PutTopology | Command::PutSamples => {}
        }
        Action::Pause
    }

    /// The body ended without saying so.
    pub fn trailers(&mut self) -> Action {
        self.body(self.received, true)
    }

    /// Body bytes arrived.
    pub fn body(&mut self, size: usize, end: bool) -> Action {
        self.received = size;
        let pushes = matches!(self.command, Command::PutTopology | Command::PutSamples);
        if self.authorised && pushes {
            if size > topology::MAX_MESSAGE {
                let error = format!("the message is larger than {} bytes", topology::MAX_MESSAGE);
                reply_json(
                    413,
                    &PushReply {
                        error,
                        ..PushReply::default()
                    },
                );
                self.command = Command::Unknown;
            } else if end {
                self.accept(&stream::read(BufferType::HttpRequestBody, 0, size));
            }
        }
        Action::Pause
    }

    fn accept(&self, bytes: &[u8]) {
        let now_ms = clock::now_ms();
        let result = if self.command == Command::PutTopology {
            accept_topology(&SharedData, bytes, now_ms)
        } else {
            accept_samples(&SharedData, bytes, now_ms)
        };
        match result {
            Ok(reply) => {
                vm::with(|vm| vm.worker.fleet.refresh(&SharedData));
                reply_json(200, &reply);
            }
            Err(refusal) => {
                vm::with(|vm| vm.warn(format_args!("push refused: {}", refusal.reply.error)));
                reply_json(refusal.status.code(), &refusal.reply);
            }
        }
    }

    fn ledgers(&self) {
        vm::with(|vm| {
            vm.worker.fleet.refresh(&SharedData);
            reply_json(
                200,
                &vm.worker.ledger.ledgers(&SharedData, &mut vm.worker.fleet),
            );
        });
    }

    fn status(&self) {
        let now_ms = clock::now_ms();
        vm::with(|vm| {
            vm.worker.fleet.refresh(&SharedData);
            let vms = vm.worker.ledger.vms(&SharedData);
            reply_json(
                200,
                &Status {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    format: pd_core::FORMAT,
                    topology: vm.worker.fleet.topology_status(now_ms),
                    samples: vm.worker.fleet.samples_status(now_ms),
                    live_flows: vms.iter().map(|vm| u64::from(vm.live_flows)).sum(),
                    vms,
                    ejected: Ejections::list(&SharedData, &mut vm.worker.fleet, now_ms),
                    knobs: self.settings.config.report(),
                },
            );
        });
    }
}

/// True when the stream's filter chain or route is the control one. Both are named by the
/// configuration; a client cannot choose them.
fn on_control_listener() -> bool {
    [["xds", "filter_chain_name"], ["xds", "route_name"]]
        .iter()
        .any(|path| stream::property(path).is_some_and(|name| name == names::CONTROL))
}

fn not_found() {
    let error = format!(
        "no such command; there are PUT {} and {}, GET {} and {}",
        names::PATH_TOPOLOGY,
        names::PATH_SAMPLES,
        names::PATH_LEDGERS,
        names::PATH_STATUS
    );
    reply_json(
        404,
        &PushReply {
            error,
            ..PushReply::default()
        },
    );
}

fn reply_json(status: u16, value: &impl serde::Serialize) {
    let body = serde_json::to_vec(value).unwrap_or_default();
    raw::send_local_response(
        status,
        "pd_control",
        &[("content-type", "application/json")],
        &body,
    );
}
