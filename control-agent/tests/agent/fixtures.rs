//! Pods by chained modifiers, a pods file, fake engines and Envoys, and a running agent.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use pd_agent::args::{Config, Log, LogFormat};
use pd_agent::push::Credentials;
use pd_agent::scrape::Schedule;
use pd_agent::{Agent, http};
use pd_wire::control::{Ledgers, PushReply, Status, TokenizerStatus};
use pd_wire::names;
use pd_wire::samples::{PodSample, Samples};
use pd_wire::tokenizer::{Message, digest};
use pd_wire::topology::{Stamp, Topology, WIRE_VERSION};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

/// How long anything may take; generous, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `probe` gives a value.
pub(crate) async fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "never happened: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One pod of a pods file.
#[derive(Clone)]
pub(crate) struct PodSpec(Value);

impl PodSpec {
    /// A ready pod of model `m`, as kubectl prints it.
    pub(crate) fn new(name: &str, address: SocketAddr) -> Self {
        Self(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "ns",
                "uid": format!("uid-{name}"),
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {
                    names::LABEL_MODEL: "m",
                    names::LABEL_PORT: address.port().to_string(),
                },
                "annotations": {},
            },
            "spec": {"containers": [{"name": "engine", "image": "engine"}]},
            "status": {
                "phase": "Running",
                "podIP": address.ip().to_string(),
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }))
    }

    fn with(mut self, pointer: &str, key: &str, value: Value) -> Self {
        let map = self
            .0
            .pointer_mut(pointer)
            .unwrap()
            .as_object_mut()
            .unwrap();
        map.insert(key.to_owned(), value);
        self
    }

    pub(crate) fn label(self, key: &str, value: &str) -> Self {
        self.with("/metadata/labels", key, json!(value))
    }

    pub(crate) fn annotation(self, key: &str, value: &str) -> Self {
        self.with("/metadata/annotations", key, json!(value))
    }

    pub(crate) fn uid(self, uid: &str) -> Self {
        self.with("/metadata", "uid", json!(uid))
    }

    pub(crate) fn role(self, role: &str) -> Self {
        self.label(names::LABEL_ROLE, role)
            .label(names::LABEL_ROLESET, "r1")
    }

    pub(crate) fn unready(self) -> Self {
        self.with(
            "/status",
            "conditions",
            json!([{"type": "Ready", "status": "False"}]),
        )
    }

    pub(crate) fn status(self, key: &str, value: Value) -> Self {
        self.with("/status", key, value)
    }
}

/// A pods file in a directory of its own.
pub(crate) struct PodsFile {
    directory: tempfile::TempDir,
}

impl PodsFile {
    pub(crate) fn new(pods: &[PodSpec]) -> Self {
        let file = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        file.replace(pods);
        file
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("pods.json")
    }

    /// Another list, by an atomic rename.
    pub(crate) fn replace(&self, pods: &[PodSpec]) {
        let items: Vec<_> = pods.iter().map(|pod| pod.0.clone()).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        self.replace_text(&list.to_string());
    }

