//! Closed-loop load from one thread: every client sends its next request when the last is answered.

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use memchr::memmem;
use mio::{Events, Poll, Registry, Token};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::connection::Connection;
use crate::measured::{Measured, Times};
use crate::process::Process;
use crate::prompt::{Counter, Leg, Prompt};
use crate::target::{Route, Target};

/// A run in which nothing is answered for this long has failed.
const STALL: Duration = Duration::from_secs(20);
/// Failures after which no more requests are sent.
const MAX_ERRORS: u64 = 20;
/// Reasons of failures that are kept.
const MAX_REASONS: usize = 5;
/// Room for one read; the answers expected fit.
const READ_BYTES: usize = 64 << 10;
/// Characters of an answer shown when it is not as it must be.
const SHOWN: usize = 200;

/// One run of load against one target.
pub(crate) struct Load<'a> {
    pub(crate) target: &'a Target,
    /// Taken in turn.
    pub(crate) prompts: &'a [Prompt],
    pub(crate) counter: &'a Counter,
    pub(crate) concurrency: usize,
    pub(crate) until: Until,
}

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// After a warm-up and a measured window.
    Window { warm_up: Duration, window: Duration },
    /// After this many requests, all measured.
    Count(u64),
}

/// One client: a connection, or one for each leg, and the request on it.
struct Client {
    front: Connection,
    back: Option<Connection>,
    leg: Leg,
    prompt: usize,
    number: u64,
    started: Instant,
    first_byte: Option<Instant>,
}

/// A run under way.
struct Run<'a> {
    load: &'a Load<'a>,
    scratch: Vec<u8>,
    total: Times,
    first_byte: Times,
    launched: u64,
    in_flight: usize,
    launching: bool,
    measuring: bool,
    errors: u64,
    reasons: Vec<String>,
    progress: Instant,
}

/// CPU times and the clock at one end of the window.
struct Mark {
    at: Instant,
    envoy: Duration,
    own: Duration,
}

// === impl Load ===

impl Load<'_> {
    /// Runs it to the end. Requests that fail are counted, not returned as an error.
    ///
    /// # Errors
    /// When the target cannot be reached, stops answering or its process is gone.
    pub(crate) fn run(&self) -> Result<Measured> {
        ensure!(!self.prompts.is_empty(), "no prompts to send");
        let mut poll = Poll::new()?;
        let mut events = Events::with_capacity(2 * self.concurrency.max(1));
        let mut run = Run::new(self)?;
        let rss_before_mb = self.target.process.resident_mb()?;
        let mut begin = Mark::now(&self.target.process)?;
        let (warm_up, window) = match self.until {
            Until::Window { warm_up, window } => (warm_up, window),
            Until::Count(_) => (Duration::ZERO, Duration::MAX),
        };
        let mut clients = Vec::with_capacity(self.concurrency);
        for index in 0..self.concurrency {
            clients.push(Client::open(self.target.route, poll.registry(), index)?);
        }
        for client in &mut clients {
            run.launch(client)?;
        }
        let mut end = None;
        while run.in_flight > 0 {
            let edge = if run.measuring { window } else { warm_up };
            let wait = edge.saturating_sub(begin.at.elapsed());
            let wait = if run.launching {
                wait.min(STALL)
            } else {
                STALL
            };
            if let Err(error) = poll.poll(&mut events, Some(wait)) {
                ensure!(error.kind() == io::ErrorKind::Interrupted, error);
            }
            for event in events.iter() {
                let Token(token) = event.token();
                if let Some(client) = clients.get_mut(token / 2) {
                    run.turn(client, token, poll.registry())?;
                }
            }
            ensure!(
                run.progress.elapsed() < STALL,
                "{}: nothing was answered for {STALL:?}, {} requests wait",
                self.target.name,
                run.in_flight
            );
            if run.launching && !run.measuring && begin.at.elapsed() >= warm_up {
                begin = Mark::now(&self.target.process)?;
                run.total.clear();
                run.first_byte.clear();
                run.measuring = true;
            } else if run.launching && run.measuring && begin.at.elapsed() >= window {
                end = Some(Mark::now(&self.target.process)?);
                run.launching = false;
                run.measuring = false;
            }
        }
        let end = match end {
            Some(end) => end,
            None => Mark::now(&self.target.process)?,
        };
        let mut measured = run.measured(&begin, &end);
        measured.rss_before_mb = rss_before_mb;
        measured.rss_after_mb = self.target.process.resident_mb()?;
        Ok(measured)
    }
}

// === impl Mark ===

impl Mark {
    fn now(envoy: &Process) -> Result<Self> {
        Ok(Self {
            envoy: envoy.cpu()?,
            own: Process::open(std::process::id())?.cpu()?,
            at: Instant::now(),
        })
    }
}

// === impl Run ===

impl<'a> Run<'a> {
    fn new(load: &'a Load<'a>) -> Result<Self> {
        Ok(Self {
            load,
            scratch: vec![0; READ_BYTES],
            total: Times::new()?,
            first_byte: Times::new()?,
            launched: 0,
            in_flight: 0,
            launching: true,
            measuring: matches!(load.until, Until::Count(_)),
            errors: 0,
            reasons: Vec::new(),
            progress: Instant::now(),
        })
    }

    /// Sends the client's next request, unless the run is ending.
    fn launch(&mut self, client: &mut Client) -> Result<()> {
        if let Until::Count(count) = self.load.until
            && self.launched >= count
        {
            self.launching = false;
        }
        if !self.launching {
            return Ok(());
        }
        let turn = usize::try_from(self.launched).unwrap_or_default();
        client.prompt = turn
            .checked_rem(self.load.prompts.len())
            .unwrap_or_default();
        client.number = self.load.counter.next();
        self.launched += 1;
        self.in_flight += 1;
        client.started = Instant::now();
        client.first_byte = None;
        client.leg = match self.load.target.route {
            Route::Gateway(_) => Leg::Whole,
            Route::ByHand { .. } => Leg::Prefill,
        };
        let prompt = self.prompt(client.prompt)?;
        client.send(prompt, "")
    }

