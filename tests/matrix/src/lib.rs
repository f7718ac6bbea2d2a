//! What must come of a request when something breaks: a table of cells, each an engine, a way to
//! answer (streamed or whole), a fault and the moment it strikes, with what the client, the
//! counters and the engines have to show for it.
//!
//! The table is data. It is run twice: against scripted engines on a driven clock, and against
//! simulated engines behind a real Envoy. Every cell is a model of its own, so cells run side by
//! side; [`Layout`] names its pods. Expectations follow from what the product promises, never from
//! what it happens to do.

#![cfg_attr(
    test,
    allow(
        clippy::panic,
        clippy::unwrap_used,
        clippy::indexing_slicing,
        reason = "tests"
    )
)]

mod cell;
mod expect;
mod layout;
mod report;
mod rules;

pub use cell::{Cell, Engine, Fallback, Fault, Leg, Moment, Reach, RunsOn};
pub use expect::{Body, Client, Count, Counter, Due, Ending, Expect, Left, Marker};
pub use layout::{Layout, PodSpec, Role};
pub use report::{Line, Report};
pub use rules::cells;

use serde_json::{Value, json};

/// Time a prefill leg may take, in ms.
pub const PREFILL_TIMEOUT_MS: u64 = 800;
/// Time from the prefill's success to a stream's first body chunk, in ms.
pub const FIRST_RESPONSE_MS: u64 = 700;
/// Time from the prefill's success to the end of an answer that is not streamed, in ms.
pub const RESPONSE_MS: u64 = 900;
/// Longest gap between two chunks of a stream, in ms.
pub const STREAM_IDLE_MS: u64 = 600;
/// Time an abort call may take, in ms.
pub const ABORT_TIMEOUT_MS: u64 = 300;
/// Delay before the second abort call, in ms.
pub const ABORT_RETRY_DELAY_MS: u64 = 200;
/// Time a context worker has to tell of itself, in ms; no knob.
pub const LOOK_UP_MS: u64 = 3000;
/// How long a decode engine's error waits for the prefill's verdict, in ms; no knob.
pub const VERDICT_MS: u64 = 250;

/// A prefill that is slow but in time takes this long, in ms.
pub const SLOW_MS: u64 = 500;
/// A prefill that answers after its timeout takes this long, in ms.
pub const LATE_MS: u64 = 1100;
/// Gap between the chunks of a slow stream that is alive, in ms.
pub const GAP_MS: u64 = 450;
/// A prefill leg that fails after its request's answer has begun fails this late, in ms.
pub const FAILS_AT_MS: u64 = 300;
/// Clients leave this long after the moment they leave at has come, in ms.
pub const LEAVES_AFTER_MS: u64 = 100;

/// Time between two looks at the timers, in ms.
pub const TICK_MS: u64 = 100;
/// How much later than its tick an answer may come, in ms.
pub const SLACK_MS: u64 = 250;
/// Within this time of a request's end nothing of it may be left, in ms; see [`Left::Soon`].
pub const SOON_MS: u64 = 8000;
/// Lease that the engines of the table give on KV nobody fetches, in ms; see [`Left::Lease`].
pub const LEASE_MS: u64 = 20_000;

/// Text of the `model.aibrix.ai/config` annotation of a cell's pods: the short timers, of every
/// engine, and what serves when no prefill pod can.
#[must_use]
pub fn annotation(fallback: Fallback) -> Value {
    let seconds = |ms: u64| json!(Value::from(ms).as_f64().map(|ms| ms / 1000.0));
    json!({"profiles": {"default": {
        "routingStrategy": "pd",
        "routingConfig": {
            "prefillFallback": fallback.name(),
            "pd": {
                "prefillRequestTimeout": seconds(PREFILL_TIMEOUT_MS),
                "decodeFirstResponseTimeout": seconds(FIRST_RESPONSE_MS),
                "decodeResponseTimeout": seconds(RESPONSE_MS),
                "decodeStreamIdleTimeout": seconds(STREAM_IDLE_MS),
                "decodeAbortTimeout": seconds(ABORT_TIMEOUT_MS),
                "decodeAbortRetryDelay": seconds(ABORT_RETRY_DELAY_MS),
            }
        }
    }}})
}

/// Plugin configuration of a gateway that runs cells of these engines. TensorRT-LLM's schedule
/// style holds for a whole gateway, so its cells with generation first need one of their own. Ties
/// go by pod name, so that the pods of [`Reach::First`] are chosen first. The retry budget is wide
/// because all cells share it.
#[must_use]
pub fn plugin(generation_first: bool) -> Value {
    let style = if generation_first {
        "generation_first"
    } else {
        "context_first"
    };
    json!({"tieSeed": 1, "trtScheduleStyle": style, "retryBudgetPercent": 100})
}
