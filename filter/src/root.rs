//! A root context: one plugin configuration, its tick, and the answers to its calls.
//!
//! A changed plugin configuration keeps the VM and adds a root; the old one serves its streams
//! to their end. So settings are per root, everything else is per VM.

use crate::effects::Place;
use crate::host::{call, clock, memory, store::SharedData, stream};
use crate::route::Route;
#[cfg(feature = "tokenizers")]
use crate::tokenizer::Loader;
use crate::vm::{self, Vm};
use pd_core::config::Config;
use pd_core::flow::Event;
use pd_core::ledger::Vitals;
use pd_core::meters::{Count, Gauge, Meter};
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{BufferType, ContextType};
use std::rc::Rc;
use std::time::Duration;

/// Period of the root's tick, in ms: the grain of every timer.
pub const TICK_MS: u64 = 100;
/// How much earlier than a period after the last one a tick may come and count, in ms.
const TICK_SLACK_MS: u64 = 10;
/// Time between two ticks from which on this worker, and not the pods, was silent, in ms.
const STALL_MS: u64 = 5 * TICK_MS;
/// Most due requests of one tick: streams wait while those are answered or cut, and the proxy has as
/// much to do for each after the tick as in it.
const MAX_DUE: usize = 50;
/// Period of the tick while more than that are due, in ms.
const HURRIED_TICK_MS: u64 = 10;
/// How often expired charges are looked for, in ms.
const SWEEP_MS: u64 = 60_000;

/// What a root's streams share.
#[derive(Debug)]
pub struct Settings {
    /// The root's id.
    pub root: u32,
    /// Checked plugin configuration.
    pub config: Config,
}

/// One plugin configuration.
pub struct Root {
    id: u32,
    settings: Option<Rc<Settings>>,
    /// The tick is faster for a while.
    hurried: bool,
}

impl Root {
    /// A root that is not configured yet.
    pub fn new(id: u32) -> Self {
        Self {
            id,
            settings: None,
            hurried: false,
        }
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, size: usize) -> bool {
        let text = stream::read(BufferType::PluginConfiguration, 0, size);
        let config = match Config::parse(&text, |name| std::env::var(name).ok()) {
            Ok(config) => config,
            Err(mistakes) => {
                for mistake in &mistakes {
                    log::error!("plugin config: {mistake}");
                }
                log::error!("plugin config refused: {} mistakes", mistakes.len());
                return false;
            }
        };
        for warning in &config.warnings {
            log::warn!("{warning}");
        }
        self.settings = Some(Rc::new(Settings {
            root: self.id,
            config,
        }));
        if hostcalls::set_tick_period(Duration::from_millis(TICK_MS)).is_err() {
            log::error!("the host refused a tick");
            return false;
        }
        true
    }

    fn on_tick(&mut self) {
        let Some(settings) = self.settings.clone() else {
            return;
        };
        let hurry = vm::with(|vm| vm.tick(&settings));
        if hurry != self.hurried {
            let period_ms = if hurry { HURRIED_TICK_MS } else { TICK_MS };
            if hostcalls::set_tick_period(Duration::from_millis(period_ms)).is_ok() {
                self.hurried = hurry;
            }
        }
    }

