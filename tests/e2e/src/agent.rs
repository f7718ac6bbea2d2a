//! The control agent under test, reading a pods file and feeding one Envoy.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::client::{Answer, Call};
use crate::patience::eventually;
use crate::process::Process;
use crate::programs::Programs;

/// A running agent. Dropping it kills it.
pub struct Agent {
    process: Process,
    admin: SocketAddr,
}

// === impl Agent ===

impl Agent {
    /// Starts an agent that pushes the pods of a file to the Envoy with this control address, with
    /// these arguments beside.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        pods: &Path,
        control: SocketAddr,
        log: &Path,
        arguments: &[String],
    ) -> Result<Self> {
        let admin = free_address()?;
        let mut command = Command::new(Programs::agent());
        command
            .arg("--pods-file")
            .arg(pods)
            .args(["--envoy", &format!("http://{control}")])
            .args(["--listen", &admin.to_string()])
            .args(arguments);
        let process = Process::start("pd-agent", &mut command, log)?;
        Ok(Self { process, admin })
    }

    /// Waits until the agent says that an Envoy acknowledged its pods.
    pub async fn ready(&mut self) {
        let admin = self.admin;
        eventually("the agent is ready", || async move {
            let answer = Call::get("/readyz").send(admin).await?;
            ensure!(answer.status == 200, "{}", answer.shown());
            Ok(())
        })
        .await;
        if let Err(error) = self.process.check_alive() {
            panic!("{error:#}");
        }
    }

    /// A page of the agent's admin listener.
    ///
    /// # Errors
    /// The agent does not answer.
    pub async fn page(&self, path: &str) -> Result<Answer> {
        Call::get(path).send(self.admin).await
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks it to end; the exit code, or none when it did not end in time.
    pub fn terminate(&mut self) -> Option<i32> {
        self.process.terminate(Duration::from_secs(10))
    }
}

/// An address nothing listens on at the moment.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}
