//! The Envoy under test, configured by the files that ship in `envoy/standalone`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pd_wire::control::{Ledgers, Status};
use pd_wire::names;

use crate::client::{Answer, Call};
use crate::patience::{eventually, within};
use crate::process::Process;

/// Everything a test may choose.
#[derive(Clone, Debug)]
pub struct EnvoyConfig {
    /// The Envoy binary.
    pub program: PathBuf,
    /// The filter.
    pub wasm: PathBuf,
    /// Plugin configuration, as text so that a test may send a broken one.
    pub plugin: String,
    /// Workers.
    pub concurrency: u32,
    /// More substitutions in the listeners file, by marker.
    pub listeners: BTreeMap<String, String>,
    /// Environment variables.
    pub environment: BTreeMap<String, String>,
}

/// A running Envoy. Dropping it kills it.
pub struct Envoy {
    process: Process,
    config: EnvoyConfig,
    folder: PathBuf,
    admin: SocketAddr,
    data: SocketAddr,
    control: SocketAddr,
    started: u32,
}

// === impl EnvoyConfig ===

impl EnvoyConfig {
    /// Two workers, no plugin settings, the shipped body limit.
    pub fn new(program: PathBuf, wasm: PathBuf) -> Self {
        Self {
            program,
            wasm,
            plugin: "{}".to_owned(),
            concurrency: 2,
            listeners: BTreeMap::new(),
            environment: BTreeMap::new(),
        }
        .body_limit(67_108_864)
    }

    /// Another Envoy.
    pub fn program(mut self, program: PathBuf) -> Self {
        self.program = program;
        self.body_limit(67_108_864)
    }

    /// Largest request body, in bytes, set where this version of Envoy looks for it.
    pub fn body_limit(mut self, bytes: u64) -> Self {
        self.listener("BODY_LIMIT", &bytes.to_string());
        if version(&self.program) < (1, 40) {
            self.listener("DATA_BUFFER_BYTES", &bytes.to_string());
        }
        self
    }

    /// Replaces the value marked `@NAME` in `listeners.yaml`.
    pub fn listener(&mut self, name: &str, value: &str) {
        self.listeners.insert(name.to_owned(), value.to_owned());
    }
}

// === impl Envoy ===

impl Envoy {
    /// Starts Envoy and waits until it is live and its listeners are up.
    ///
    /// # Errors
    /// It did not start; the message carries the end of its log.
    pub async fn start(config: EnvoyConfig, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let process = launch(&config, folder, any, any, any, 0)?;
        let mut envoy = Self {
            process,
            config,
            folder: folder.to_owned(),
            admin: any,
            data: any,
            control: any,
            started: 0,
        };
        envoy.wait_live().await?;
        Ok(envoy)
    }

    /// Where clients connect.
    pub fn data(&self) -> SocketAddr {
        self.data
    }

    /// Where the agent connects.
    pub fn control(&self) -> SocketAddr {
        self.control
    }

    /// Envoy's admin interface.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Everything Envoy and the filter have logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Ends Envoy at once and starts a new one on the same ports; shared data is empty then.
    ///
    /// # Errors
    /// As [`Envoy::start`].
    pub async fn restart(&mut self) -> Result<()> {
        self.stop();
        self.start_again().await
    }

    /// Ends Envoy at once.
    pub fn stop(&mut self) {
        self.process.kill();
    }

    /// Starts a stopped Envoy on its old ports.
    ///
    /// # Errors
    /// As [`Envoy::start`].
    pub async fn start_again(&mut self) -> Result<()> {
        self.started += 1;
        let ports = (self.admin, self.data, self.control);
        self.process = launch(
            &self.config,
            &self.folder,
            ports.0,
            ports.1,
            ports.2,
            self.started,
        )?;
        self.wait_live().await
    }

    /// Sends a signal by name (`STOP`, `CONT`, `TERM`).
    ///
    /// # Errors
    /// Envoy is gone.
    pub fn signal(&self, name: &str) -> Result<()> {
        self.process.signal(name)
    }

