//! A child process with its log, signalled and stopped by its id.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// A running child. Dropping it kills it.
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a command with both outputs appended to `log`.
    ///
    /// # Errors
    /// The log cannot be opened or the program cannot be started.
    pub(crate) fn start(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything written so far.
    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// # Errors
    /// The process has ended; the message carries the end of its log.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            anyhow::bail!("{} ended ({status}):\n{}", self.name, tail.join("\n"));
        }
        Ok(())
    }

    /// Sends a signal by name (`TERM`, `STOP`, `CONT`).
    ///
    /// # Errors
    /// The process is gone.
    pub(crate) fn signal(&self, name: &str) -> Result<()> {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status()?;
        ensure!(status.success(), "cannot send {name} to {}", self.name);
        Ok(())
    }

    /// Kills the process at once.
    pub(crate) fn kill(&mut self) {
        // It may have ended already; waiting tells either way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends TERM and waits for the end; the exit code, or none when it had to be killed.
    pub(crate) fn terminate(&mut self, bound: Duration) -> Option<i32> {
        let end = Instant::now() + bound;
        if self.signal("TERM").is_ok() {
            while Instant::now() < end {
                if let Ok(Some(status)) = self.child.try_wait() {
                    return status.code();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        self.kill();
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
