//! Faults that strike before a request is worked on.

use std::time::Duration;

use hyper::header::{HeaderName, HeaderValue};
use hyper::{Response, StatusCode};

use crate::core::Core;
use crate::fault::FaultKind;
use crate::reply::{Reply, json};
use crate::server::Link;

/// The part of a fault that strikes before any work; `None` when the request goes on. `error` is
/// the engine's own error answer.
pub(crate) async fn strike(
    core: &Core,
    fault: &FaultKind,
    link: &Link,
    error: impl FnOnce(StatusCode) -> Response<Reply>,
) -> Option<Response<Reply>> {
    match fault {
        FaultKind::Status {
            code,
            body,
            headers,
        } => {
            let status = StatusCode::from_u16(*code).ok()?;
            let mut answer = match body {
                Some(body) => json(status, body.clone()),
                None => error(status),
            };
            for (name, text) in headers {
                let name = name.parse::<HeaderName>();
                if let (Ok(name), Ok(text)) = (name, HeaderValue::from_str(text)) {
                    answer.headers_mut().insert(name, text);
                }
            }
            Some(answer)
        }
        FaultKind::LateStatus {
            code,
            body,
            after_ms,
            after_work: false,
        } => Some(late(*code, body, *after_ms).await),
        FaultKind::ResetBeforeHeaders {
            how,
            after_ms,
            after_work: false,
        } => {
            tokio::time::sleep(Duration::from_millis(*after_ms)).await;
            link.cut(*how);
            std::future::pending().await
        }
        FaultKind::StallBeforeHeaders {
            ms,
            after_work: false,
        } => {
            stall(*ms).await;
            None
        }
        FaultKind::Slow { ms } => {
            stall(Some(*ms)).await;
            None
        }
        FaultKind::Die => {
            core.die("injected fault");
            std::future::pending().await
        }
        _ => None,
    }
}

/// Answers a status after a while.
pub(crate) async fn late(code: u16, body: &str, after_ms: u64) -> Response<Reply> {
    stall(Some(after_ms)).await;
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json(status, body.to_owned())
}

/// Waits this long, or until the client leaves and the future is dropped.
pub(crate) async fn stall(ms: Option<u64>) {
    match ms {
        Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
        None => std::future::pending().await,
    }
}
