//! The pods of a cell, and how its fault is armed in their engines.

use pd_e2e::{Pod, Stand};
use pd_engine_sim::{
    Cut, Engine as Simulated, EngineConfig, EngineKind, Fault as Armed, FaultKind, On, Transceiver,
};
use pd_failure_matrix::{
    Cell, Engine, FAILS_AT_MS, Fault, GAP_MS, LATE_MS, LEASE_MS, Leg, Moment, PodSpec, Role,
    SLOW_MS, annotation,
};

/// The first pods by name, which are chosen first.
pub(super) const PREFILL: &str = "r0-p0";
pub(super) const DECODE: &str = "r0-d0";
/// The prefill pod of the second roleset.
pub(super) const OTHER_PREFILL: &str = "r1-p0";

/// Longer than anything waits.
const NEVER_MS: f64 = 120_000.0;
/// What a prefill leg needs to fail just after its decode leg.
const AFTER_DECODE_MS: u64 = 50;
/// Gap between tokens of a decode that is to outlast its prefill leg.
const OUTLASTS_MS: f64 = 50.0;
/// Time in which a pod that has a request can stop listening before its abort comes.
const BEFORE_ABORT_MS: u64 = 150;

/// A cell on its stand.
#[derive(Clone, Copy)]
pub(super) struct Cast<'s> {
    pub(super) cell: &'s Cell,
    /// Number of the cell, which makes its pods' names unique.
    pub(super) number: usize,
    pub(super) stand: &'s Stand,
}

/// The pods of a cell.
pub(super) fn pods(number: usize, cell: &Cell) -> Vec<Pod> {
    let specs = cell.layout.pods().iter();
    specs.map(|spec| pod(number, cell, spec)).collect()
}

fn pod(number: usize, cell: &Cell, spec: &PodSpec) -> Pod {
    let roleset = unique(number, spec.roleset);
    let pod = match spec.role {
        Role::Prefill => Pod::prefill(&roleset),
        Role::Decode => Pod::decode(&roleset),
    };
    let kind = match cell.engine {
        Engine::VllmShfs | Engine::VllmNixl => EngineKind::Vllm,
        Engine::Sglang => EngineKind::Sglang,
        Engine::TrtContextFirst | Engine::TrtGenerationFirst => EngineKind::Trtllm,
    };
    let mut pod = pod
        .named(&unique(number, spec.name))
        .model(&cell.model())
        .of_engine(kind)
        .engine(|engine| behave(cell, spec, engine));
    pod.config = Some(annotation(cell.fallback));
    let connector = cell.engine.connector().map(str::to_owned);
    let label = pd_wire::names::LABEL_KV_CONNECTOR.to_owned();
    pod.labels.extend(connector.map(|name| (label, name)));
    pod
}

fn unique(number: usize, name: &str) -> String {
    format!("c{number:03}-{name}")
}

/// What an engine does all the time, fault or not.
fn behave(cell: &Cell, spec: &PodSpec, engine: &mut EngineConfig) {
    engine.lease_ms = LEASE_MS;
    // SGLang's versions differ in this; at the other moments nothing of an answer has come.
    engine.early_headers = is_begun(cell.moment);
    let struck = cell.struck().contains(&spec.name);
    let prefills = spec.role == Role::Prefill;
    match (cell.leg, cell.moment, cell.fault) {
        (_, _, Fault::Slow) | (Leg::Client, Moment::Prefilling, _) if prefills => {
            engine.prefill_delay_ms = SLOW_MS as f64;
        }
        (Leg::Client, Moment::Retrying, _) if spec.name == OTHER_PREFILL => {
            engine.prefill_delay_ms = SLOW_MS as f64;
        }
        (_, _, Fault::Late) if struck => engine.prefill_delay_ms = LATE_MS as f64,
        (_, _, Fault::Gaps) if !prefills => engine.token_interval_ms = GAP_MS as f64,
        (_, _, Fault::EmptyInfo) if struck => engine.transceiver = Transceiver::Cpp,
        (Leg::Prefill, _, Fault::BadJson) if !prefills => engine.token_interval_ms = OUTLASTS_MS,
        _ if !prefills && pulls_for_ever(cell) => engine.transfer_delay_ms = NEVER_MS,
        _ => {}
    }
}

/// A vLLM decode engine has the request and answers nothing, because the KV does not come. Only
/// whole answers are unanswered then: streams begin at once.
fn pulls_for_ever(cell: &Cell) -> bool {
    let waits = matches!(cell.fault, Fault::Stall | Fault::ClientLeaves);
    let decoding = matches!(cell.leg, Leg::Decode | Leg::Client);
    let begins_at_once = cell.stream || !cell.engine.is_vllm();
    decoding && cell.moment == Moment::Decoding && waits && !begins_at_once
}

/// The decode leg is answered, if only by response headers.
fn is_begun(moment: Moment) -> bool {
    matches!(moment, Moment::Headers | Moment::Role | Moment::Body)
}

/// Content chunks before a decode leg breaks.
fn chunks(moment: Moment) -> u32 {
    if moment == Moment::Body { 2 } else { 0 }
}

fn status(code: u16, after_ms: u64, after_work: bool) -> FaultKind {
    let error =
        r#"{"error":{"message":"engine says no","type":"engine","param":null,"code":null}}"#;
    FaultKind::LateStatus {
        code,
        body: error.to_owned(),
        after_ms,
        after_work,
    }
}

