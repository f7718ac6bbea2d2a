//! A prefill and a decode engine, and the legs of a request.

use std::time::Duration;

use pd_engine_sim::{Engine, EngineConfig, EngineKind, Role, prompt_hash, start};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::wire::{Answer, CHAT, Wire, merge, until};

pub(crate) struct Pair {
    pub(crate) p: Engine,
    pub(crate) d: Engine,
}

/// An SGLang engine of this role, changed as the test needs.
pub(crate) async fn sglang(role: Role, change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let name = if role == Role::Prefill { "p" } else { "d" };
    let mut config = EngineConfig::named(name, role);
    config.engine = EngineKind::Sglang;
    change(&mut config);
    start(config).await.unwrap()
}

/// A free port: the bootstrap server's has to be known to the requests.
pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

impl Pair {
    pub(crate) async fn start(change: impl Fn(&mut EngineConfig)) -> (Self, u16) {
        let port = free_port();
        let p = sglang(Role::Prefill, |config| {
            config.side_channel_port = port;
            change(config);
        });
        let d = sglang(Role::Decode, &change);
        let pair = Self {
            p: p.await,
            d: d.await,
        };
        (pair, port)
    }

    /// Nothing is left at either engine.
    pub(crate) async fn idle(&self) {
        for engine in [&self.p, &self.d] {
            until(engine, |s| {
                let left = [s.running, s.waiting, s.rooms.rooms_open, s.kv.kv_held];
                left == [0; 4] && s.kv.kv_used_blocks == 0
            })
            .await;
        }
    }
}

/// A chat request with its bootstrap members.
pub(crate) fn leg(port: u16, room: u64, more: Value) -> Value {
    let mut body = json!({
        "model": "sim-model",
        "messages": [{"role": "user", "content": format!("words of room {room}")}],
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": port,
        "bootstrap_room": room,
        "rid": format!("rid-{room}"),
    });
    merge(&mut body, more);
    body
}

/// The hash of such a request's prompt.
pub(crate) fn hash(body: &Value) -> u64 {
    prompt_hash(body["messages"].to_string().as_bytes())
}

/// Sends a request and reads its answer meanwhile.
pub(crate) fn send(engine: &Engine, body: &Value) -> JoinHandle<Answer> {
    let (address, body) = (engine.address(), body.clone());
    tokio::spawn(async move {
        let mut wire = Wire::open(address).await;
        wire.post(CHAT, &body).await;
        wire.answer().await.unwrap()
    })
}

/// The answer of a request sent before.
pub(crate) async fn answer(sent: JoinHandle<Answer>) -> Answer {
    let within = tokio::time::timeout(Duration::from_secs(10), sent);
    within.await.expect("no answer").unwrap()
}
