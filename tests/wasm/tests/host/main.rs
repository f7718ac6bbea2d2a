//! The host's own tests, with the fixture filter in `fixture/`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod calls;
mod envoy;
mod requests;
mod responses;
mod sharing;
mod vms;

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use pd_wasm_tests::{Gateway, GatewayConfig, Module};

/// The fixture filter, built once per run into the target folder in use.
fn fixture() -> Module {
    static BUILT: OnceLock<Module> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
            let status = Command::new(env!("CARGO"))
                .args(["build", "-q", "-p", "pd-wasm-fixture", "--release"])
                .args(["--target", "wasm32-wasip1", "--target-dir"])
                .arg(target)
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .status()
                .unwrap();
            assert!(status.success(), "the fixture does not build");
            Module::load(&target.join("wasm32-wasip1/release/pd_wasm_fixture.wasm"))
        })
        .clone()
}

fn config(plugin: &str) -> GatewayConfig {
    GatewayConfig {
        module: Some(fixture()),
        plugin_config: plugin.into(),
        ..GatewayConfig::default()
    }
}

fn gateway(plugin: &str) -> Gateway {
    Gateway::new(config(plugin))
}

/// Whether any VM logged a line containing `text`.
fn logged(gateway: &Gateway, text: &str) -> bool {
    gateway.logs().iter().any(|line| line.text.contains(text))
}

#[test]
fn imports_and_exports_of_a_module_are_listed() {
    let module = fixture();
    let imports = module.imports();
    assert!(
        imports.contains(&"env.proxy_http_call".to_owned()),
        "{imports:#?}"
    );
    let known = ["env", "wasi_snapshot_preview1"];
    assert!(
        imports
            .iter()
            .all(|name| known.contains(&name.split('.').next().unwrap()))
    );
    let exports = module.exports();
    for name in [
        "_initialize",
        "memory",
        "proxy_abi_version_0_2_1",
        "proxy_on_memory_allocate",
    ] {
        assert!(exports.contains(&name.to_owned()), "{exports:#?}");
    }
}