fn reset(after_ms: u64, after_work: bool) -> FaultKind {
    FaultKind::ResetBeforeHeaders {
        how: Cut::Rst,
        after_ms,
        after_work,
    }
}

fn stall(after_work: bool) -> FaultKind {
    FaultKind::StallBeforeHeaders {
        ms: None,
        after_work,
    }
}

fn stall_after(after_chunks: u32) -> FaultKind {
    FaultKind::StallMidStream {
        after_chunks,
        ms: None,
    }
}

impl Cast<'_> {
    /// The engine of one of the cell's pods.
    pub(super) fn engine(&self, pod: &str) -> &Simulated {
        self.stand.engine(&unique(self.number, pod))
    }

    /// All engines of the cell.
    pub(super) fn engines(&self) -> impl Iterator<Item = &Simulated> {
        let pods = self.cell.layout.pods().iter();
        pods.map(|pod| self.engine(pod.name))
    }

    /// Arms the fault.
    pub(super) fn arm(&self) {
        match self.cell.leg {
            Leg::Prefill => self.arm_prefill(),
            Leg::Decode => self.arm_decode(),
            Leg::Both => {
                self.once(DECODE, On::Decode, status(500, 0, false));
                let kind = match self.cell.fault {
                    Fault::Status(code) => status(code, AFTER_DECODE_MS, false),
                    _ => reset(AFTER_DECODE_MS, false),
                };
                self.once(PREFILL, On::Prefill, kind);
            }
            Leg::Abort => self.arm_aborts(),
            Leg::Client => self.arm_for_client(),
        }
    }

    fn arm_prefill(&self) {
        let (moment, fault) = (self.cell.moment, self.cell.fault);
        let begun = is_begun(moment);
        let after_ms = if begun { FAILS_AT_MS } else { 0 };
        // A decode engine that has a token has the KV; response headers it sends before.
        let after_work = begun && moment != Moment::Headers;
        if after_work {
            self.once(DECODE, On::Decode, stall_after(chunks(moment)));
        }
        let kind = match fault {
            Fault::Reset => reset(after_ms, after_work),
            Fault::Status(code) => status(code, after_ms, after_work),
            Fault::Stall => stall(after_work),
            Fault::Dies => FaultKind::Die,
            Fault::BadJson => FaultKind::BadJson,
            Fault::NoKv => FaultKind::NoKvParams,
            Fault::UnusableKv => FaultKind::KvParams {
                merge: Default::default(),
                remove: vec!["remote_engine_id".to_owned()],
            },
            Fault::Refused => return self.struck(|engine| engine.refuse(false)),
            _ => return,
        };
        let on = match moment {
            Moment::Asking => On::Info,
            _ => On::Prefill,
        };
        self.struck(|engine| assert!(engine.inject(Armed::every(on, kind.clone()))));
    }

    fn arm_decode(&self) {
        let (moment, together) = (self.cell.moment, self.cell.engine.is_together());
        let after_chunks = chunks(moment);
        let unanswered = moment == Moment::Decoding;
        let kind = match self.cell.fault {
            Fault::Reset if unanswered => reset(0, false),
            Fault::Reset => FaultKind::ResetMidStream {
                after_chunks,
                how: Cut::Rst,
            },
            Fault::Status(code) => status(code, 0, false),
            Fault::Stall if pulls_for_ever(self.cell) => return,
            Fault::Stall if unanswered => stall(together),
            // It dies when the client has seen as much.
            Fault::Stall | Fault::Dies if !unanswered => stall_after(after_chunks),
            Fault::Dies => FaultKind::Die,
            Fault::ErrorEvent => FaultKind::ErrorMidStream { after_chunks },
            Fault::Refused => return self.struck(|engine| engine.refuse(false)),
            _ => return,
        };
        self.struck(|engine| assert!(engine.inject(Armed::next(1, On::Decode, kind.clone()))));
    }

    /// The prefill leg fails, and so does the abort that follows.
    fn arm_aborts(&self) {
        let (after_ms, kind) = match self.cell.fault {
            // The decode pod stops listening as soon as it has its leg.
            Fault::Refused => (BEFORE_ABORT_MS, None),
            Fault::Status(code) => (AFTER_DECODE_MS, Some(status(code, 0, false))),
            _ => (AFTER_DECODE_MS, Some(stall(false))),
        };
        self.once(PREFILL, On::Prefill, status(500, after_ms, false));
        if let Some(kind) = kind {
            self.struck(|engine| assert!(engine.inject(Armed::every(On::Abort, kind.clone()))));
        }
    }

    /// Keeps the request where its client leaves it.
    fn arm_for_client(&self) {
        match self.cell.moment {
            Moment::Asking => self.once(PREFILL, On::Info, FaultKind::Slow { ms: SLOW_MS }),
            Moment::Retrying => self.once(PREFILL, On::Prefill, status(503, 0, false)),
            Moment::Decoding if pulls_for_ever(self.cell) => {}
            Moment::Decoding => {
                let together = self.cell.engine.is_together();
                self.once(DECODE, On::Decode, stall(together));
            }
            moment if is_begun(moment) => {
                self.once(DECODE, On::Decode, stall_after(chunks(moment)));
            }
            _ => {}
        }
    }

    fn once(&self, pod: &str, on: On, kind: FaultKind) {
        assert!(self.engine(pod).inject(Armed::next(1, on, kind)));
    }

    fn struck(&self, strike: impl Fn(&Simulated)) {
        for pod in self.cell.struck() {
            strike(self.engine(pod));
        }
    }
}