    fn on_queue_ready(&mut self, _: u32) {
        call::send_parked();
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let settings = self.settings.clone()?;
        Some(Box::new(Route::new(id, settings)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Context for Root {
    fn on_done(&mut self) -> bool {
        vm::with(|vm| vm.meters.flush());
        true
    }

    fn on_http_call_response(&mut self, token: u32, headers: usize, body_size: usize, _: usize) {
        let asked = vm::with(|vm| {
            let id = vm.flows.answered(token)?;
            let entry = vm.flows.get_mut(id)?;
            Some((id, entry.flow.reads_of_reply()))
        });
        let Some((id, wanted)) = asked else { return };
        let status = if headers == 0 {
            None
        } else {
            stream::call_status()
        };
        let body = stream::read(BufferType::HttpCallResponseBody, 0, body_size.min(wanted));
        let event = match status {
            // The proxy's own answer to a call it could not deliver, or whose answer was no HTTP
            // (502); an engine's carries a time.
            Some(502..=504) if !stream::call_reached_upstream() => Event::of_proxy(&body),
            Some(status) => Event::CallReply {
                status,
                body: &body,
            },
            None => Event::CallFailed,
        };
        vm::with(|vm| vm.handle(id, event, Place::Root(self.id)));
    }
}

impl Vm {
    /// One tick of one root: deadlines at every one, the VM's own duties once a period. True when
    /// requests are due that had to be left for the next tick.
    fn tick(&mut self, settings: &Settings) -> bool {
        let now_ms = clock::now_ms();
        self.dispatch_posted(settings.root);
        let since = now_ms.saturating_sub(self.ticked_at);
        if since >= STALL_MS {
            self.flows.unheard_for(since.saturating_sub(TICK_MS));
        }
        let due = self.flows.take_due(now_ms, MAX_DUE);
        let backlog = due.len() >= MAX_DUE;
        for id in due {
            self.handle(id, Event::Due, Place::Root(settings.root));
        }
        // Each root ticks at its own time; together they must not make this VM's beat faster.
        if since >= TICK_MS - TICK_SLACK_MS {
            self.beat(settings, now_ms);
        }
        backlog
    }

    /// This VM's own duties.
    fn beat(&mut self, settings: &Settings, now_ms: u64) {
        self.ticked_at = now_ms;
        self.worker.unix_ahead_ms = clock::unix_ahead_ms();
        self.reset_warnings();
        self.worker.fleet.refresh(&SharedData);
        self.watch_snapshot(settings, now_ms);
        let vitals = Vitals {
            live_flows: u32::try_from(self.flows.len()).unwrap_or(u32::MAX),
            memory_pages: memory::pages(),
        };
        let report = self.worker.ledger.tick(&SharedData, vitals);
        if report.fenced {
            log::warn!("this VM was taken for dead; its charges are published again");
        }
        if report.lost_flows > 0 {
            log::error!(
                "a VM of this filter died or stood still with {} requests under way",
                report.lost_flows
            );
            let lost = Count::new(Meter::Lost, None);
            self.meters.add(lost, report.lost_flows);
        }
        if report.overflow {
            log::warn!("all VM slots are taken; charges go to the overflow slot");
        }
        let is_janitor = self.worker.ledger.is_janitor();
        self.worker
            .tick(&settings.config, &SharedData, now_ms, is_janitor);
        #[cfg(feature = "tokenizers")]
        self.load_tokenizer(now_ms);
        if now_ms.saturating_sub(self.swept_at) >= SWEEP_MS {
            self.swept_at = now_ms;
            self.sweep(now_ms);
        }
        self.meters.flush();
    }

    /// Loads a tokenizer that a request wants, if there is one and no other VM is loading.
    #[cfg(feature = "tokenizers")]
    fn load_tokenizer(&mut self, now_ms: u64) {
        let (tokenizers, own) = (&mut self.worker.tokenizers, self.worker.nonce);
        let Some(report) = tokenizers.tick(&SharedData, &Loader, own, now_ms) else {
            return;
        };
        let model = pd_wire::knobs::excerpt(&report.model);
        match report.result {
            Ok(ms) => log::info!("the tokenizer of {model} was loaded in {ms} ms"),
            Err(problem) => log::warn!(
                "the tokenizer of {model} cannot be loaded, its prompts are estimated: {problem}"
            ),
        }
    }

    /// Shows how old the snapshot is, and says so once when the agent seems to be gone.
    fn watch_snapshot(&mut self, settings: &Settings, now_ms: u64) {
        let topology = self.worker.fleet.topology_status(now_ms);
        let samples = self.worker.fleet.samples_status(now_ms);
        if let Some(held) = topology {
            self.meters.set(Gauge::TopologyAge, held.age_ms / 1000);
        }
        let Some(held) = samples else { return };
        self.meters.set(Gauge::SamplesAge, held.age_ms / 1000);
        let stale = held.age_ms > settings.config.knobs.stale_after_ms;
        if stale && !self.stale {
            self.warn(format_args!(
                "no samples from agent {} for {} s; pods are chosen by what is charged to them",
                held.agent,
                held.age_ms / 1000
            ));
        }
        self.stale = stale;
    }

    /// Gives back charges that outlived their time to live.
    fn sweep(&mut self, now_ms: u64) {
        for expired in self.worker.ledger.expire(&SharedData, now_ms) {
            let charge = expired.describe(&mut self.worker.fleet);
            self.warn(format_args!("given back by force: {charge}"));
            self.meters.count(Count::new(Meter::ChargeExpired, None));
        }
    }
}
