//! One VM: an instance of the module, its root contexts, and the entry into the guest.
//!
//! Every callback goes through [`Vm::enter`]: the effective context starts unset, a trap loses the
//! VM, and what the guest asked for (resume, reply, reset) happens after the callback returned, in
//! [`Vm::run_actions`], as `DeferAfterCallActions` does it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use wasmtime::{Instance, Store, TypedFunc, WasmParams, WasmResults};

use crate::host::calls::Reply;
use crate::host::clock::NANOS_PER_MS;
use crate::host::meters::Defined;
use crate::host::{Action, Fault, Host, Root, VmKey, World};
use crate::module::Module;

/// What a VM is started with.
pub(crate) struct VmSettings {
    pub(crate) vm_id: String,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) vm_config: Vec<u8>,
    pub(crate) seed: u64,
}

/// One VM of a gateway.
pub(crate) struct Vm {
    pub(crate) store: Store<Host>,
    pub(crate) exports: Exports,
    /// Current root of each plugin of the gateway.
    pub(crate) plugins: Vec<u32>,
    /// Roots of former plugin configurations.
    pub(crate) old_roots: Vec<u32>,
    pub(crate) frozen: bool,
    /// Trapped, killed or retired: nothing enters it any more.
    pub(crate) lost: bool,
    next_context: u32,
    instance: Instance,
}

/// Root, token, and the sizes of headers, body and trailers.
type CallResponse = (u32, u32, u32, u32, u32);

/// The guest's callbacks; a module may lack any of them.
pub(crate) struct Exports {
    context_create: Option<TypedFunc<(u32, u32), ()>>,
    vm_start: Option<TypedFunc<(u32, u32), u32>>,
    configure: Option<TypedFunc<(u32, u32), u32>>,
    tick: Option<TypedFunc<u32, ()>>,
    queue_ready: Option<TypedFunc<(u32, u32), ()>>,
    call_response: Option<TypedFunc<CallResponse, ()>>,
    pub(crate) request_headers: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) request_body: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) response_headers: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) response_body: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) log: Option<TypedFunc<u32, ()>>,
    pub(crate) done: Option<TypedFunc<u32, u32>>,
    pub(crate) delete: Option<TypedFunc<u32, ()>>,
}

/// A callback's return value, and whether a local reply overrides it with a pause.
pub(crate) struct Returned<R> {
    pub(crate) value: R,
    pub(crate) stopped: bool,
}

// === impl Vm ===

impl Vm {
    /// Instantiates the module and runs its constructors.
    pub(crate) fn new(
        module: &Module,
        world: Rc<RefCell<World>>,
        key: VmKey,
        settings: VmSettings,
    ) -> wasmtime::Result<Self> {
        let host = Host {
            world,
            vm: key,
            vm_id: settings.vm_id,
            env: settings.env,
            vm_config: settings.vm_config,
            configuring: None,
            roots: BTreeMap::new(),
            streams: BTreeMap::new(),
            orphans: BTreeMap::new(),
            current: 0,
            effective: 0,
            stop: false,
            actions: VecDeque::new(),
            acts: BTreeMap::new(),
            reply: None,
            metrics: Defined::default(),
            last_token: 0,
            random: settings.seed,
            memory: None,
            allocate: None,
        };
        let mut store = Store::new(module.engine(), host);
        let instance = module.instance().instantiate(&mut store)?;
        let memory = instance.get_memory(&mut store, "memory");
        let allocate = instance
            .get_typed_func(&mut store, "proxy_on_memory_allocate")
            .or_else(|_| instance.get_typed_func(&mut store, "malloc"))
            .ok();
        store.data_mut().memory = memory;
        store.data_mut().allocate = allocate;
        if let Ok(initialize) = instance.get_typed_func::<(), ()>(&mut store, "_initialize") {
            initialize.call(&mut store, ())?;
        } else if let Ok(start) = instance.get_typed_func::<(), ()>(&mut store, "_start") {
            start.call(&mut store, ())?;
        }
        let exports = Exports::of(&instance, &mut store);
        Ok(Self {
            store,
            exports,
            plugins: Vec::new(),
            old_roots: Vec::new(),
            frozen: false,
            lost: false,
            next_context: 1,
            instance,
        })
    }

    /// Whether callbacks may enter the VM now.
    pub(crate) fn runs(&self) -> bool {
        !self.lost && !self.frozen
    }

    /// Size of the linear memory in 64 KiB pages.
    pub(crate) fn memory_pages(&mut self) -> u64 {
        self.instance
            .get_memory(&mut self.store, "memory")
            .map_or(0, |memory| memory.size(&self.store))
    }

    pub(crate) fn host(&mut self) -> &mut Host {
        self.store.data_mut()
    }

    pub(crate) fn next_context(&mut self) -> u32 {
        let id = self.next_context;
        self.next_context += 1;
        id
    }

    /// Calls into the guest as `context`. `None` when the module lacks the callback, or traps.
    pub(crate) fn enter<P: WasmParams, R: WasmResults>(
        &mut self,
        context: u32,
        function: Option<TypedFunc<P, R>>,
        params: P,
    ) -> Option<Returned<R>> {
        let function = function?;
        if self.lost {
            return None;
        }
        let host = self.host();
        host.current = context;
        host.effective = 0;
        host.stop = false;
        host.acts.clear();
        let result = function.call(&mut self.store, params);
        let host = self.host();
        host.current = 0;
        for (stream, (replies, resumes)) in std::mem::take(&mut host.acts) {
            if replies > 0 && resumes > 0 {
                host.fault(Fault::ReplyAndResume { stream });
            } else if replies > 1 {
                host.fault(Fault::ReplyTwice { stream });
            }
        }
        let stopped = host.stop;
        match result {
            Ok(value) => Some(Returned { value, stopped }),
            Err(error) => {
                let fault = Fault::Trap {
                    vm: host.vm,
                    message: format!("{error:?}"),
                };
                host.fault(fault);
                self.lose();
                self.fail_stream(context);
                None
            }
        }
    }

