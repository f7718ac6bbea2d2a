//! Calls of our own: requests that no client's stream carries.
//!
//! The SDK hands the answer of a call to the context in whose callback the call was made, and
//! forgets the answers for a stream that is over. Those are the ones that tell which KV an engine
//! still holds, so every call is made in a callback of a root context: a stream parks its call here
//! and enters its root through the one callback that the host itself never makes, since no queue is
//! registered. (A shared queue does the same by way of the host, for five host calls a request.)

use pd_core::flow::Call;
use pd_wire::names;
use proxy_wasm::hostcalls;
use proxy_wasm::types::Status;
use std::cell::RefCell;
use std::time::Duration;

thread_local! {
    static PARKED: RefCell<Option<Call>> = const { RefCell::new(None) };
    static SENT: RefCell<Option<Result<u32, Status>>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    /// The SDK's entry to [`proxy_wasm::traits::RootContext::on_queue_ready`].
    safe fn proxy_on_queue_ready(context: u32, queue: u32);
}

/// Sends a call; the root whose callback is running gets the answer. Returns the call's token.
///
/// # Errors
/// The host refused it.
pub fn send(call: &Call) -> Result<u32, Status> {
    let own = [
        (":method", call.method),
        (":path", call.path.as_str()),
        (":authority", call.address.as_str()),
        (names::HEADER_TARGET, call.address.as_str()),
    ];
    let mut headers = Vec::with_capacity(own.len().saturating_add(call.headers.len()));
    headers.extend(own);
    headers.extend(
        call.headers
            .iter()
            .map(|(name, value)| (*name, value.as_str())),
    );
    let timeout = Duration::from_millis(call.timeout_ms);
    let body = (!call.body.is_empty()).then_some(call.body.as_slice());
    hostcalls::dispatch_http_call(names::CLUSTER, headers, body, Vec::new(), timeout)
}

/// Sends a call from a stream's callback; that stream's root gets the answer. Returns the call's
/// token.
///
/// # Errors
/// The host refused it.
pub fn send_as_root(root: u32, call: Call) -> Result<u32, Status> {
    PARKED.set(Some(call));
    proxy_on_queue_ready(root, 0);
    SENT.take().unwrap_or(Err(Status::InternalFailure))
}

/// Sends the parked call, in a callback of its root.
pub fn send_parked() {
    if let Some(call) = PARKED.take() {
        SENT.set(Some(send(&call)));
    }
}
