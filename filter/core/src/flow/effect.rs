//! What a request wants the host to do. Effects are data and performed in order.

use super::Flow;
use crate::meters::Count;
use crate::reply::Reply;
use crate::request::patch::BodyEdit;

/// One thing to do.
#[derive(Debug)]
pub enum Effect {
    /// Send a request of our own; its answer comes back as `CallReply` or `CallFailed`.
    Call(Call),
    /// Read the buffered request body and hand it in as `Body`.
    ReadBody,
    /// Find out whether the body is hidden from the filter, and hand in `Probed`.
    ProbeBody,
    /// Let the client's request go to its pod.
    Send(Leg),
    /// Answer the client; nothing else reaches it.
    Reply(Reply),
    /// Turn the proxy's own answer that is on its way into this one.
    Rewrite(Reply),
    /// Cut the response: part of it has reached the client.
    Cut,
    /// Set headers of the response.
    Dress(Vec<(&'static str, String)>),
    /// Keep this part of the response back for now.
    Hold,
    /// Let the response go on that was kept back.
    Resume,
    /// This flow takes over the call that is out.
    Orphan(Box<Flow>),
    /// Count something.
    Count(Count),
    /// Facts of the decision, for the access log.
    Note(String),
    /// Something an operator should know; never prompt text.
    Warn(String),
}

/// A request of our own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// `ip:port`, always of the snapshot.
    pub address: String,
    /// Method.
    pub method: &'static str,
    /// Path with query.
    pub path: String,
    /// Headers beside the pseudo-headers and the target.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub body: Vec<u8>,
    /// When the host gives up, in ms; later than the flow's own deadline.
    pub timeout_ms: u64,
}

/// The client's own request on its way to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// `ip:port`, always of the snapshot.
    pub address: String,
    /// Fresh id of the request.
    pub request_id: String,
    /// The client said `application/json`.
    pub says_json: bool,
    /// Change to the body.
    pub body: BodyEdit,
}
