//! What a cell must show.

use crate::{SLACK_MS, TICK_MS};

/// What must come of a request.
#[derive(Clone, Debug)]
pub struct Expect {
    /// What the client gets.
    pub client: Client,
    /// When, counted from the request; for a client that leaves, nothing.
    pub due: Due,
    /// The one ending that is counted.
    pub ending: Ending,
    /// How the counters of the cell's model stand in the end.
    pub counters: Vec<Counter>,
    /// How long something of it may be left in the engines.
    pub left: Left,
    /// The promise that says so.
    pub why: &'static str,
}

/// What the client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// A whole answer of an engine.
    Healthy,
    /// This status and nothing of an answer before.
    Error {
        /// HTTP status.
        status: u16,
        /// The marker header.
        marker: Marker,
        /// What the body is; always of OpenAI's form, `{"error": {"message": …}}`.
        body: Body,
    },
    /// A broken connection, whatever came before. An HTTP/1 client may see it up to a second late.
    Cut,
    /// It left.
    Left,
}

/// The header that says which leg failed; its value is `true`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// `x-error-pd-prefill`.
    Prefill,
    /// `x-error-pd-decode`.
    Decode,
    /// Neither.
    None,
}

/// Whose error body it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The engine's: its own message, "engine says no".
    Engine,
    /// The gateway's, with this `code` and a message that contains the text.
    Gateway {
        /// Value of `code`.
        code: &'static str,
        /// Part of the message; may be empty.
        says: &'static str,
    },
}

/// When the client's answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Due {
    /// Earliest, in ms.
    pub from_ms: u64,
    /// Latest, in ms: the knob, a tick, and the slack.
    pub to_ms: u64,
}

/// The ending that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Value of the `status` label. Of a success: `gateway_request_model_success_total`, else
    /// `gateway_request_model_fail_total`.
    pub status: &'static str,
    /// Value of the `status_code` label; `None` where the client saw no status of the failure.
    pub code: Option<u16>,
}

/// A counter of the cell's model: the sum over all its samples with these labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Name.
    pub name: &'static str,
    /// Labels that are asked for; others may have any value.
    pub labels: Vec<(&'static str, String)>,
    /// What it must be.
    pub count: Count,
}

/// A number to expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// This one.
    Is(u64),
    /// This one or more.
    AtLeast(u64),
}

/// How long something of the request may be left in the engines: KV held for it, rooms, running or
/// waiting requests. The ledger is empty within [`crate::SOON_MS`] whatever this says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// [`crate::SOON_MS`] after the end.
    Soon,
    /// [`crate::LEASE_MS`] more: only the prefill engine's lease frees the KV, for this reason.
    Lease(&'static str),
}

// === impl Client, Marker, Count ===

impl Client {
    /// The expectation in one word or two.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Healthy => "200".to_owned(),
            Self::Cut => "cut".to_owned(),
            Self::Left => "left".to_owned(),
            Self::Error {
                status,
                marker,
                body,
            } => {
                let marker = match marker {
                    Marker::Prefill => " prefill",
                    Marker::Decode => " decode",
                    Marker::None => "",
                };
                let body = match body {
                    Body::Engine => "engine's",
                    Body::Gateway { code, .. } => code,
                };
                format!("{status}{marker} ({body})")
            }
        }
    }
}

impl Marker {
    /// Name of the header.
    #[must_use]
    pub fn header(self) -> Option<&'static str> {
        match self {
            Self::Prefill => Some("x-error-pd-prefill"),
            Self::Decode => Some("x-error-pd-decode"),
            Self::None => None,
        }
    }
}

impl Count {
    /// Whether a number is as expected.
    #[must_use]
    pub fn holds(self, number: u64) -> bool {
        match self {
            Self::Is(count) => number == count,
            Self::AtLeast(count) => number >= count,
        }
    }
}

// === impl Due ===

impl Due {
    /// By nothing but the work itself.
    pub(crate) const AT_ONCE: Self = Self::by(0);

    /// Not later than at `ms`, and a tick and the slack.
    pub(crate) const fn by(ms: u64) -> Self {
        Self {
            from_ms: 0,
            to_ms: ms + TICK_MS + SLACK_MS,
        }
    }

    /// By a timer, or work, that ends at `ms`.
    pub(crate) const fn timer(ms: u64) -> Self {
        Self::between(ms, ms)
    }