    /// Does what the guest asked for, in the order it asked.
    pub(crate) fn run_actions(&mut self) {
        while let Some(action) = self.host().actions.pop_front() {
            match action {
                Action::Resume(stream, side) => self.resume(side, stream),
                Action::Reply(stream, reply) => self.local_reply(stream, reply),
                Action::Reset(stream) => self.reset(stream),
                Action::RootDone(root) => self.delete_root(root),
            }
        }
    }

    fn call<P: WasmParams, R: WasmResults>(
        &mut self,
        context: u32,
        function: Option<TypedFunc<P, R>>,
        params: P,
    ) -> Option<R> {
        let returned = self.enter(context, function, params);
        self.run_actions();
        returned.map(|returned| returned.value)
    }

    /// Creates a context in the guest: `root` 0 makes a root.
    pub(crate) fn create_context(&mut self, id: u32, root: u32) {
        self.call(id, self.exports.context_create.clone(), (id, root));
    }

    /// Starts and configures a root context; `None` when the guest refuses or traps.
    pub(crate) fn start_root(&mut self, plugin_config: &[u8]) -> Option<u32> {
        let id = self.next_context();
        let vm_config_len = self.host().vm_config.len() as u32;
        self.host().roots.insert(id, Root::default());
        self.create_context(id, 0);
        let started = self.call(id, self.exports.vm_start.clone(), (id, vm_config_len));
        if started == Some(0) || self.lost {
            return None;
        }
        self.host().configuring = Some(plugin_config.to_vec());
        let configured = self.call(
            id,
            self.exports.configure.clone(),
            (id, plugin_config.len() as u32),
        );
        self.host().configuring = None;
        (configured != Some(0) && !self.lost).then_some(id)
    }

    /// Ends a root: `on_done`, and `on_delete` at once or after `proxy_done`.
    pub(crate) fn drain_root(&mut self, root: u32) {
        if !self.host().roots.contains_key(&root) {
            return;
        }
        let done = self.call(root, self.exports.done.clone(), root);
        if done == Some(0) {
            if let Some(root) = self.host().roots.get_mut(&root) {
                root.pending_done = true;
            }
        } else {
            self.delete_root(root);
        }
    }

    fn delete_root(&mut self, root: u32) {
        self.call(root, self.exports.delete.clone(), root);
        let host = self.host();
        host.roots.remove(&root);
        host.world.borrow_mut().calls.abandon(host.vm, Some(root));
        self.old_roots.retain(|old| *old != root);
    }

    /// The earliest tick due in this VM: (monotonic nanoseconds, root).
    pub(crate) fn next_tick(&self) -> Option<(u64, u32)> {
        if !self.runs() {
            return None;
        }
        let roots = self.store.data().roots.iter();
        roots
            .filter_map(|(id, root)| Some((root.next_tick?, *id)))
            .min()
    }

    /// Ticks a root and arms its timer again, counted from now.
    pub(crate) fn tick(&mut self, root: u32) {
        self.call(root, self.exports.tick.clone(), root);
        let host = self.host();
        let now = host.world.borrow().clock.monotonic;
        if let Some(root) = host.roots.get_mut(&root)
            && root.next_tick.is_some_and(|due| due <= now)
        {
            let period = u64::from(root.period_ms) * NANOS_PER_MS;
            root.next_tick = (period > 0).then(|| now + period);
        }
    }

    /// Tells a root that its queue has an item; a root that is gone hears nothing.
    pub(crate) fn queue_ready(&mut self, root: u32, token: u32) {
        if self.host().roots.contains_key(&root) {
            self.call(root, self.exports.queue_ready.clone(), (root, token));
        }
    }

    /// Delivers the answer of a call to its root.
    pub(crate) fn call_response(&mut self, root: u32, token: u32, reply: Reply) {
        if !self.host().roots.contains_key(&root) {
            return;
        }
        let params = (
            root,
            token,
            reply.headers.len() as u32,
            reply.body.len() as u32,
            reply.trailers.len() as u32,
        );
        self.host().reply = Some((root, reply));
        self.call(root, self.exports.call_response.clone(), params);
        self.host().reply = None;
    }
}

// === impl Exports ===

impl Exports {
    fn of(instance: &Instance, store: &mut Store<Host>) -> Self {
        macro_rules! export {
            ($name:literal) => {
                instance.get_typed_func(&mut *store, $name).ok()
            };
        }
        Self {
            context_create: export!("proxy_on_context_create"),
            vm_start: export!("proxy_on_vm_start"),
            configure: export!("proxy_on_configure"),
            tick: export!("proxy_on_tick"),
            queue_ready: export!("proxy_on_queue_ready"),
            call_response: export!("proxy_on_http_call_response"),
            request_headers: export!("proxy_on_request_headers"),
            request_body: export!("proxy_on_request_body"),
            response_headers: export!("proxy_on_response_headers"),
            response_body: export!("proxy_on_response_body"),
            log: export!("proxy_on_log"),
            done: export!("proxy_on_done"),
            delete: export!("proxy_on_delete"),
        }
    }
}
