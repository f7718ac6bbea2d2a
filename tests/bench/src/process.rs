//! CPU time and memory of a running process, from /proc.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Clock ticks a second in /proc/PID/stat: USER_HZ, 100 on every architecture Envoy is built for.
const TICKS_PER_SECOND: u64 = 100;

/// A process that is watched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    id: u32,
}

// === impl Process ===

impl Process {
    /// Fails when there is no such process.
    pub(crate) fn open(id: u32) -> Result<Self> {
        let process = Self { id };
        process.cpu()?;
        Ok(process)
    }

    /// User and system time of all its threads so far, in steps of 10 ms.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let text = self.read("stat")?;
        cpu_of(&text).with_context(|| format!("/proc/{}/stat: {text}", self.id))
    }

    /// Resident memory, in MB of 2^20 bytes.
    pub(crate) fn resident_mb(&self) -> Result<f64> {
        let text = self.read("status")?;
        resident_of(&text).with_context(|| format!("/proc/{}/status has no VmRSS", self.id))
    }

    fn read(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.id);
        fs::read_to_string(&path).with_context(|| format!("{path} (has the process ended?)"))
    }
}

/// Processes that ran or waited for a CPU, over the last minute.
pub(crate) fn load_average() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    let first = text.split_ascii_whitespace().next().unwrap_or_default();
    first
        .parse()
        .with_context(|| format!("/proc/loadavg: {text}"))
}

/// Fields 14 and 15 of proc(5) stat; the second, the name in parentheses, may contain anything.
fn cpu_of(stat: &str) -> Option<Duration> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let milliseconds = user
        .checked_add(system)?
        .checked_mul(1000 / TICKS_PER_SECOND)?;
    Some(Duration::from_millis(milliseconds))
}

fn resident_of(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_user_and_system_whatever_the_name_is() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 250 31 9 9 20 0 4 0 100 1 2";
        assert_eq!(cpu_of(stat), Some(Duration::from_millis(2810)));
        assert_eq!(cpu_of("7 (a) S 1"), None);
    }

    #[test]
    fn resident_memory_is_in_mebibytes() {
        let status = "Name:\tenvoy\nVmHWM:\t  4096 kB\nVmRSS:\t    2560 kB\n";
        assert_eq!(resident_of(status), Some(2.5));
        assert_eq!(resident_of("Name:\tenvoy\n"), None);
    }

    #[test]
    fn this_process_can_be_watched() {
        let own = Process::open(std::process::id()).unwrap();
        assert!(own.resident_mb().unwrap() > 0.0);
    }
}
