//! One Envoy, one agent and some engines, wired together for a test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pd_engine_sim::{Engine, Identity, On, Record};
use pd_wire::names;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::agent::Agent;
use crate::client::{Answer, Call};
use crate::envoy::{Envoy, EnvoyConfig};
use crate::patience::eventually;
use crate::pods::{MODEL, Pod, list};
use crate::programs::Programs;

/// Stands that may run at the same time. A test that loads the machine takes all of them.
const SEATS: u32 = 4;
static ROOM: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(SEATS as usize));

/// Everything a test started. Dropping it stops all of it.
pub struct Stand {
    /// The gateway.
    pub envoy: Envoy,
    /// The agent; none when the test pushes itself.
    pub agent: Option<Agent>,
    engines: BTreeMap<String, Engine>,
    pods: Vec<Pod>,
    folder: Option<TempDir>,
    agent_arguments: Vec<String>,
    agents_started: u32,
    _seat: SemaphorePermit<'static>,
}

/// What to start.
pub struct StandBuilder {
    name: String,
    pods: Vec<Pod>,
    envoy: EnvoyConfig,
    agent: bool,
    agent_arguments: Vec<String>,
    wait: bool,
    seats: u32,
}

// === impl StandBuilder ===

impl StandBuilder {
    /// These pods, an engine each.
    pub fn pods(mut self, pods: impl IntoIterator<Item = Pod>) -> Self {
        self.pods = pods.into_iter().collect();
        self
    }

    /// Plugin configuration.
    pub fn plugin(mut self, settings: &Value) -> Self {
        self.envoy.plugin = settings.to_string();
        self
    }

    /// Other changes of the Envoy.
    pub fn envoy(mut self, change: impl FnOnce(&mut EnvoyConfig)) -> Self {
        change(&mut self.envoy);
        self
    }

    /// Another Envoy.
    pub fn program(mut self, program: PathBuf) -> Self {
        self.envoy = self.envoy.program(program);
        self
    }

    /// Largest request body, in bytes.
    pub fn body_limit(mut self, bytes: u64) -> Self {
        self.envoy = self.envoy.body_limit(bytes);
        self
    }

    /// More arguments of the agent.
    pub fn agent_arguments(mut self, arguments: impl IntoIterator<Item = String>) -> Self {
        self.agent_arguments = arguments.into_iter().collect();
        self
    }

    /// No agent: the test pushes itself, or wants a filter without a snapshot.
    pub fn without_agent(mut self) -> Self {
        self.agent = false;
        self.wait = false;
        self
    }

    /// Does not wait until the gateway can serve.
    pub fn not_waiting(mut self) -> Self {
        self.wait = false;
        self
    }

    /// Runs while no other stand does: the test loads the machine or measures time.
    pub fn alone(mut self) -> Self {
        self.seats = SEATS;
        self
    }

    /// Starts everything and waits until the gateway can serve.
    pub async fn start(self) -> Stand {
        let name = self.name.clone();
        match self.try_start().await {
            Ok(stand) => stand,
            Err(error) => panic!("{name}: {error:#}"),
        }
    }

    /// Starts everything.
    ///
    /// # Errors
    /// Something did not start.
    pub async fn try_start(self) -> Result<Stand> {
        let seat = ROOM.acquire_many(self.seats).await?;
        let folder = tempfile::Builder::new()
            .prefix(&format!("pd-e2e-{}-", self.name))
            .tempdir()?;
        let mut engines = BTreeMap::new();
        for pod in &self.pods {
            let engine = pd_engine_sim::start(pod.engine.clone()).await?;
            engines.insert(pod.name.clone(), engine);
        }
        let envoy = match Envoy::start(self.envoy, folder.path()).await {
            Ok(envoy) => envoy,
            Err(error) => {
                let kept = folder.keep();
                return Err(error.context(format!("files are kept in {}", kept.display())));
            }
        };
        let mut stand = Stand {
            envoy,
            agent: None,
            engines,
            pods: self.pods,
            folder: Some(folder),
            agent_arguments: self.agent_arguments,
            agents_started: 0,
            _seat: seat,
        };
        stand.write_pods()?;
        if self.agent {
            stand.start_agent()?;
        }
        if self.wait {
            stand.ready().await;
        }
        Ok(stand)
    }
}

