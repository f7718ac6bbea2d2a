//! A plain HTTP/1.1 client that shows what was on the wire, and engines to talk to.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use pd_engine_sim::{Engine, EngineConfig, Identity, Role, State, start};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longer than anything here takes; reached only by a failing test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// An answer, as far as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
    /// How the connection ended when the answer is incomplete.
    pub(crate) broken: Option<io::ErrorKind>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The text of a chat answer or of the events of a stream.
    pub(crate) fn identity(&self) -> Identity {
        Identity::parse(&self.body).unwrap_or_else(|| panic!("no identity: {self:?}"))
    }

    /// The `data:` payloads of a stream.
    pub(crate) fn events(&self) -> Vec<&str> {
        self.body
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect()
    }
}

/// A connection and what was read from it.
pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Wire {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        Self {
            stream: TcpStream::connect(address).await.unwrap(),
            buffer: Vec::new(),
        }
    }

    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) {
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: sim\r\n");
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
        self.write(&text).await;
    }

    pub(crate) async fn write(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) {
        self.post_text(path, &body.to_string()).await;
    }

    pub(crate) async fn post_text(&mut self, path: &str, body: &str) {
        let headers = [("content-type", "application/json")];
        self.send("POST", path, &headers, body).await;
    }

    /// Reads until `needle` arrived.
    pub(crate) async fn read_until(&mut self, needle: &str) -> String {
        loop {
            let text = String::from_utf8_lossy(&self.buffer).into_owned();
            if text.contains(needle) {
                return text;
            }
            let more = self.fill().await;
            assert!(
                matches!(more, Ok(1..)),
                "{more:?} before {needle:?} in {text:?}"
            );
        }
    }

    /// Waits for the other side to end the connection; the error says how, `None` if orderly.
    pub(crate) async fn closed(&mut self) -> Option<io::ErrorKind> {
        loop {
            match self.fill().await {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(error.kind()),
            }
        }
    }

    async fn fill(&mut self) -> io::Result<usize> {
        let read = self.stream.read_buf(&mut self.buffer);
        timeout(PATIENCE, read)
            .await
            .expect("the engine sends nothing")
    }

    /// Reads one answer.
    pub(crate) async fn answer(&mut self) -> io::Result<Answer> {
        let head = loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                break self.buffer.drain(..at + 4).collect::<Vec<_>>();
            }
            if self.fill().await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        };
        let head = String::from_utf8(head).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        let headers: BTreeMap<String, String> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let mut answer = Answer {
            status: status.parse().unwrap(),
            body: String::new(),
            broken: None,
            headers,
        };
        let ended = match answer.headers.get("content-length") {
            Some(length) => self.sized(length.parse().unwrap(), &mut answer.body).await,
            None => self.chunked(&mut answer.body).await,
        };
        answer.broken = ended.err().map(|error| error.kind());
        Ok(answer)
    }

    async fn sized(&mut self, length: usize, body: &mut String) -> io::Result<()> {
        while self.buffer.len() < length {
            if self.fill().await? == 0 {
                body.push_str(&String::from_utf8_lossy(&self.buffer));
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let bytes: Vec<u8> = self.buffer.drain(..length).collect();
        body.push_str(&String::from_utf8(bytes).unwrap());
        Ok(())
    }

    async fn chunked(&mut self, body: &mut String) -> io::Result<()> {
        loop {
            let size = loop {
                if let Some(at) = find(&self.buffer, b"\r\n") {
                    let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                    let line = String::from_utf8(line).unwrap();
                    break usize::from_str_radix(line.trim_end(), 16).unwrap();
                }
                if self.fill().await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            };
            self.sized(size, body).await?;
            self.sized(2, &mut String::new()).await?;
            if size == 0 {
                return Ok(());
            }
        }
    }
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|w| w == needle)
}

/// Sends one request on a connection of its own.
pub(crate) async fn try_post(address: SocketAddr, path: &str, body: &Value) -> io::Result<Answer> {
    let mut wire = Wire::open(address).await;
    wire.post(path, body).await;
    wire.answer().await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    try_post(address, path, body).await.unwrap()
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Answer {
    let mut wire = Wire::open(address).await;
    wire.send("GET", path, &[], "").await;
    wire.answer().await.unwrap()
}

/// An engine with this name; the rest default, changed as the test needs.
pub(crate) async fn engine(name: &str, change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig::named(name, Role::Both);
    change(&mut config);
    start(config).await.unwrap()
}

pub(crate) fn merge(body: &mut Value, more: Value) {
    let Value::Object(more) = more else {
        panic!("not an object: {more}");
    };
    body.as_object_mut().unwrap().extend(more);
}

/// Waits until an engine's state is as said.
pub(crate) async fn until(engine: &Engine, what: impl Fn(&State) -> bool) -> State {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let state = engine.state();
        if what(&state) {
            return state;
        }
        assert!(tokio::time::Instant::now() < deadline, "never: {state:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until an engine refuses connections, or takes them again.
pub(crate) async fn until_refuses(engine: &Engine, refuses: bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while TcpStream::connect(engine.address()).await.is_err() != refuses {
        assert!(tokio::time::Instant::now() < deadline, "never: {refuses}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The object members of a JSON text in the order they are written.
pub(crate) fn members(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once('"') {
        let mut end = 0;
        let bytes = after.as_bytes();
        while bytes[end] != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        rest = &after[end + 1..];
        if rest.trim_start().starts_with(':') {
            names.push(after[..end].to_owned());
        }
    }
    names
}