    fn prompt(&self, index: usize) -> Result<&'a Prompt> {
        self.load.prompts.get(index).context("no such prompt")
    }

    /// Deals with an event of one of the client's connections.
    fn turn(&mut self, client: &mut Client, token: usize, registry: &Registry) -> Result<()> {
        // The connection of the other leg has nothing to say now.
        if (client.leg == Leg::Decode) != (token % 2 == 1) {
            return Ok(());
        }
        match self.advance(client) {
            Ok(false) => return Ok(()),
            Ok(true) => {}
            Err(error) => {
                self.errors += 1;
                if self.reasons.len() < MAX_REASONS {
                    self.reasons
                        .push(format!("{:?} leg: {error:#}", client.leg));
                }
                if self.errors >= MAX_ERRORS {
                    self.launching = false;
                }
                *client = Client::open(self.load.target.route, registry, token / 2)?;
            }
        }
        self.in_flight -= 1;
        self.progress = Instant::now();
        self.launch(client)
    }

    /// Moves the request on; true when it has been answered.
    fn advance(&mut self, client: &mut Client) -> Result<bool> {
        let prompt = self.prompt(client.prompt)?;
        let leg = client.leg;
        let connection = client.active()?;
        connection.flush(prompt.filler())?;
        connection.receive(&mut self.scratch)?;
        let response = &connection.response;
        let (complete, status) = (response.is_complete(), response.status());
        if complete && status != 200 {
            bail!("status {status}: {}", shown(response.body()));
        }
        if leg == Leg::Prefill {
            if complete {
                let answer: PrefillAnswer<'_> = serde_json::from_slice(response.body())
                    .with_context(|| shown(response.body()))?;
                // Small, and the client's buffers change hands.
                let params = answer.kv_transfer_params.get().to_owned();
                client.leg = Leg::Decode;
                client.send(prompt, &params)?;
            }
            return Ok(false);
        }
        let begun = !response.body().is_empty();
        if complete {
            check(response.body(), prompt.streams())?;
        }
        let now = Instant::now();
        let first_byte = match client.first_byte {
            Some(at) => at,
            None if begun => *client.first_byte.insert(now),
            None => return Ok(false),
        };
        if complete && self.measuring {
            self.total.record(now.duration_since(client.started));
            self.first_byte
                .record(first_byte.duration_since(client.started));
        }
        Ok(complete)
    }

    fn measured(self, begin: &Mark, end: &Mark) -> Measured {
        let seconds = end.at.duration_since(begin.at).as_secs_f64();
        let requests = self.total.count();
        let each = |from: Duration, to: Duration| {
            to.saturating_sub(from).as_secs_f64() * 1e6 / requests.max(1) as f64
        };
        Measured {
            requests,
            seconds,
            rps: requests as f64 / seconds,
            total: self.total.quantiles(),
            first_byte: self.first_byte.quantiles(),
            envoy_cpu_us: each(begin.envoy, end.envoy),
            client_cpu_us: each(begin.own, end.own),
            rss_before_mb: 0.0,
            rss_after_mb: 0.0,
            errors: self.errors,
            reasons: self.reasons,
        }
    }
}

// === impl Client ===

impl Client {
    fn open(route: Route, registry: &Registry, index: usize) -> Result<Self> {
        let (front, back) = match route {
            Route::Gateway(address) => (address, None),
            Route::ByHand { prefill, decode } => (prefill, Some(decode)),
        };
        let open = |address, token| Connection::open(address, registry, Token(token));
        Ok(Self {
            front: open(front, 2 * index)?,
            back: back.map(|b| open(b, 2 * index + 1)).transpose()?,
            leg: Leg::Whole,
            prompt: 0,
            number: 0,
            started: Instant::now(),
            first_byte: None,
        })
    }

    /// The connection of the leg under way.
    fn active(&mut self) -> Result<&mut Connection> {
        match self.leg {
            Leg::Decode => self.back.as_mut().context("no connection for decode"),
            Leg::Whole | Leg::Prefill => Ok(&mut self.front),
        }
    }

    fn send(&mut self, prompt: &Prompt, params: &str) -> Result<()> {
        let (leg, number) = (self.leg, self.number);
        let connection = self.active()?;
        prompt.write(
            leg,
            number,
            params,
            &mut connection.head,
            &mut connection.tail,
        );
        connection.start(prompt.filler())
    }
}

/// What the client reads of a prefill answer.
#[derive(Deserialize)]
struct PrefillAnswer<'a> {
    #[serde(borrow)]
    kv_transfer_params: &'a RawValue,
}

/// The answer must be whole, and written from the KV of its own prompt: the simulated engine says
/// both hashes in its text.
fn check(body: &[u8], stream: bool) -> Result<()> {
    let end: &[u8] = if stream { b"data: [DONE]\n\n" } else { b"}" };
    ensure!(
        body.ends_with(end),
        "the answer has no end: {}",
        shown(body)
    );
    let kv = memmem::find(body, b" kv=").context("the answer names no KV")?;
    let own = kv.checked_sub(16).and_then(|from| body.get(from..kv));
    let used = body.get(kv + 4..kv + 20);
    ensure!(
        own.is_some() && own == used,
        "the answer is not from the KV of its prompt: {}",
        shown(body)
    );
    Ok(())
}

fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests;