    /// Changes the configuration of the running Envoy's listeners and waits until Envoy took or
    /// refused it.
    ///
    /// # Errors
    /// Envoy refused it; the message is Envoy's.
    pub async fn reload(&mut self, change: impl FnOnce(&mut EnvoyConfig)) -> Result<()> {
        change(&mut self.config);
        let before = (
            self.counter("update_success").await?,
            self.counter("update_rejected").await?,
        );
        // The sockets stay: the first start asked for any port, later ones for the same.
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (data, control) = if self.started == 0 {
            (any, any)
        } else {
            (self.data, self.control)
        };
        write_listeners(&self.config, &self.folder, data, control)?;
        let refused = within(
            Duration::from_secs(20),
            "the listeners are updated",
            || async {
                if self.counter("update_rejected").await? > before.1 {
                    return Ok(true);
                }
                ensure!(
                    self.counter("update_success").await? > before.0,
                    "no update yet"
                );
                Ok(false)
            },
        )
        .await;
        if refused {
            let log = self.log();
            let line = log
                .lines()
                .rev()
                .find(|l| l.contains("gRPC config") || l.contains("rejected"));
            anyhow::bail!("refused: {}", line.unwrap_or("no reason logged"));
        }
        Ok(())
    }

    /// Counter `listener_manager.lds.NAME`.
    ///
    /// # Errors
    /// The admin interface does not answer.
    pub async fn counter(&self, name: &str) -> Result<u64> {
        self.stat(&format!("listener_manager.lds.{name}")).await
    }

    /// One counter or gauge by its full name; 0 when Envoy has none of that name.
    ///
    /// # Errors
    /// The admin interface does not answer.
    pub async fn stat(&self, name: &str) -> Result<u64> {
        let page = Call::get("/stats").send(self.admin).await?.text();
        let prefix = format!("{name}: ");
        let value = page.lines().find_map(|line| line.strip_prefix(&prefix));
        Ok(value.map_or(Ok(0), str::parse)?)
    }

    /// The Prometheus page.
    ///
    /// # Errors
    /// The admin interface does not answer.
    pub async fn metrics(&self) -> Result<String> {
        Ok(Call::get("/stats/prometheus")
            .send(self.admin)
            .await?
            .text())
    }

    /// What is charged.
    ///
    /// # Errors
    /// The control endpoint does not answer as it should.
    pub async fn ledgers(&self) -> Result<Ledgers> {
        self.control_page(names::PATH_LEDGERS).await
    }

    /// State of the filter.
    ///
    /// # Errors
    /// The control endpoint does not answer as it should.
    pub async fn status(&self) -> Result<Status> {
        self.control_page(names::PATH_STATUS).await
    }

    /// Pushes a message as an agent does.
    ///
    /// # Errors
    /// The control endpoint does not answer.
    pub async fn push(&self, path: &str, body: impl Into<bytes::Bytes>) -> Result<Answer> {
        Call::put(path, body).send(self.control).await
    }

    /// Waits until nothing is charged and no request lives, and says how long that took.
    pub async fn settled(&self, bound: Duration) -> Duration {
        let start = std::time::Instant::now();
        within(bound, "nothing is charged and no flow lives", || async {
            let ledgers = self.ledgers().await?;
            let status = self.status().await?;
            ensure!(ledgers.total == Default::default(), "{ledgers:?}");
            ensure!(status.live_flows == 0, "{:?}", status.vms);
            anyhow::Ok(())
        })
        .await;
        start.elapsed()
    }

    async fn control_page<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T> {
        let answer = Call::get(path).send(self.control).await?;
        ensure!(answer.status == 200, "{path}: {}", answer.shown());
        serde_json::from_slice(&answer.bytes()).with_context(|| answer.shown())
    }

