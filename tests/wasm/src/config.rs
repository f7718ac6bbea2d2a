//! How a gateway is set up, and how its start can fail.

use std::fmt;

use crate::host::shared::SharedStore;
use crate::host::{LogLevel, LogLine};
use crate::module::Module;

/// How a gateway is set up; the default is one worker with an empty configuration.
pub struct GatewayConfig {
    /// Workers, each with a VM of its own.
    pub vm_count: usize,
    /// Starts as Envoy does: a canary VM that is configured and dropped, then the workers, and one
    /// more VM on the main thread that ticks but gets no requests.
    pub main_thread: bool,
    /// Name of the shared space.
    pub vm_id: String,
    /// The store; another gateway's, when both are workers of one process.
    pub shared: SharedStore,
    /// Environment variables of every VM.
    pub env: Vec<(String, String)>,
    /// VM configuration, read in `on_vm_start`.
    pub vm_config: Vec<u8>,
    /// Configuration of the first plugin.
    pub plugin_config: Vec<u8>,
    /// Module to run; `None` is the filter under test.
    pub module: Option<Module>,
    /// Body callbacks come while headers are paused (`allow_on_headers_stop_iteration`).
    pub allow_on_headers_stop_iteration: bool,
    /// The host can replace the first bytes of a body (Envoy 1.40); older ones refuse it.
    pub first_byte_edit: bool,
    /// Clusters a call may name; `None` allows any.
    pub clusters: Option<Vec<String>>,
    /// Properties of every request, by dotted path (`xds.route_name`).
    pub properties: Vec<(String, Vec<u8>)>,
    /// Bytes of request body Envoy buffers for a paused stream before it answers 413.
    pub request_body_buffer_limit: usize,
    /// Request header that chooses the upstream.
    pub target_header: String,
    /// Level the host reports to guests; every line is captured whatever it says.
    pub log_level: LogLevel,
    /// Seed of the VMs' random numbers; each VM draws its own sequence.
    pub seed: u64,
}

/// Names a plugin of a gateway: one root context per VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PluginId(pub(crate) usize);

/// A VM or plugin that did not start.
#[derive(Debug)]
pub struct StartError {
    /// What failed.
    pub reason: String,
    /// What the guest logged meanwhile.
    pub logs: Vec<LogLine>,
}

// === impl GatewayConfig ===

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            vm_count: 1,
            main_thread: false,
            vm_id: "vm".into(),
            shared: SharedStore::default(),
            env: Vec::new(),
            vm_config: Vec::new(),
            plugin_config: Vec::new(),
            module: None,
            allow_on_headers_stop_iteration: true,
            first_byte_edit: true,
            clusters: None,
            properties: Vec::new(),
            request_body_buffer_limit: usize::MAX,
            target_header: "target-pod".into(),
            log_level: LogLevel::Debug,
            seed: 1,
        }
    }
}

// === impl StartError ===

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        self.logs
            .iter()
            .try_for_each(|line| write!(f, "\n  {:?} {}", line.level, line.text))
    }
}

impl std::error::Error for StartError {}
