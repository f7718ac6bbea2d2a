//! Wiring of the tasks, and how they end: all together, on request or with an error.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::admin::{self, Admin};
use crate::args::Config;
use crate::metrics::Metrics;
use crate::pods::file;
use crate::push::Target;
use crate::push::client::ControlClient;
use crate::push::feed::Feed;
use crate::scrape::{self, Board};
use crate::tokenizers;

/// Time the tasks have to end once asked to.
const DRAIN: Duration = Duration::from_secs(5);

/// Tells a task to end. It also ends when the runtime is gone.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A stop and the sender that triggers it.
    pub fn channel() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Waits until the task has to end.
    pub async fn requested(&mut self) {
        // An error means that the sender is gone: that asks to end as well.
        let _gone = self.0.wait_for(|stop| *stop).await;
    }
}

/// An agent whose admin address is bound.
#[derive(Debug)]
pub struct Agent {
    config: Config,
    listener: TcpListener,
    address: SocketAddr,
}

impl Agent {
    /// Binds the admin address; port 0 takes a free one.
    pub async fn bind(config: Config) -> anyhow::Result<Self> {
        let wanted = config.listen;
        let listener = TcpListener::bind(wanted)
            .await
            .with_context(|| format!("cannot listen on {wanted}"))?;
        let address = listener.local_addr()?;
        Ok(Self {
            config,
            listener,
            address,
        })
    }

    /// Where `/metrics`, `/healthz` and `/readyz` are.
    pub fn admin_address(&self) -> SocketAddr {
        self.address
    }

    /// Runs until `shutdown` completes. A task that ends before is an error.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        let Self {
            config,
            listener,
            address,
        } = self;
        tracing::info!(agent = config.agent_id, listen = %address, "agent started");
        let (stop_all, stop) = Stop::channel();
        let (fleets, fleet) = watch::channel(None);
        let metrics = Arc::new(Metrics::default());
        let board = Arc::new(Board::default());
        let client = |url: &crate::push::EnvoyUrl| {
            ControlClient::new(url.clone(), config.credentials.clone(), config.push_timeout)
        };
        let targets: Vec<_> = config
            .envoys
            .iter()
            .map(|url| Arc::new(Target::new(client(url))))
            .collect();
        // A clock before 1970 starts at the lowest epoch; the first 409 corrects it.
        let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let epoch = epoch.map_or(1, |since| since.as_secs());

        let mut tasks = Tasks::new();
        let (tokenizers, current) = watch::channel(Arc::default());
        let following = tokenizers::follow(
            config.tokenizers.clone(),
            config.poll,
            tokenizers,
            stop.clone(),
        );
        tasks.spawn(async { ("tokenizers", following.await) });
        let follow = file::follow(
            config.pods_file.clone(),
            config.poll,
            fleets,
            metrics.clone(),
            stop.clone(),
        );
        tasks.spawn(async { ("pods", follow.await) });
        let schedule = config.schedule.clone();
        let scraping = scrape::run(
            schedule,
            fleet.clone(),
            board.clone(),
            metrics.clone(),
            stop.clone(),
        );
        tasks.spawn(async { ("scrape", scraping.await) });
        for target in &targets {
            let feed = Feed {
                target: target.clone(),
                agent: config.agent_id.clone(),
                epoch,
                replicas: config.replicas,
                schedule: config.schedule.clone(),
                board: board.clone(),
                tokenizers: current.clone(),
                metrics: metrics.clone(),
            };
            let feeding = feed.run(fleet.clone(), stop.clone());
            tasks.spawn(async { ("push", feeding.await) });
        }
        let admin = Admin::new(metrics, board, targets, fleet);
        let serving = admin::serve(listener, Arc::new(admin), stop.clone());
        tasks.spawn(async { ("admin", serving.await) });

        let ended = supervise(tasks, &stop_all, shutdown).await;
        tracing::info!("agent stopped");
        ended
    }
}

type Tasks = JoinSet<(&'static str, anyhow::Result<()>)>;

/// Waits for `shutdown`, or for a task that ends before, which is an error; then ends all.
async fn supervise(
    mut tasks: Tasks,
    stop_all: &watch::Sender<bool>,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let ended = tokio::select! {
        () = shutdown => None,
        ended = tasks.join_next() => ended,
    };
    let early = match ended {
        None => Ok(()),
        Some(Ok((name, Ok(())))) => Err(anyhow::anyhow!("task {name} ended by itself")),
        Some(Ok((name, Err(error)))) => Err(error.context(format!("task {name} failed"))),
        Some(Err(error)) => Err(anyhow::Error::new(error).context("a task died")),
    };
    stop_all.send_replace(true);
    let drained = tokio::time::timeout(DRAIN, async { while tasks.join_next().await.is_some() {} });
    if drained.await.is_err() {
        tracing::warn!("tasks still at work were cut off");
        tasks.shutdown().await;
    }
    early
}

/// Binds and runs an agent until `shutdown` completes.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
    Agent::bind(config).await?.run(shutdown).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    async fn stopped(mut stop: Stop) -> (&'static str, anyhow::Result<()>) {
        stop.requested().await;
        ("steady", Ok(()))
    }

    #[tokio::test]
    async fn a_task_that_ends_by_itself_ends_the_others_with_an_error() {
        let failed = || Err(anyhow::anyhow!("broken"));
        let ends = [
            (Ok(()), "task pods ended by itself"),
            (failed(), "task pods failed: broken"),
        ];
        for (end, expected) in ends {
            let (stop_all, stop) = Stop::channel();
            let mut tasks = Tasks::new();
            tasks.spawn(stopped(stop));
            tasks.spawn(async { ("pods", end) });
            let error = supervise(tasks, &stop_all, pending()).await.unwrap_err();
            assert_eq!(format!("{error:#}"), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn on_request_all_tasks_end_and_one_that_does_not_is_cut_off() {
        let (stop_all, stop) = Stop::channel();
        let mut tasks = Tasks::new();
        tasks.spawn(stopped(stop));
        tasks.spawn(async { ("stuck", pending().await) });
        let begun = tokio::time::Instant::now();
        supervise(tasks, &stop_all, async {}).await.unwrap();
        assert_eq!(begun.elapsed(), DRAIN);
    }
}
