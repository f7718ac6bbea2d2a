//! What a client got against what it must get.

use pd_e2e::Answer;
use pd_engine_sim::Identity;
use pd_failure_matrix::{Body, Cell, Client, Marker, Moment};

use super::client::{Got, Seen};

/// How long Envoy keeps an HTTP/1 connection open after it has cut a response: its
/// `delayed_close_timeout`.
const CLOSE_MS: u64 = 100;

/// What was seen in a word or two, and what is wrong with it.
pub(super) fn judge(cell: &Cell, seen: &Seen) -> (String, Vec<String>) {
    let (client, due) = (promised(cell), cell.expect.due);
    let mut wrong = Vec::new();
    let text = match &seen.got {
        Got::Left => "left".to_owned(),
        Got::Missed(why) => {
            wrong.push(why.clone());
            "missed".to_owned()
        }
        Got::Nothing(_) => "cut".to_owned(),
        Got::Answer(answer) if !answer.complete => "cut".to_owned(),
        Got::Answer(answer) => describe(answer),
    };
    if text != client.describe() {
        wrong.push(match &seen.got {
            Got::Answer(answer) => answer.shown(),
            Got::Nothing(error) => error.clone(),
            Got::Left | Got::Missed(_) => text.clone(),
        });
    }
    if let (Client::Cut, Got::Answer(answer)) = (client, &seen.got)
        && answer.status != 200
    {
        wrong.push(format!("a cut {}", answer.status));
    }
    if let Got::Answer(answer) = &seen.got {
        match client {
            Client::Healthy => wrong.extend(healthy(answer)),
            Client::Error { body, .. } => wrong.extend(error(answer, body)),
            Client::Cut | Client::Left => {}
        }
    }
    if client != Client::Left {
        let close = if client == Client::Cut { CLOSE_MS } else { 0 };
        let (from, to) = (due.from_ms, due.to_ms + close);
        if !(from..=to).contains(&seen.ms) {
            wrong.push(format!("after {} ms, not {from} to {to}", seen.ms));
        }
    }
    (text, wrong)
}

/// What a client of Envoy gets: where all of a cut answer was held back, Envoy itself gives one in
/// its place.
fn promised(cell: &Cell) -> Client {
    match (cell.expect.client, cell.moment) {
        (Client::Cut, Moment::Headers | Moment::Role) => Client::Error {
            status: 502,
            marker: Marker::Decode,
            body: Body::Gateway {
                code: "decode_failed",
                says: "",
            },
        },
        (client, _) => client,
    }
}

/// A complete answer in the words of [`Client::describe`].
fn describe(answer: &Answer) -> String {
    if answer.status < 400 {
        return answer.status.to_string();
    }
    let says = |marker: &Marker| {
        let header = marker.header();
        header.is_some_and(|name| answer.header(name) == "true")
    };
    let marker = match [Marker::Prefill, Marker::Decode].iter().position(says) {
        Some(0) => " prefill",
        Some(_) => " decode",
        None => "",
    };
    let error = &answer.json()["error"];
    let message = error["message"].as_str().unwrap_or("no OpenAI error");
    let whose = if message.contains("engine says no") {
        "engine's"
    } else {
        error["code"].as_str().unwrap_or(message)
    };
    format!("{}{marker} ({whose})", answer.status)
}

fn healthy(answer: &Answer) -> Vec<String> {
    let mut wrong = Vec::new();
    let identity = Identity::parse(&answer.generated());
    match identity {
        None => wrong.push(format!("no text of an engine: {}", answer.shown())),
        Some(of) if of.kv.is_some_and(|kv| kv != of.prompt) => {
            wrong.push("the KV of another prompt".to_owned());
        }
        Some(_) => {}
    }
    let streams = answer
        .header("content-type")
        .starts_with("text/event-stream");
    if streams && !answer.text().ends_with("data: [DONE]\n\n") {
        wrong.push(format!("the stream does not end: {}", answer.shown()));
    }
    wrong
}

fn error(answer: &Answer, body: Body) -> Vec<String> {
    let mut wrong = Vec::new();
    if !answer
        .header("content-type")
        .starts_with("application/json")
    {
        wrong.push(format!("no JSON: {}", answer.shown()));
    }
    if answer
        .header(pd_wire::names::HEADER_GATEWAY_REQUEST_ID)
        .is_empty()
    {
        wrong.push(format!("no request id: {}", answer.shown()));
    }
    let markers = [Marker::Prefill, Marker::Decode];
    let marked = markers.iter().filter_map(|marker| marker.header());
    if marked
        .filter(|name| answer.headers.contains_key(*name))
        .count()
        > 1
    {
        wrong.push("two legs are marked".to_owned());
    }
    if let Body::Gateway { says, .. } = body {
        let message = answer.json()["error"]["message"].to_string();
        if !message.contains(says) {
            wrong.push(format!("{message} does not say {says}"));
        }
    }
    wrong
}