    async fn wait_live(&mut self) -> Result<()> {
        let file = self.folder.join("admin-address");
        for _ in 0..400 {
            self.process.check_alive()?;
            if let Ok(text) = std::fs::read_to_string(&file)
                && let Ok(address) = text.trim().parse()
            {
                self.admin = address;
                if let Ok(answer) = Call::get("/ready").send(address).await
                    && answer.status == 200
                {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        let admin = self.admin;
        let listeners = eventually("both listeners are up", || async move {
            let page = Call::get("/listeners?format=json")
                .send(admin)
                .await?
                .json();
            let find = |name: &str| {
                let all = page["listener_statuses"].as_array().into_iter().flatten();
                let mut named = all.filter(|l| l["name"] == name);
                let address = named
                    .next()
                    .map(|l| l["local_address"]["socket_address"].clone());
                address.and_then(|a| a["port_value"].as_u64())
            };
            let pair = find("pd-data").zip(find("pd-control"));
            pair.with_context(|| page.to_string())
        })
        .await;
        let at = |port: u64| -> Result<SocketAddr> {
            Ok(SocketAddr::from(([127, 0, 0, 1], u16::try_from(port)?)))
        };
        self.data = at(listeners.0)?;
        self.control = at(listeners.1)?;
        Ok(())
    }
}

fn launch(
    config: &EnvoyConfig,
    folder: &Path,
    admin: SocketAddr,
    data: SocketAddr,
    control: SocketAddr,
    run: u32,
) -> Result<Process> {
    let listeners = write_listeners(config, folder, data, control)?;
    let bootstrap = folder.join("envoy.yaml");
    let values = [
        ("ADMIN_PORT", admin.port().to_string()),
        ("LISTENERS", listeners.display().to_string()),
    ];
    std::fs::write(&bootstrap, render("envoy.yaml", values)?)?;
    let address = folder.join("admin-address");
    // Of an earlier run, which would be read before the new one is written.
    let _ = std::fs::remove_file(&address);
    let mut command = Command::new(&config.program);
    command
        .arg("-c")
        .arg(&bootstrap)
        .args(["--concurrency", &config.concurrency.to_string()])
        .arg("--admin-address-path")
        .arg(&address)
        .args(["--disable-hot-restart", "--drain-time-s", "2"])
        .args(["--file-flush-interval-msec", "100"])
        .envs(&config.environment);
    Process::start(
        "envoy",
        &mut command,
        &folder.join(format!("envoy-{run}.log")),
    )
}

/// Major and minor version of an Envoy; zeros when it does not say.
fn version(program: &Path) -> (u32, u32) {
    let output = Command::new(program).arg("--version").output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    let text = text.unwrap_or_default();
    // "PROGRAM  version: COMMIT/1.40.0/Clean/RELEASE/BoringSSL"; the program may have slashes.
    let numbers = text.trim().rsplit('/').nth(3).unwrap_or_default();
    let mut numbers = numbers.split('.').map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or_default();
    (next(), next())
}

fn write_listeners(
    config: &EnvoyConfig,
    folder: &Path,
    data: SocketAddr,
    control: SocketAddr,
) -> Result<PathBuf> {
    let mut values = vec![
        ("DATA_PORT".to_owned(), data.port().to_string()),
        ("CONTROL_PORT".to_owned(), control.port().to_string()),
        ("WASM".to_owned(), config.wasm.display().to_string()),
        ("PLUGIN_CONFIG".to_owned(), config.plugin.clone()),
    ];
    values.extend(config.listeners.clone());
    let text = render("listeners.yaml", values)?;
    // Envoy looks when a file is moved into place.
    let (fresh, file) = (folder.join("listeners.new"), folder.join("listeners.yaml"));
    std::fs::write(&fresh, text)?;
    std::fs::rename(&fresh, &file)?;
    Ok(file)
}

fn render<N: AsRef<str>>(
    template: &str,
    values: impl IntoIterator<Item = (N, String)>,
) -> Result<String> {
    let root = crate::Programs::repository();
    let values = values
        .into_iter()
        .map(|(name, value)| format!("{}={value}", name.as_ref()));
    let output = Command::new(root.join("scripts/render-envoy.sh"))
        .arg(root.join("envoy/standalone").join(template))
        .args(values)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{error}");
    Ok(String::from_utf8(output.stdout)?)
}