    /// Another text, by an atomic rename.
    pub(crate) fn replace_text(&self, text: &str) {
        let next = self.directory.path().join("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(next, self.path()).unwrap();
    }

    /// Another text, written in place.
    pub(crate) fn overwrite(&self, text: &str) {
        std::fs::write(self.path(), text).unwrap();
    }
}

type Answer = Response<Full<Bytes>>;

/// An HTTP server on a loopback port.
struct Server {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    async fn start<H, F>(address: SocketAddr, handler: H) -> Self
    where
        H: Fn(Request<Bytes>) -> F + Clone + Send + 'static,
        F: Future<Output = Answer> + Send,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            // Dropped, and so cut off, together with this task.
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let handler = handler.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let handler = handler.clone();
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.unwrap().to_bytes();
                        Ok::<_, Infallible>(handler(Request::from_parts(head, body)).await)
                    }
                });
                connections.spawn(async move {
                    let http = hyper::server::conn::http1::Builder::new();
                    // A client that breaks off is no concern of the server.
                    let _closed = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, task }
    }

    async fn stop(&mut self) {
        // Stopped before: a handle gives its result only once.
        if !self.task.is_finished() {
            self.task.abort();
            let _cancelled = (&mut self.task).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn answer(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
}

fn free_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// What a fake engine does when it is scraped.
#[derive(Clone)]
pub(crate) enum Page {
    Text(String),
    Status(StatusCode),
    Stall,
}

/// An engine with a metrics page.
pub(crate) struct Engine {
    server: Server,
    page: Arc<Mutex<Page>>,
    scrapes: Arc<AtomicUsize>,
}

impl Engine {
    pub(crate) async fn start(page: &str) -> Self {
        Self::at("/metrics", page).await
    }

    /// An engine whose page is under this path, and nothing is under another.
    pub(crate) async fn at(path: &'static str, page: &str) -> Self {
        let page = Arc::new(Mutex::new(Page::Text(page.to_owned())));
        let scrapes = Arc::new(AtomicUsize::new(0));
        let (shown, counted) = (page.clone(), scrapes.clone());
        let server = Server::start(free_port(), move |request| {
            let shown = shown.clone();
            counted.fetch_add(1, Ordering::SeqCst);
            async move {
                assert_eq!(request.uri().path(), path);
                let page = shown.lock().unwrap().clone();
                match page {
                    Page::Text(text) => answer(StatusCode::OK, text),
                    Page::Status(status) => answer(status, ""),
                    Page::Stall => std::future::pending().await,
                }
            }
        });
        Self {
            server: server.await,
            page,
            scrapes,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address
    }

    pub(crate) fn show(&self, page: Page) {
        *self.page.lock().unwrap() = page;
    }

    pub(crate) fn scrapes(&self) -> usize {
        self.scrapes.load(Ordering::SeqCst)
    }
}

/// What a fake Envoy holds and got.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) topology: Option<Topology>,
    pub(crate) samples: Option<Samples>,
    /// Accepted topologies since the start.
    pub(crate) topologies: usize,
    /// Accepted samples since the start.
    pub(crate) sampled: usize,
    /// Answers given, by status.
    pub(crate) statuses: Vec<u16>,
    /// Answered instead of everything else.
    pub(crate) forced: Option<StatusCode>,
    /// Token asked for.
    pub(crate) token: Option<String>,
    pub(crate) ledgers: Ledgers,
    /// The status page.
    pub(crate) status: Status,
    /// Answers to pushed tokenizers, by status.
    pub(crate) tokenizer_statuses: Vec<u16>,
    /// The next pushed tokenizer is answered like this.
    pub(crate) refuse_tokenizer: Option<StatusCode>,
}

impl Held {
    fn reply(&self, sequence: Option<&Stamp>, error: &str) -> Vec<u8> {
        let topology = self.topology.as_ref().map(|topology| &topology.stamp);
        let reply = PushReply {
            error: error.to_owned(),
            epoch: topology.map_or(0, |stamp| stamp.epoch),
            sequence: sequence.map_or(0, |stamp| stamp.sequence),
            topology_sequence: topology.map_or(0, |stamp| stamp.sequence),
            agent: topology
                .map(|stamp| stamp.agent.clone())
                .unwrap_or_default(),
        };
        serde_json::to_vec(&reply).unwrap()
    }

    fn put_topology(&mut self, body: &[u8]) -> (StatusCode, Vec<u8>) {
        let topology = Topology::parse(body).unwrap();
        let held = self.topology.as_ref().map(|held| held.stamp.clone());
        if held
            .as_ref()
            .is_some_and(|held| !topology.stamp.replaces(held))
        {
            return (StatusCode::CONFLICT, self.reply(held.as_ref(), "old"));
        }
        if held.is_none_or(|held| held.epoch != topology.stamp.epoch) {
            self.samples = None;
        }
        let stamp = topology.stamp.clone();
        self.topology = Some(topology);
        self.topologies += 1;
        (StatusCode::OK, self.reply(Some(&stamp), ""))
    }

    fn put_samples(&mut self, body: &[u8]) -> (StatusCode, Vec<u8>) {
        let samples = Samples::decode(body).unwrap();
        let held = self.samples.as_ref().map(|held| held.stamp.clone());
        let fits = self.topology.as_ref().is_some_and(|topology| {
            topology.stamp.epoch == samples.stamp.epoch
                && topology.stamp.agent == samples.stamp.agent
                && topology.stamp.sequence == samples.topology_sequence
        });
        if !fits
            || held
                .as_ref()
                .is_some_and(|held| !samples.stamp.replaces(held))
        {
            return (StatusCode::CONFLICT, self.reply(held.as_ref(), "old"));
        }
        let stamp = samples.stamp.clone();
        self.samples = Some(samples);
        self.sampled += 1;
        (StatusCode::OK, self.reply(Some(&stamp), ""))
    }

    fn put_tokenizer(&mut self, body: &[u8]) -> (StatusCode, Vec<u8>) {
        if let Some(status) = self.refuse_tokenizer.take() {
            return (status, self.reply(None, "refused"));
        }
        let message = Message::parse(body).unwrap();
        let held = self
            .status
            .tokenizers
            .iter()
            .find(|it| it.model == message.model);
        if let Some(held) = held {
            let stamp = Stamp {
                version: WIRE_VERSION,
                agent: held.agent.clone(),
                epoch: held.epoch,
                sequence: held.sequence,
            };
            if !message.stamp.replaces(&stamp) {
                let reply = PushReply {
                    error: "old".to_owned(),
                    epoch: stamp.epoch,
                    sequence: stamp.sequence,
                    topology_sequence: 0,
                    agent: stamp.agent,
                };
                return (StatusCode::CONFLICT, serde_json::to_vec(&reply).unwrap());
            }
        }
        self.status
            .tokenizers
            .retain(|it| it.model != message.model);
        self.status.tokenizers.push(TokenizerStatus {
            model: message.model,
            digest: format!("{:016x}", digest(&message.file)),
            agent: message.stamp.agent.clone(),
            epoch: message.stamp.epoch,
            sequence: message.stamp.sequence,
            ..TokenizerStatus::default()
        });
        (StatusCode::OK, self.reply(Some(&message.stamp), ""))
    }

    fn handle(&mut self, request: &Request<Bytes>) -> (StatusCode, Vec<u8>) {
        if let Some(status) = self.forced {
            return (status, self.reply(None, "forced"));
        }
        let authorization = request.headers().get("authorization");
        let wanted = self.token.as_ref().map(|token| format!("Bearer {token}"));
        if wanted.is_some_and(|wanted| authorization.is_none_or(|given| *given != *wanted)) {
            return (StatusCode::UNAUTHORIZED, self.reply(None, "token"));
        }
        match (request.method(), request.uri().path()) {
            (&Method::PUT, names::PATH_TOPOLOGY) => self.put_topology(request.body()),
            (&Method::PUT, names::PATH_SAMPLES) => self.put_samples(request.body()),
            (&Method::PUT, names::PATH_TOKENIZERS) => self.put_tokenizer(request.body()),
            (&Method::GET, names::PATH_LEDGERS) => {
                (StatusCode::OK, serde_json::to_vec(&self.ledgers).unwrap())
            }
            (&Method::GET, names::PATH_STATUS) => {
                (StatusCode::OK, serde_json::to_vec(&self.status).unwrap())
            }
            _ => (StatusCode::NOT_FOUND, Vec::new()),
        }
    }

    /// Addresses of the topology's pods, in its order.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let models = self.topology.iter().flat_map(|topology| &topology.models);
        models
            .flat_map(|model| &model.pods)
            .map(|pod| pod.address.clone())
            .collect()
    }
}

/// A control listener with the filter's rules about epochs and sequences.
pub(crate) struct Envoy {
    server: Server,
    held: Arc<Mutex<Held>>,
}

impl Envoy {
    pub(crate) async fn start() -> Self {
        let held = Arc::new(Mutex::new(Held::default()));
        Self {
            server: Self::serve(free_port(), held.clone()).await,
            held,
        }
    }

    async fn serve(address: SocketAddr, held: Arc<Mutex<Held>>) -> Server {
        Server::start(address, move |request| {
            let (status, body) = {
                let mut held = held.lock().unwrap();
                let (status, body) = held.handle(&request);
                match (request.method(), request.uri().path()) {
                    (&Method::PUT, names::PATH_TOKENIZERS) => {
                        held.tokenizer_statuses.push(status.as_u16());
                    }
                    (&Method::PUT, _) => held.statuses.push(status.as_u16()),
                    _ => {}
                }
                (status, body)
            };
            async move { answer(status, body) }
        })
        .await
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// Goes away with everything it holds.
    pub(crate) async fn stop(&mut self) {
        self.server.stop().await;
        *self.held.lock().unwrap() = Held::default();
    }

    /// Comes back on the same port.
    pub(crate) async fn restart(&mut self) {
        self.stop().await;
        self.server = Self::serve(self.server.address, self.held.clone()).await;
    }

    /// Looks at, or changes, what is held.
    pub(crate) fn held<T>(&self, look: impl FnOnce(&mut Held) -> T) -> T {
        look(&mut self.held.lock().unwrap())
    }

    /// Waits until what is held gives a value.
    pub(crate) async fn until<T>(&self, what: &str, mut look: impl FnMut(&Held) -> Option<T>) -> T {
        eventually(what, || look(&self.held.lock().unwrap())).await
    }

    /// Waits for samples in which the pod of this ordinal passes.
    pub(crate) async fn until_sample(
        &self,
        what: &str,
        ordinal: u32,
        test: impl Fn(&PodSample) -> bool,
    ) -> PodSample {
        self.until(what, |held| {
            let samples = held.samples.as_ref()?;
            samples
                .pods
                .iter()
                .find(|pod| pod.ordinal == ordinal && test(pod))
                .copied()
        })
        .await
    }

    /// Puts another agent's empty topology in.
    pub(crate) fn feed_from(&self, agent: &str, epoch: u64) {
        let agent = agent.to_owned();
        let stamp = Stamp {
            version: WIRE_VERSION,
            agent,
            epoch,
            sequence: 1,
        };
        let topology = Topology {
            stamp,
            replicas: 1,
            models: Vec::new(),
        };
        self.held(|held| {
            held.topology = Some(topology);
            held.samples = None;
        });
    }
}

/// A configuration with short times.
pub(crate) fn config(pods: &PodsFile, envoys: &[&Envoy]) -> Config {
    Config {
        pods_file: pods.path(),
        poll: Duration::from_millis(20),
        tokenizers: Vec::new(),
        envoys: envoys
            .iter()
            .map(|envoy| envoy.url().parse().unwrap())
            .collect(),
        replicas: u32::try_from(envoys.len().max(1)).unwrap(),
        credentials: Credentials::None,
        listen: free_port(),
        agent_id: "agent-under-test".to_owned(),
        schedule: Schedule {
            refresh: Duration::from_millis(20),
            budget: 1000,
            timeout: Duration::from_millis(500),
            concurrency: 8,
        },
        push_timeout: Duration::from_secs(2),
        log: Log {
            format: LogFormat::Text,
            filter: "off".to_owned(),
        },
        warnings: Vec::new(),
    }
}

/// An agent that runs.
pub(crate) struct Running {
    admin: SocketAddr,
    client: http::Client,
    shutdown: oneshot::Sender<()>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Running {
    pub(crate) async fn start(config: Config) -> Self {
        let agent = Agent::bind(config).await.unwrap();
        let admin = agent.admin_address();
        let (shutdown, asked) = oneshot::channel::<()>();
        let task = tokio::spawn(agent.run(async move {
            let _dropped = asked.await;
        }));
        Self {
            admin,
            client: http::Client::new(Duration::from_secs(1)),
            shutdown,
            task,
        }
    }

    /// Status and text of one of the agent's own pages.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let request = Request::get(format!("http://{}{path}", self.admin));
        let request = request.body(Full::new(Bytes::new())).unwrap();
        let (status, body) = self
            .client
            .exchange(request, 1 << 20, PATIENCE)
            .await
            .unwrap();
        (status.as_u16(), String::from_utf8(body.to_vec()).unwrap())
    }

    /// Value of the one line of `/metrics` that starts with this.
    pub(crate) async fn metric(&self, line: &str) -> Option<f64> {
        let (_, page) = self.get("/metrics").await;
        let line = page
            .lines()
            .find_map(|found| found.strip_prefix(line))?
            .trim();
        Some(line.parse().unwrap())
    }

    /// Asks it to end and waits until it has.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.shutdown.send(()).unwrap();
        tokio::time::timeout(PATIENCE, self.task)
            .await
            .unwrap()
            .unwrap()
    }
}
