//! One proxy process: its VMs, the store they share, its clock, and the upstreams behind it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::config::{GatewayConfig, PluginId, StartError};
use crate::engines::{Engines, Script, Sent};
use crate::host::calls::Calls;
use crate::host::clock::Clock;
use crate::host::meters::Meters;
use crate::host::shared::SharedQueues;
use crate::host::stream::Seen;
use crate::host::{VmKey, World};
use crate::module::Module;
use crate::timeline::Timeline;
use crate::vm::{Vm, VmSettings};

/// One proxy process.
pub struct Gateway {
    pub(crate) config: GatewayConfig,
    pub(crate) module: Module,
    pub(crate) world: Rc<RefCell<World>>,
    /// Every VM ever started, by key.
    pub(crate) vms: Vec<Vm>,
    /// VM of each worker.
    pub(crate) workers: Vec<VmKey>,
    pub(crate) main: Option<VmKey>,
    pub(crate) plugins: Vec<Vec<u8>>,
    pub(crate) flights: Vec<FlightState>,
    pub(crate) engines: Engines,
    pub(crate) timeline: Timeline,
}

pub(crate) struct FlightState {
    pub(crate) vm: VmKey,
    pub(crate) stream: u32,
    pub(crate) seen: Rc<RefCell<Seen>>,
    pub(crate) first_call: usize,
}

// === impl Gateway ===

impl Gateway {
    /// Starts a gateway.
    ///
    /// # Panics
    /// When a VM does not start; the message holds the guest's log.
    pub fn new(config: GatewayConfig) -> Self {
        Self::try_new(config).unwrap_or_else(|error| panic!("the gateway does not start: {error}"))
    }

    /// Starts a gateway.
    ///
    /// # Errors
    /// When the guest refuses its configuration, or traps.
    pub fn try_new(config: GatewayConfig) -> Result<Self, StartError> {
        let world = World {
            clock: Clock::default(),
            shared: config.shared.clone(),
            queues: SharedQueues::default(),
            meters: Meters::default(),
            calls: Calls::default(),
            logs: Vec::new(),
            faults: Vec::new(),
            forwarded: VecDeque::new(),
            properties: config
                .properties
                .iter()
                .cloned()
                .collect::<BTreeMap<_, _>>(),
            clusters: config.clusters.clone(),
            stop_iteration: config.allow_on_headers_stop_iteration,
            first_byte_edit: config.first_byte_edit,
            request_body_buffer_limit: config.request_body_buffer_limit,
            log_level: config.log_level,
        };
        let mut gateway = Self {
            module: config.module.clone().unwrap_or_else(Module::filter),
            world: Rc::new(RefCell::new(world)),
            vms: Vec::new(),
            workers: Vec::new(),
            main: None,
            plugins: vec![config.plugin_config.clone()],
            flights: Vec::new(),
            engines: Engines::default(),
            timeline: Timeline::default(),
            config,
        };
        gateway
            .start()
            .inspect_err(|_| gateway.world.borrow_mut().faults.clear())?;
        Ok(gateway)
    }

    fn start(&mut self) -> Result<(), StartError> {
        if self.config.main_thread {
            let canary = self.start_vm()?;
            self.drop_vm(canary);
            self.main = Some(self.start_vm()?);
        }
        for _ in 0..self.config.vm_count {
            let vm = self.start_vm()?;
            self.workers.push(vm);
        }
        self.pump();
        Ok(())
    }

    /// Starts a VM with a root for every plugin.
    fn start_vm(&mut self) -> Result<VmKey, StartError> {
        let key = self.vms.len();
        let settings = VmSettings {
            vm_id: self.config.vm_id.clone(),
            env: self.config.env.clone(),
            vm_config: self.config.vm_config.clone(),
            seed: self
                .config
                .seed
                .wrapping_mul(0x1000)
                .wrapping_add(key as u64),
        };
        let vm = Vm::new(&self.module, Rc::clone(&self.world), key, settings)
            .map_err(|error| self.start_error(format!("VM {key} traps at start: {error:?}")))?;
        self.vms.push(vm);
        for plugin in self.plugins.clone() {
            match self.vms[key].start_root(&plugin) {
                Some(root) => self.vms[key].plugins.push(root),
                None => {
                    self.drop_vm(key);
                    return Err(self.start_error(format!("VM {key} refuses its configuration")));
                }
            }
        }
        Ok(key)
    }

    fn start_error(&self, reason: String) -> StartError {
        StartError {
            reason,
            logs: self.logs(),
        }
    }

    /// The VM of a worker disappears at once, as after a trap: no callback runs.
    fn drop_vm(&mut self, vm: VmKey) {
        if !self.vms[vm].lost {
            self.vms[vm].lose();
        }
    }

    /// Kills the VM of a worker: every context vanishes without a callback. A stream ends (503
    /// before response headers, a cut after) when its next event comes; a paused one hangs until
    /// its client leaves. Requests get 503 until [`Gateway::reload_vm`].
    pub fn kill_vm(&mut self, worker: usize) {
        self.drop_vm(self.workers[worker]);
    }

    /// Starts a fresh VM for a worker, killing the one it has.
    ///
    /// # Errors
    /// When the guest refuses its configuration, or traps.
    pub fn reload_vm(&mut self, worker: usize) -> Result<(), StartError> {
        self.kill_vm(worker);
        self.workers[worker] = self.start_vm()?;
        self.pump();
        Ok(())
    }

