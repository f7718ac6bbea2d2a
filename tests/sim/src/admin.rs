//! The test's endpoint, `/sim/admin`, on the engine's port and on the admin port.
//!
//! | request | does |
//! |---|---|
//! | `GET /sim/admin/state` | the [`State`](crate::State) |
//! | `GET /sim/admin/log?last=N` | the last [`Record`](crate::Record)s, oldest first |
//! | `POST /sim/admin/faults` | arms a [`Fault`](crate::Fault) |
//! | `POST /sim/admin/clear` | disarms all faults and opens the port |
//! | `POST /sim/admin/delays` | a [`PaceChange`](crate::PaceChange); answers the pace |
//! | `POST /sim/admin/reset-counters` | zeroes counts, deaths and the log ring |
//! | `POST /sim/admin/restart` | a new process on the same port |
//! | `POST /sim/admin/kill` | the process is killed |

use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde_json::json as value;

use crate::config::PaceChange;
use crate::engine::Service;
use crate::fault::Fault;
use crate::reply::{Reply, json_of};

/// Answers an admin request; `path` is what follows `/sim/admin`.
pub(crate) fn handle(service: &Service, parts: &Parts, path: &str, body: &[u8]) -> Response<Reply> {
    let core = service.core();
    if parts.method == Method::GET {
        return match path {
            "" | "/" | "/state" => json_of(StatusCode::OK, &service.state()),
            "/log" => json_of(StatusCode::OK, &core.journal.last(last(parts))),
            _ => refuse(StatusCode::NOT_FOUND, "no such admin path"),
        };
    }
    match path {
        "/faults" => match serde_json::from_slice::<Fault>(body) {
            Ok(fault) => {
                if service.inject(fault) {
                    done()
                } else {
                    refuse(StatusCode::CONFLICT, "too many faults are armed")
                }
            }
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        },
        "/clear" => {
            core.faults.clear();
            core.resume();
            done()
        }
        "/delays" => match serde_json::from_slice::<PaceChange>(body) {
            Ok(change) => match service.set_pace(change) {
                Ok(()) => json_of(StatusCode::OK, &core.pace()),
                Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
            },
            Err(error) => refuse(StatusCode::BAD_REQUEST, &error.to_string()),
        },
        "/reset-counters" => {
            service.reset_counters();
            done()
        }
        "/restart" => {
            service.restart();
            done()
        }
        "/kill" => {
            core.die("killed");
            done()
        }
        _ => refuse(StatusCode::NOT_FOUND, "no such admin path"),
    }
}

fn last(parts: &Parts) -> usize {
    let query = parts.uri.query().unwrap_or_default();
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let last = pairs.find(|(name, _)| *name == "last");
    last.and_then(|(_, count)| count.parse().ok())
        .unwrap_or(usize::MAX)
}

fn done() -> Response<Reply> {
    json_of(StatusCode::OK, &value!({ "ok": true }))
}

fn refuse(status: StatusCode, why: &str) -> Response<Reply> {
    json_of(status, &value!({ "ok": false, "error": why }))
}
