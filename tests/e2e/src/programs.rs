//! Where the programs under test are.
//!
//! `scripts/test.sh` builds them and says where in the environment. Run by hand, the files of the
//! target folder are taken, and Envoy comes from `scripts/envoy.sh`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs under test.
pub struct Programs;

impl Programs {
    /// Root of the repository.
    pub fn repository() -> PathBuf {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        here.ancestors().nth(2).unwrap_or(here).to_owned()
    }

    /// The filter. `PD_FILTER_WASM` names another file.
    pub fn filter() -> PathBuf {
        built(
            "PD_FILTER_WASM",
            "wasm32-wasip1/release/pd_filter.wasm",
            "scripts/build-wasm.sh",
        )
    }

    /// The filter that counts with tokenizers. `PD_TOKENIZERS_WASM` names another file.
    pub fn counting_filter() -> PathBuf {
        built(
            "PD_TOKENIZERS_WASM",
            "wasm32-wasip1/release/pd_filter_tokenizers.wasm",
            "scripts/build-wasm.sh --variant tokenizers",
        )
    }

    /// The filter built to trap when a request asks for it. `PD_TRAP_WASM` names another file.
    pub fn trapping_filter() -> PathBuf {
        built(
            "PD_TRAP_WASM",
            "e2e/pd_filter_trap.wasm",
            "scripts/build-wasm.sh --variant trap",
        )
    }

    /// The filter that writes the next record format. `PD_NEXT_WASM` names another file.
    pub fn next_filter() -> PathBuf {
        built(
            "PD_NEXT_WASM",
            "e2e/pd_filter_next.wasm",
            "scripts/build-wasm.sh --variant next",
        )
    }

    /// The agent. `PD_AGENT` names another file.
    pub fn agent() -> PathBuf {
        built("PD_AGENT", "debug/pd-agent", "cargo build -p pd-agent")
    }

    /// Envoy: `$ENVOY`, or what `scripts/envoy.sh` finds.
    pub fn envoy() -> PathBuf {
        resolved("ENVOY", &[])
    }

    /// The oldest Envoy supported: `$ENVOY_OLDEST`, or what `scripts/envoy.sh --oldest` finds.
    pub fn oldest_envoy() -> PathBuf {
        resolved("ENVOY_OLDEST", &["--oldest"])
    }
}

fn built(variable: &str, below_target: &str, how: &str) -> PathBuf {
    let file = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => {
            let target = std::env::var_os("CARGO_TARGET_DIR")
                .map_or_else(|| Programs::repository().join("target"), PathBuf::from);
            target.join(below_target)
        }
    };
    assert!(
        file.is_file(),
        "{} is missing: run {how}, or name the file in ${variable}",
        file.display()
    );
    file
}

fn resolved(variable: &str, arguments: &[&str]) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return PathBuf::from(path);
    }
    let script = Programs::repository().join("scripts/envoy.sh");
    let output = Command::new(&script)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    assert!(
        output.status.success(),
        "{} found no Envoy: {}",
        script.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}