    /// Replaces the module on every worker: new VMs on the same store take the new requests, the
    /// old ones live on until [`Gateway::drain_old_vms`].
    ///
    /// # Errors
    /// When the new module refuses the configuration, or traps; the old VMs stay in place.
    pub fn upgrade(&mut self, module: Module) -> Result<(), StartError> {
        let old = std::mem::replace(&mut self.module, module);
        let fresh: Result<Vec<_>, _> = (0..self.workers.len()).map(|_| self.start_vm()).collect();
        match fresh {
            Ok(fresh) => self.workers = fresh,
            Err(error) => {
                self.module = old;
                return Err(error);
            }
        }
        if self.main.is_some() {
            self.main = Some(self.start_vm()?);
        }
        self.pump();
        Ok(())
    }

    /// Ends the former VMs that carry no stream any more; returns how many still live.
    pub fn drain_old_vms(&mut self) -> usize {
        let mut left = 0;
        for key in 0..self.vms.len() {
            let vm = &mut self.vms[key];
            if vm.lost || self.workers.contains(&key) || self.main == Some(key) {
                continue;
            }
            if !vm.host().streams.is_empty() {
                left += 1;
                continue;
            }
            for root in vm.host().roots.keys().copied().collect::<Vec<_>>() {
                vm.drain_root(root);
            }
            if vm.host().roots.is_empty() {
                self.drop_vm(key);
            } else {
                left += 1;
            }
        }
        self.pump();
        left
    }

    /// Adds a plugin: one more root context in every VM.
    ///
    /// # Errors
    /// When the guest refuses the configuration, or traps.
    pub fn add_plugin(&mut self, plugin_config: &[u8]) -> Result<PluginId, StartError> {
        let id = PluginId(self.plugins.len());
        self.start_roots(plugin_config, |vm, root| vm.plugins.push(root))?;
        self.plugins.push(plugin_config.to_vec());
        Ok(id)
    }

    /// Changes a plugin's configuration: a new root in the same VMs takes the new requests, the
    /// old one lives on until [`Gateway::drain_old_roots`].
    ///
    /// # Errors
    /// When the guest refuses the configuration; the old root stays in place.
    pub fn reconfigure(&mut self, plugin: PluginId, config: &[u8]) -> Result<(), StartError> {
        self.start_roots(config, |vm, root| {
            let old = std::mem::replace(&mut vm.plugins[plugin.0], root);
            vm.old_roots.push(old);
        })?;
        self.plugins[plugin.0] = config.to_vec();
        self.pump();
        Ok(())
    }

    fn start_roots(
        &mut self,
        config: &[u8],
        mut place: impl FnMut(&mut Vm, u32),
    ) -> Result<(), StartError> {
        let mut started = Vec::new();
        for key in self
            .workers
            .iter()
            .copied()
            .chain(self.main)
            .collect::<Vec<_>>()
        {
            if self.vms[key].lost {
                continue;
            }
            let before = self.vms[key].host().roots.len();
            if let Some(root) = self.vms[key].start_root(config) {
                started.push((key, root));
                continue;
            }
            // The refused root was created all the same; so were those before it.
            let newest = self.vms[key].host().roots.keys().copied().nth(before);
            started.extend(newest.map(|root| (key, root)));
            for (key, root) in started {
                self.vms[key].drain_root(root);
            }
            return Err(self.start_error(format!("VM {key} refuses the plugin configuration")));
        }
        for (key, root) in started {
            place(&mut self.vms[key], root);
        }
        Ok(())
    }

    /// Ends the old roots that carry no stream any more; returns how many still live.
    pub fn drain_old_roots(&mut self) -> usize {
        let mut left = 0;
        for vm in self.vms.iter_mut().filter(|vm| !vm.lost) {
            for root in vm.old_roots.clone() {
                if !vm.host().streams.values().any(|stream| stream.root == root) {
                    vm.drain_root(root);
                }
            }
            left += vm.old_roots.len();
        }
        self.pump();
        left
    }

    /// Stops a worker's VM: no tick, no reply, no queue notice reaches it.
    pub fn freeze_vm(&mut self, worker: usize) {
        self.vms[self.workers[worker]].frozen = true;
    }

    /// Lets a worker's VM run again; what it missed arrives at the next pump or advance.
    pub fn unfreeze_vm(&mut self, worker: usize) {
        self.vms[self.workers[worker]].frozen = false;
    }

    /// Stops (or restarts) the whole process while time goes on.
    pub fn freeze_all(&mut self, frozen: bool) {
        self.vms.iter_mut().for_each(|vm| vm.frozen = frozen);
    }

    /// Scripts the upstream at `address`, the value of the target header.
    pub fn engine(&mut self, address: &str, script: impl FnMut(&Sent) -> Script + 'static) {
        self.engines.insert(address, Box::new(script));
    }

    /// Scripts every upstream that has no script of its own.
    pub fn other_engines(&mut self, script: impl FnMut(&Sent) -> Script + 'static) {
        self.engines.fall_back(Box::new(script));
    }
}

impl Drop for Gateway {
    /// A fault nobody asked for fails the test.
    fn drop(&mut self) {
        let faults = self.take_faults();
        if !std::thread::panicking() {
            assert!(faults.is_empty(), "faults of the guest: {faults:#?}");
        }
    }
}