// === impl Stand ===

impl Stand {
    /// A stand for the test of this name, with no pods yet.
    pub fn builder(name: &str) -> StandBuilder {
        StandBuilder {
            name: name.to_owned(),
            pods: Vec::new(),
            envoy: EnvoyConfig::new(Programs::envoy(), Programs::filter()),
            agent: true,
            agent_arguments: Vec::new(),
            wait: true,
            seats: 1,
        }
    }

    /// A stand with this many rolesets of one prefill and one decode pod.
    pub async fn pairs(name: &str, count: usize) -> Self {
        Self::builder(name).pods(Pod::pairs(count)).start().await
    }

    /// Waits until the gateway says that it can serve, with the pods of the file.
    pub async fn ready(&mut self) {
        if let Some(agent) = &mut self.agent {
            agent.ready().await;
        }
        let (envoy, pods) = (&self.envoy, self.pods.len() as u64);
        eventually("the gateway is ready", || async move {
            let answer = Call::get("/readyz").send(envoy.data()).await?;
            ensure!(answer.status == 200, "{}", answer.shown());
            let held = envoy.status().await?.topology;
            ensure!(held.as_ref().is_some_and(|t| t.pods == pods), "{held:?}");
            Ok(())
        })
        .await;
    }

    /// Starts an agent in place of the one before.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_agent(&mut self) -> Result<()> {
        self.agent = None;
        let log = self
            .path()
            .join(format!("agent-{}.log", self.agents_started));
        self.agents_started += 1;
        let arguments = &self.agent_arguments;
        let agent = Agent::start(&self.pods_file(), self.envoy.control(), &log, arguments)?;
        self.agent = Some(agent);
        Ok(())
    }

    /// The engine of a pod.
    pub fn engine(&self, pod: &str) -> &Engine {
        match self.engines.get(pod) {
            Some(engine) => engine,
            None => panic!("no engine {pod}"),
        }
    }

    /// All engines by pod name.
    pub fn engines(&self) -> impl Iterator<Item = (&str, &Engine)> {
        self.engines
            .iter()
            .map(|(name, engine)| (name.as_str(), engine))
    }

    /// The pods file.
    pub fn pods_file(&self) -> PathBuf {
        self.path().join("pods.json")
    }

    /// Changes the pods of the file and waits until all workers of the gateway route by them;
    /// engines stay as they are.
    ///
    /// # Errors
    /// The file cannot be written, or the control endpoint does not answer.
    pub async fn change_pods(&mut self, change: impl FnOnce(&mut Vec<Pod>)) -> Result<()> {
        let held = self.topology_held().await?;
        change(&mut self.pods);
        self.write_pods()?;
        let envoy = &self.envoy;
        eventually("the change is pushed", || async {
            let now = self.topology_held().await?;
            ensure!(now != held, "{now:?}");
            Ok(())
        })
        .await;
        // One worker stored it, the others see it at a beat. The next one may have begun before.
        let beats = || async {
            let vms = envoy.status().await?.vms;
            anyhow::Ok(
                vms.into_iter()
                    .map(|vm| ((vm.slot, vm.generation), vm.beat)),
            )
        };
        let before: BTreeMap<_, _> = beats().await?.collect();
        eventually("all workers have seen it", || async {
            for (vm, beat) in beats().await? {
                let begun = before.get(&vm).map_or(0, |begun| begun + 2);
                ensure!(beat >= begun, "{vm:?} is at {beat}, not {begun}");
            }
            Ok(())
        })
        .await;
        Ok(())
    }

    /// Epoch and sequence of the topology that the gateway holds.
    async fn topology_held(&self) -> Result<Option<(u64, u64)>> {
        let held = self.envoy.status().await?.topology;
        Ok(held.map(|held| (held.epoch, held.sequence)))
    }

    /// Sends a request to the data listener and reads the whole answer; panics without one.
    pub async fn send(&self, call: Call) -> Answer {
        match call.send(self.envoy.data()).await {
            Ok(answer) => answer,
            Err(error) => panic!("no answer: {error:#}"),
        }
    }

    /// What arrived at an engine for generation, oldest first.
    pub fn seen(&self, pod: &str) -> Vec<Record> {
        let mut log = self.engine(pod).log();
        log.retain(|record| record.leg.is_some() && record.method == "POST");
        log
    }

    /// The prefill and decode records that belong to an answer, found by its `request-id`.
    pub fn legs(&self, answer: &Answer) -> Vec<Record> {
        let id = answer.header(names::HEADER_GATEWAY_REQUEST_ID).to_owned();
        assert!(!id.is_empty(), "no request-id: {}", answer.shown());
        let mut legs: Vec<Record> = self
            .engines
            .keys()
            .flat_map(|pod| self.seen(pod))
            .filter(|record| {
                let sent = record.headers.get(names::HEADER_REQUEST_ID);
                sent == Some(&id)
            })
            .collect();
        // Two engines may note theirs in the same millisecond.
        legs.sort_by_key(|record| (record.unix_ms, record.leg != Some(On::Prefill), record.seq));
        legs
    }

    /// Sum of one count over all engines.
    pub fn total(&self, count: impl Fn(&pd_engine_sim::State) -> u64) -> u64 {
        self.engines
            .values()
            .map(|engine| count(&engine.state()))
            .sum()
    }

    /// Waits until nothing is charged, no flow lives, and no engine holds KV, works, or has a leg
    /// waiting for the other.
    pub async fn settled(&self, bound: Duration) {
        let took = self.envoy.settled(bound).await;
        crate::within(bound, "no engine holds KV", || async {
            let held = self.total(|state| state.kv.kv_held);
            let running = self.total(|state| state.running);
            let waiting = self.total(|state| state.waiting);
            let rooms = self.total(|state| state.rooms.rooms_open);
            ensure!(
                held + running + waiting + rooms == 0,
                "{held} held, {running} running, {waiting} waiting, {rooms} rooms"
            );
            Ok(())
        })
        .await;
        println!("settled after {took:?}");
    }

    fn write_pods(&self) -> Result<()> {
        let manifests = self.pods.iter().map(|pod| {
            let engine = self
                .engines
                .get(&pod.name)
                .context("a pod without an engine")?;
            let uid = format!("uid-{}-{}", pod.name, engine.address().port());
            Ok(pod.manifest(engine, &uid))
        });
        let manifests = manifests.collect::<Result<Vec<Value>>>()?;
        let (fresh, file) = (self.path().join("pods.new"), self.pods_file());
        std::fs::write(&fresh, list(manifests).to_string())?;
        std::fs::rename(&fresh, &file)?;
        Ok(())
    }

    fn path(&self) -> &Path {
        self.folder.as_ref().map_or(Path::new("."), TempDir::path)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(folder) = self.folder.take()
        {
            let log = self.envoy.log();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            eprintln!("--- end of Envoy's log\n{}", tail.join("\n"));
            eprintln!("--- all logs are kept in {}", folder.keep().display());
        }
    }
}

/// A chat request with this prompt.
pub fn chat_body(prompt: &str, stream: bool) -> String {
    let message = json!([{ "role": "user", "content": prompt }]);
    format!(r#"{{"model":"{MODEL}","messages":{message},"stream":{stream},"max_tokens":8}}"#)
}

/// The identity in the text of an answer, after checking that the KV used is the prompt's own.
pub fn prompt_of(answer: &Answer) -> Identity {
    let text = answer.generated();
    let Some(identity) = Identity::parse(&text) else {
        panic!("no identity in {text:?} of {}", answer.shown())
    };
    if let Some(kv) = identity.kv {
        assert_eq!(
            kv,
            identity.prompt,
            "KV of another prompt: {}",
            answer.shown()
        );
    }
    identity
}
