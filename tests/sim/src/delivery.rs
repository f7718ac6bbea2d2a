//! An answer on its way out, with what a fault makes of it.

use std::sync::Arc;

use bytes::Bytes;
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::Value;

use crate::fault::FaultKind;
use crate::flight::Flight;
use crate::reply::{Reply, json, respond};
use crate::server::Link;
use crate::strike::{late, stall};

/// What a request needs to be answered. Dropping it without an answer counts the client as gone.
pub(crate) struct Delivery {
    pub(crate) flight: Flight,
    pub(crate) link: Arc<Link>,
    pub(crate) fault: Option<FaultKind>,
}

const STREAM_TYPE: &str = "text/event-stream; charset=utf-8";

impl Delivery {
    /// Answers 200 in one piece.
    pub(crate) async fn whole(mut self, mut body: String) -> Response<Reply> {
        match &self.fault {
            Some(FaultKind::ResetBeforeHeaders { how, after_ms, .. }) => {
                stall(Some(*after_ms)).await;
                self.link.cut(*how);
                return std::future::pending().await;
            }
            Some(FaultKind::StallBeforeHeaders { ms, .. }) => stall(*ms).await,
            Some(FaultKind::LateStatus {
                code,
                body,
                after_ms,
                ..
            }) => {
                let answer = late(*code, body, *after_ms).await;
                self.flight.land();
                return answer;
            }
            Some(FaultKind::BadJson) => body.truncate(half(&body)),
            Some(
                FaultKind::StallMidStream { .. }
                | FaultKind::ResetMidStream { .. }
                | FaultKind::ErrorMidStream { .. },
            ) => return self.in_halves(body),
            _ => {}
        }
        self.flight.land();
        json(StatusCode::OK, body)
    }

    fn in_halves(mut self, body: String) -> Response<Reply> {
        let mut response = json(StatusCode::OK, "");
        response
            .headers_mut()
            .insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
        let mut first = Bytes::from(body);
        let second = first.split_off(first.len() / 2);
        *response.body_mut() = Reply::feed(|mut sink| async move {
            sink.send(first).await;
            self.interrupt().await;
            sink.send(second).await;
            self.flight.land();
        });
        response
    }

    /// The mid-stream part of a fault. Returns when the body goes on.
    pub(crate) async fn interrupt(&self) {
        match &self.fault {
            Some(FaultKind::ResetMidStream { how, .. }) => {
                self.link.cut(*how);
                std::future::pending().await
            }
            Some(FaultKind::StallMidStream { ms, .. }) => stall(*ms).await,
            _ => {}
        }
    }

    /// Whether the fault strikes after this many content chunks.
    pub(crate) fn breaks_after(&self, chunks: u32) -> bool {
        matches!(
            self.fault,
            Some(
                FaultKind::StallMidStream { after_chunks, .. }
                | FaultKind::ResetMidStream { after_chunks, .. }
                | FaultKind::ErrorMidStream { after_chunks }
            ) if after_chunks == chunks
        )
    }

    /// Whether the fault is an error event instead of the next chunk.
    pub(crate) fn errs(&self) -> bool {
        matches!(self.fault, Some(FaultKind::ErrorMidStream { .. }))
    }

    /// A content chunk as the fault has it, this being the first.
    pub(crate) fn first_chunk(&self, mut event: String) -> String {
        if matches!(self.fault, Some(FaultKind::BadJson)) {
            event.truncate(half(&event));
            event.push_str("\n\n");
        }
        event
    }

    /// Hand-over parameters, JSON, as the fault has them.
    pub(crate) fn distort(&self, parameters: Option<String>) -> Option<String> {
        match &self.fault {
            Some(FaultKind::NoKvParams) => None,
            Some(FaultKind::KvParams { merge, remove }) => {
                let mut value: Value = serde_json::from_str(&parameters?).unwrap_or_default();
                if let Some(members) = value.as_object_mut() {
                    for (name, new) in merge {
                        members.insert(name.clone(), new.clone());
                    }
                    for name in remove {
                        members.remove(name);
                    }
                }
                Some(value.to_string())
            }
            _ => parameters,
        }
    }
}

/// A response that streams events.
pub(crate) fn event_stream(reply: Reply) -> Response<Reply> {
    let mut response = respond(StatusCode::OK, STREAM_TYPE, "");
    response.headers_mut().remove(CONTENT_LENGTH);
    *response.body_mut() = reply;
    response
}

/// The text of a token after the first.
pub(crate) fn word(at: u32) -> String {
    format!(" t{}", at.saturating_add(1))
}

/// A cut in the middle that is no character's.
fn half(text: &str) -> usize {
    let mut at = text.len() / 2;
    while !text.is_char_boundary(at) {
        at = at.saturating_sub(1);
    }
    at
}
