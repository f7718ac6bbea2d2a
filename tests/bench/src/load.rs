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
use crate::response::shown;
use crate::target::{Route, Target};

/// A run in which nothing is answered for this long has failed.
const STALL: Duration = Duration::from_secs(20);
/// Failures after which no more requests are sent.
const MAX_ERRORS: u64 = 20;
/// Reasons of failures that are kept.
const MAX_REASONS: usize = 5;
/// Room for one read; the answers expected fit.
const READ_BYTES: usize = 64 << 10;

/// What a target is loaded with.
#[derive(Clone, Copy)]
pub(crate) struct Load<'a> {
    pub(crate) target: &'a Target,
    /// Taken in turn.
    pub(crate) prompts: &'a [Prompt],
    pub(crate) counter: &'a Counter,
    pub(crate) concurrency: usize,
}

/// When a slice of load sends its last requests. It ends when all are answered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// After this time.
    Elapsed(Duration),
    /// After this many requests.
    Count(u64),
}

/// Load against one target in slices, over the same connections. Between slices the target is idle,
/// so that two sessions can take turns and meet the same disturbances.
pub(crate) struct Session<'a> {
    run: Run<'a>,
    clients: Vec<Client>,
    poll: Poll,
    events: Events,
    rss_before_mb: f64,
    /// Sums over the slices.
    wall: Duration,
    envoy: Duration,
    own: Duration,
}

/// One client: a connection, or one for each leg, and the request on it.
struct Client {
    front: Connection,
    back: Option<Connection>,
    /// A request is under way.
    busy: bool,
    leg: Leg,
    prompt: usize,
    number: u64,
    started: Instant,
    first_byte: Option<Instant>,
}

/// The requests of a session.
struct Run<'a> {
    load: Load<'a>,
    scratch: Vec<u8>,
    total: Times,
    first_byte: Times,
    /// End of the slice under way.
    until: Until,
    began: Instant,
    launched: u64,
    in_flight: usize,
    errors: u64,
    reasons: Vec<String>,
    progress: Instant,
}

/// CPU times and the clock at one end of a slice.
struct Mark {
    at: Instant,
    envoy: Duration,
    own: Duration,
}

// === impl Session ===

impl<'a> Session<'a> {
    /// Connects all clients.
    ///
    /// # Errors
    /// When the target cannot be reached or its process is gone.
    pub(crate) fn open(load: Load<'a>) -> Result<Self> {
        ensure!(!load.prompts.is_empty(), "no prompts to send");
        let poll = Poll::new()?;
        let clients = (0..load.concurrency)
            .map(|index| Client::open(load.target.route, poll.registry(), index))
            .collect::<Result<_>>()?;
        Ok(Self {
            run: Run::new(load)?,
            clients,
            poll,
            events: Events::with_capacity(2 * load.concurrency.max(1)),
            rss_before_mb: load.target.process.resident_mb()?,
            wall: Duration::ZERO,
            envoy: Duration::ZERO,
            own: Duration::ZERO,
        })
    }

    /// Runs one slice. Requests that fail are counted, not returned as an error.
    ///
    /// # Errors
    /// When the target cannot be reached, stops answering or its process is gone.
    pub(crate) fn slice(&mut self, until: Until) -> Result<()> {
        let target = self.run.load.target;
        let begin = Mark::now(&target.process)?;
        self.run.until = until;
        self.run.began = begin.at;
        self.run.launched = 0;
        self.run.progress = begin.at;
        for client in &mut self.clients {
            self.run.launch(client)?;
        }
        while self.run.in_flight > 0 {
            if let Err(error) = self.poll.poll(&mut self.events, Some(STALL)) {
                ensure!(error.kind() == io::ErrorKind::Interrupted, error);
            }
            for event in self.events.iter() {
                let Token(token) = event.token();
                if let Some(client) = self.clients.get_mut(token / 2) {
                    self.run.turn(client, token, self.poll.registry())?;
                }
            }
            ensure!(
                self.run.progress.elapsed() < STALL,
                "{}: nothing was answered for {STALL:?}, {} requests wait",
                target.name,
                self.run.in_flight
            );
        }
        let end = Mark::now(&target.process)?;
        self.wall += end.at.duration_since(begin.at);
        self.envoy += end.envoy.saturating_sub(begin.envoy);
        self.own += end.own.saturating_sub(begin.own);
        Ok(())
    }

    /// Forgets what was measured so far, as after a warm-up; not errors.
    pub(crate) fn forget(&mut self) {
        self.run.total.clear();
        self.run.first_byte.clear();
        self.wall = Duration::ZERO;
        self.envoy = Duration::ZERO;
        self.own = Duration::ZERO;
    }

    /// Sums up the slices.
    pub(crate) fn finish(self) -> Result<Measured> {
        let run = self.run;
        let requests = run.total.count();
        let seconds = self.wall.as_secs_f64();
        let each = |sum: Duration| sum.as_secs_f64() * 1e6 / requests.max(1) as f64;
        Ok(Measured {
            requests,
            seconds,
            rps: requests as f64 / seconds,
            total: run.total.quantiles(),
            first_byte: run.first_byte.quantiles(),
            envoy_cpu_us: each(self.envoy),
            client_cpu_us: each(self.own),
            rss_before_mb: self.rss_before_mb,
            rss_after_mb: run.load.target.process.resident_mb()?,
            errors: run.errors,
            reasons: run.reasons,
        })
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
    fn new(load: Load<'a>) -> Result<Self> {
        Ok(Self {
            load,
            scratch: vec![0; READ_BYTES],
            total: Times::new()?,
            first_byte: Times::new()?,
            until: Until::Count(0),
            began: Instant::now(),
            launched: 0,
            in_flight: 0,
            errors: 0,
            reasons: Vec::new(),
            progress: Instant::now(),
        })
    }

    /// Sends the client's next request, unless the slice is ending.
    fn launch(&mut self, client: &mut Client) -> Result<()> {
        let over = match self.until {
            Until::Elapsed(time) => self.began.elapsed() >= time,
            Until::Count(count) => self.launched >= count,
        };
        if over || self.errors >= MAX_ERRORS {
            return Ok(());
        }
        let turn = usize::try_from(self.launched).unwrap_or_default();
        client.prompt = turn
            .checked_rem(self.load.prompts.len())
            .unwrap_or_default();
        client.number = self.load.counter.next();
        self.launched += 1;
        self.in_flight += 1;
        client.busy = true;
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
        // An idle client's last answer must not be counted again, and the connection of the other
        // leg has nothing to say now. A connection closed meanwhile fails when it is next used.
        if !client.busy || (client.leg == Leg::Decode) != (token % 2 == 1) {
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
                *client = Client::open(self.load.target.route, registry, token / 2)?;
            }
        }
        client.busy = false;
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
        if complete {
            self.total.record(now.duration_since(client.started));
            self.first_byte
                .record(first_byte.duration_since(client.started));
        }
        Ok(complete)
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
            busy: false,
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

#[cfg(test)]
mod tests;
