//! The control listener: snapshots in, state out. Refused everywhere else.

use crate::effects::answer;
use crate::host::headers::Headers;
use crate::host::{clock, raw, store::SharedData, stream};
use crate::root::Settings;
use crate::vm::{self, Vm};
use pd_core::eject::Ejections;
use pd_core::fleet::{accept_samples, accept_topology};
use pd_core::flow::{self, Head};
use pd_core::request::Endpoint;
use pd_core::tokens::accept_tokenizer;
use pd_core::{serve, session, token};
use pd_wire::control::{EstimateStatus, PushReply, Status};
use pd_wire::{names, topology};
use proxy_wasm::types::{Action, BufferType};
use std::rc::Rc;

/// A request of the agent or an operator.
pub struct Control {
    command: Command,
    authorised: bool,
    /// Bytes of body the host holds.
    received: usize,
    /// Headers of the request to be explained.
    head: Option<Head>,
    settings: Rc<Settings>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    PutTopology,
    PutSamples,
    PutTokenizer,
    Ledgers,
    Status,
    Explain,
    Unknown,
}

impl Control {
    /// Takes a request that came by the control listener; `None` for all others. Only paths that
    /// look like ours ask the host where the request came from.
    pub fn claim(
        method: &str,
        path: &str,
        headers: &Headers,
        settings: &Rc<Settings>,
    ) -> Option<Self> {
        if !path.starts_with("/pd/") || !on_control_listener() {
            return None;
        }
        let head = explained(method, path)
            .map(|(path, endpoint)| Head::read(path, endpoint, headers.iter()));
        let command = match (method, path) {
            ("PUT", names::PATH_TOPOLOGY) => Command::PutTopology,
            ("PUT", names::PATH_SAMPLES) => Command::PutSamples,
            ("PUT", names::PATH_TOKENIZERS) => Command::PutTokenizer,
            ("GET", names::PATH_LEDGERS) => Command::Ledgers,
            ("GET", names::PATH_STATUS) => Command::Status,
            _ if head.is_some() => Command::Explain,
            _ => Command::Unknown,
        };
        let authorization = headers.text_value("authorization").unwrap_or_default();
        let tokens = &settings.config.knobs.control_tokens;
        Some(Self {
            command,
            authorised: token::accepted(authorization, tokens),
            received: 0,
            head,
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
            _ if end => self.complete(&[]),
            Command::PutTopology
            | Command::PutSamples
            | Command::PutTokenizer
            | Command::Explain => {}
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
        let takes_body = matches!(
            self.command,
            Command::PutTopology | Command::PutSamples | Command::PutTokenizer | Command::Explain
        );
        if self.authorised && takes_body {
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
                self.complete(&stream::read(BufferType::HttpRequestBody, 0, size));
            }
        }
        Action::Pause
    }

    /// The body is complete.
    fn complete(&self, bytes: &[u8]) {
        match &self.head {
            Some(head) => self.explain(head, bytes),
            None => self.accept(bytes),
        }
    }

    fn accept(&self, bytes: &[u8]) {
        let now_ms = clock::now_ms();
        let result = match self.command {
            Command::PutTopology => accept_topology(&SharedData, bytes, now_ms),
            Command::PutTokenizer if !cfg!(feature = "tokenizers") => {
                let error = "this filter does not count with tokenizers: use \
                             pd_filter_tokenizers.wasm (scripts/build-wasm.sh --variant tokenizers)";
                return reply_json(
                    404,
                    &PushReply {
                        error: error.to_owned(),
                        ..PushReply::default()
                    },
                );
            }
            Command::PutTokenizer => accept_tokenizer(&SharedData, bytes, now_ms),
            _ => accept_samples(&SharedData, bytes, now_ms),
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

    fn explain(&self, head: &Head, body: &[u8]) {
        let now_ms = clock::now_ms();
        let explained = vm::with(|vm| {
            let scene = &mut Vm::scene(&mut vm.worker, &self.settings, now_ms);
            flow::explain(head, body, scene)
        });
        match explained {
            Ok(explained) => reply_json(200, &explained),
            Err(fault) => answer(&fault.reply(None)),
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
            let ratios = vm.worker.estimates.ratios();
            let estimates = ratios.map(|(model, bytes_per_token)| EstimateStatus {
                model: model.to_owned(),
                bytes_per_token,
            });
            reply_json(
                200,
                &Status {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    format: pd_core::FORMAT,
                    topology: vm.worker.fleet.topology_status(now_ms),
                    samples: vm.worker.fleet.samples_status(now_ms),
                    live_flows: vms.iter().map(|vm| u64::from(vm.live_flows)).sum(),
                    vms,
                    estimates: estimates.collect(),
                    tokenizers: vm.worker.tokenizers.status(now_ms),
                    sessions: session::remembered(&SharedData),
                    bands: serve::report::bands(
                        &mut vm.worker.fleet,
                        &self.settings.config,
                        &SharedData,
                    ),
                    ejected: Ejections::list(&SharedData, &mut vm.worker.fleet, now_ms),
                    knobs: self.settings.config.report(),
                    warnings: self.settings.config.warnings.clone(),
                    models: vm.worker.fleet.summary().to_vec(),
                },
            );
        });
    }
}

/// Path and API of the request to be explained, when that is what is asked for.
fn explained<'a>(method: &str, path: &'a str) -> Option<(&'a str, Endpoint)> {
    let rest = path.strip_prefix(names::PATH_EXPLAIN)?;
    let path = if rest.is_empty() {
        "/v1/chat/completions"
    } else {
        rest
    };
    match flow::route(method, path) {
        flow::Route::Inference(endpoint) => Some((path, endpoint)),
        _ => None,
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
        "no such command; there are PUT {}, {} and {}, GET {} and {}, POST {}",
        names::PATH_TOPOLOGY,
        names::PATH_SAMPLES,
        names::PATH_TOKENIZERS,
        names::PATH_LEDGERS,
        names::PATH_STATUS,
        names::PATH_EXPLAIN
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
