//! The Envoy side of the router: callbacks in, effects out. Every decision is pd-core's.
//!
//! A request enters in [`route`], becomes an event of its flow (`pd_core::flow`), and the
//! effects of that are performed in [`effects`]. Calls of our own belong to a root context
//! ([`root`]), so that their answers arrive although the client may have left.

mod control;
mod effects;
mod host;
mod registry;
mod root;
mod route;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod vm;

#[global_allocator]
static ALLOCATOR: pd_alloc::FreeLists<std::alloc::System> =
    pd_alloc::FreeLists::new(std::alloc::System);

proxy_wasm::main! {{
    proxy_wasm::set_log_level(proxy_wasm::types::LogLevel::Info);
    proxy_wasm::set_root_context(|id| Box::new(root::Root::new(id)));
}}
