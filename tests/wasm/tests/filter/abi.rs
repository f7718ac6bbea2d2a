//! What the module asks of its host.

use pd_wasm_tests::Module;

/// Everything the filter imports. One more name here is one more thing that every supported proxy
/// has to offer.
const IMPORTS: &[&str] = &[
    "env.proxy_add_header_map_value",
    "env.proxy_call_foreign_function",
    "env.proxy_close_stream",
    "env.proxy_continue_stream",
    "env.proxy_define_metric",
    "env.proxy_dequeue_shared_queue",
    "env.proxy_done",
    "env.proxy_enqueue_shared_queue",
    "env.proxy_get_buffer_bytes",
    "env.proxy_get_current_time_nanoseconds",
    "env.proxy_get_header_map_pairs",
    "env.proxy_get_header_map_value",
    "env.proxy_get_property",
    "env.proxy_get_shared_data",
    "env.proxy_get_status",
    "env.proxy_grpc_call",
    "env.proxy_grpc_cancel",
    "env.proxy_grpc_close",
    "env.proxy_grpc_send",
    "env.proxy_grpc_stream",
    "env.proxy_http_call",
    "env.proxy_increment_metric",
    "env.proxy_log",
    "env.proxy_record_metric",
    "env.proxy_register_shared_queue",
    "env.proxy_remove_header_map_value",
    "env.proxy_replace_header_map_value",
    "env.proxy_resolve_shared_queue",
    "env.proxy_send_local_response",
    "env.proxy_set_buffer_bytes",
    "env.proxy_set_effective_context",
    "env.proxy_set_header_map_pairs",
    "env.proxy_set_property",
    "env.proxy_set_shared_data",
    "env.proxy_set_tick_period_milliseconds",
    "wasi_snapshot_preview1.clock_time_get",
    "wasi_snapshot_preview1.environ_get",
    "wasi_snapshot_preview1.environ_sizes_get",
    "wasi_snapshot_preview1.fd_write",
    "wasi_snapshot_preview1.proc_exit",
    "wasi_snapshot_preview1.random_get",
];

#[test]
fn the_imports_are_these_and_no_others() {
    assert_eq!(Module::filter().imports(), IMPORTS);
}

#[test]
fn the_exports_name_one_abi_and_the_callbacks_used() {
    let exports = Module::filter().exports();
    let abi: Vec<&String> = exports
        .iter()
        .filter(|name| name.starts_with("proxy_abi_version"))
        .collect();
    assert_eq!(abi, ["proxy_abi_version_0_2_1"]);
    for name in [
        "_initialize",
        "memory",
        "proxy_on_configure",
        "proxy_on_context_create",
        "proxy_on_delete",
        "proxy_on_done",
        "proxy_on_http_call_response",
        "proxy_on_log",
        "proxy_on_memory_allocate",
        "proxy_on_queue_ready",
        "proxy_on_request_body",
        "proxy_on_request_headers",
        "proxy_on_request_trailers",
        "proxy_on_response_body",
        "proxy_on_response_headers",
        "proxy_on_response_trailers",
        "proxy_on_tick",
        "proxy_on_vm_start",
    ] {
        assert!(exports.iter().any(|known| known == name), "{name}");
    }
    // A host that found it would allocate where what it gives is not freed.
    assert!(!exports.iter().any(|name| name == "malloc"));
}