    /// By something that takes between `least` and `most` ms.
    pub(crate) const fn between(least: u64, most: u64) -> Self {
        Self {
            from_ms: least - TICK_MS,
            to_ms: most + TICK_MS + SLACK_MS,
        }
    }
}

// === impl Ending ===

impl Ending {
    /// The counter's name.
    #[must_use]
    pub fn counter(&self) -> &'static str {
        if self.code.is_some_and(|code| code < 400) {
            "gateway_request_model_success_total"
        } else {
            "gateway_request_model_fail_total"
        }
    }
}

// === impl Expect ===

impl Expect {
    pub(crate) fn new(client: Client, due: Due, ending: Ending, why: &'static str) -> Self {
        let expect = Self {
            client,
            due,
            ending,
            counters: Vec::new(),
            left: Left::Soon,
            why,
        };
        let zero = Count::Is(0);
        expect
            .counts(RETRY, &[], zero)
            .counts(WATCHDOG, &[], zero)
            .counts(PAIR_FAILURE, &[], zero)
    }

    /// A whole answer.
    pub(crate) fn healthy(due: Due, why: &'static str) -> Self {
        let ending = Ending {
            status: "gateway_request_success",
            code: Some(200),
        };
        Self::new(Client::Healthy, due, ending, why)
    }

    /// An error of the gateway's own.
    pub(crate) fn error(
        status: u16,
        marker: Marker,
        (code, says): (&'static str, &'static str),
        due: Due,
        why: &'static str,
    ) -> Self {
        let body = Body::Gateway { code, says };
        let label = match (marker, status) {
            (Marker::Prefill, _) => "pd_prefill_failure",
            (_, 504) => "pd_decode_watchdog",
            _ => "pd_decode_failure",
        };
        let ending = Ending {
            status: label,
            code: Some(status),
        };
        let client = Client::Error {
            status,
            marker,
            body,
        };
        Self::new(client, due, ending, why)
    }

    /// An engine's own error.
    pub(crate) fn engine(status: u16, marker: Marker, due: Due, why: &'static str) -> Self {
        let label = if marker == Marker::None {
            "engine_error"
        } else {
            "pd_prefill_failure"
        };
        let ending = Ending {
            status: label,
            code: Some(status),
        };
        let client = Client::Error {
            status,
            marker,
            body: Body::Engine,
        };
        Self::new(client, due, ending, why)
    }

    /// A cut, counted under this label.
    pub(crate) fn cut(label: &'static str, code: Option<u16>, due: Due, why: &'static str) -> Self {
        let ending = Ending {
            status: label,
            code,
        };
        Self::new(Client::Cut, due, ending, why)
    }

    /// A client that leaves.
    pub(crate) fn gone(why: &'static str) -> Self {
        let ending = Ending {
            status: "client_gone",
            code: Some(499),
        };
        Self::new(Client::Left, Due::AT_ONCE, ending, why)
    }

    /// One counter more, in place of what was said of the same one.
    pub(crate) fn counts(
        mut self,
        name: &'static str,
        labels: &[(&'static str, &str)],
        count: Count,
    ) -> Self {
        self.counters.retain(|counter| counter.name != name);
        self.counters.push(Counter {
            name,
            labels: labels
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned()))
                .collect(),
            count,
        });
        self
    }

    /// Says nothing of a counter.
    pub(crate) fn leaves_open(mut self, name: &'static str) -> Self {
        self.counters.retain(|counter| counter.name != name);
        self
    }

    /// KV that only the lease frees.
    pub(crate) fn leased(mut self, why: &'static str) -> Self {
        self.left = Left::Lease(why);
        self
    }
}

/// Prefill legs sent again.
pub(crate) const RETRY: &str = "gateway_pd_prefill_retry_total";
/// Timers that ended a request.
pub(crate) const WATCHDOG: &str = "gateway_pd_decode_watchdog_total";
/// Failures that are both pods'.
pub(crate) const PAIR_FAILURE: &str = "gateway_pd_pair_failure_total";
/// Failed prefill legs by class and stage.
pub(crate) const PREFILL_FAILURE: &str = "gateway_pd_prefill_failure_total";
/// Abort calls.
pub(crate) const ABORT: &str = "gateway_pd_decode_abort_total";
/// References that were not passed on.
pub(crate) const UNUSABLE: &str = "gateway_pd_hand_over_unusable_total";
/// Prefill legs that nobody waited for.
pub(crate) const ORPHAN: &str = "gateway_pd_orphan_total";
