//! Loading of wasm modules: compiled once per process and path, shared by every gateway.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use wasmtime::{Config, Engine, InstancePre, Linker, OptLevel};

use crate::host::{Host, abi, wasi};

/// Names the module under test; overrides the default path.
pub(crate) const FILTER_WASM: &str = "FILTER_WASM";

/// Marks a module of the ABI this host speaks.
const ABI_VERSION: &str = "proxy_abi_version_0_2_1";

/// A compiled module with its imports resolved, ready to be instantiated many times.
#[derive(Clone)]
pub struct Module {
    engine: Engine,
    module: wasmtime::Module,
    instance: Arc<InstancePre<Host>>,
}

/// Where the filter under test is expected: `$FILTER_WASM`, or the release build in the target
/// folder (`$CARGO_TARGET_DIR`, else `target` of the workspace).
pub fn filter_path() -> PathBuf {
    if let Some(path) = std::env::var_os(FILTER_WASM) {
        return path.into();
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"),
        PathBuf::from,
    );
    target.join("wasm32-wasip1/release/pd_filter.wasm")
}

// === impl Module ===

impl Module {
    /// Loads the filter under test from [`filter_path`].
    ///
    /// # Panics
    /// When the file is missing or does not compile; the message says how to build it.
    pub fn filter() -> Self {
        Self::load(&filter_path())
    }

    /// Loads the module at `path`, or returns the one already compiled.
    ///
    /// # Panics
    /// When the file is missing, is no valid module, or imports what Envoy does not offer.
    pub fn load(path: &Path) -> Self {
        static LOADED: Mutex<BTreeMap<PathBuf, Module>> = Mutex::new(BTreeMap::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = loaded.get(path) {
            return module.clone();
        }
        assert!(
            path.is_file(),
            "no wasm module at {}: build it with scripts/build-wasm.sh, or set {FILTER_WASM}",
            path.display()
        );
        let module = Self::compile(path)
            .unwrap_or_else(|error| panic!("cannot load {}: {error:?}", path.display()));
        assert!(
            module.exports().iter().any(|name| name == ABI_VERSION),
            "{} does not export {ABI_VERSION}: Envoy would refuse it",
            path.display()
        );
        loaded.insert(path.to_owned(), module.clone());
        module
    }

    /// Every import as `module.name`, sorted.
    pub fn imports(&self) -> Vec<String> {
        let mut names: Vec<_> = self
            .module
            .imports()
            .map(|i| format!("{}.{}", i.module(), i.name()))
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Every exported name, sorted.
    pub fn exports(&self) -> Vec<String> {
        let mut names: Vec<_> = self.module.exports().map(|e| e.name().to_owned()).collect();
        names.sort();
        names
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn instance(&self) -> &InstancePre<Host> {
        &self.instance
    }

    fn compile(path: &Path) -> wasmtime::Result<Self> {
        static ENGINE: OnceLock<Engine> = OnceLock::new();
        let engine = ENGINE.get_or_init(|| {
            let mut config = Config::new();
            // Load time is paid by every test binary, run time is next to nothing.
            config.cranelift_opt_level(OptLevel::None);
            Engine::new(&config).expect("the engine's configuration is fixed")
        });
        let module = wasmtime::Module::from_file(engine, path)?;
        let mut linker = Linker::new(engine);
        abi::link(&mut linker)?;
        wasi::link(&mut linker)?;
        let instance = Arc::new(linker.instantiate_pre(&module)?);
        Ok(Self {
            engine: engine.clone(),
            module,
            instance,
        })
    }
}
