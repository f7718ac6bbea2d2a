//! The host calls whose refusal the SDK turns into a panic, with their status instead.
//!
//! A refusal of these is ordinary here: an older host refuses to replace the first bytes of a
//! body, a stream may be gone when its deadline fires.

use super::headers::Headers;
use proxy_wasm::types::{BufferType, MapType};

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_set_buffer_bytes(
        buffer: u32,
        start: usize,
        size: usize,
        data: *const u8,
        data_size: usize,
    ) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_replace_header_map_value(
        map: u32,
        name: *const u8,
        name_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_property(
        path: *const u8,
        path_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_close_stream(stream: u32) -> u32;
}

/// `Status::Ok` of the ABI.
const OK: u32 = 0;

/// Replaces `size` bytes from `start` of a buffer; false when the host refuses.
pub fn set_buffer(buffer: BufferType, start: usize, size: usize, data: &[u8]) -> bool {
    // SAFETY: the pointer and the length describe `data`, which outlives the call; the host
    // copies out of it.
    unsafe { proxy_set_buffer_bytes(buffer as u32, start, size, data.as_ptr(), data.len()) == OK }
}

/// All headers of a message of the current stream; none when the host refuses.
pub fn header_pairs(map: MapType) -> Headers {
    let mut data = std::ptr::null_mut();
    let mut size = 0;
    // SAFETY: both places are valid for the one value the host writes to each. What it gives is a
    // block that it asked the SDK's allocator for: a vector of exactly that size and capacity.
    unsafe {
        let status = proxy_get_header_map_pairs(map as u32, &raw mut data, &raw mut size);
        if status != OK || data.is_null() {
            return Headers::default();
        }
        Headers::new(Vec::from_raw_parts(data, size, size))
    }
}

/// Sets a header of the current stream; false when the host refuses.
pub fn set_header(map: MapType, name: &str, value: &str) -> bool {
    // SAFETY: every pointer and length pair describes a slice that outlives the call.
    unsafe {
        proxy_replace_header_map_value(
            map as u32,
            name.as_ptr(),
            name.len(),
            value.as_ptr(),
            value.len(),
        ) == OK
    }
}

/// Sets a property of the current stream by a path of one name; false when the host refuses.
pub fn set_property(name: &str, value: &str) -> bool {
    // SAFETY: every pointer and length pair describes a slice that outlives the call.
    unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) == OK }
}

/// Answers the current stream; `details` goes into the access log. False when refused.
pub fn send_local_response(
    status: u16,
    details: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> bool {
    let headers = serialize(headers);
    // SAFETY: every pointer and length pair describes a slice that outlives the call.
    unsafe {
        proxy_send_local_response(
            u32::from(status),
            details.as_ptr(),
            details.len(),
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            -1,
        ) == OK
    }
}

/// Lets a paused request go on. False when refused.
pub fn continue_request() -> bool {
    // SAFETY: no pointers are passed.
    unsafe { proxy_continue_stream(0) == OK }
}

/// Lets the response of the current stream go on; false when it was not held.
pub fn continue_response() -> bool {
    // SAFETY: no pointers are passed.
    unsafe { proxy_continue_stream(1) == OK }
}

/// Cuts the response of the current stream. False when refused.
pub fn reset_response() -> bool {
    // SAFETY: no pointers are passed.
    unsafe { proxy_close_stream(1) == OK }
}

/// Header pairs in the ABI's form: count, lengths, then NUL-terminated texts.
fn serialize(headers: &[(&str, &str)]) -> Vec<u8> {
    let length = |text: &str| u32::try_from(text.len()).unwrap_or(0).to_le_bytes();
    let mut bytes = Vec::with_capacity(64);
    bytes.extend_from_slice(&u32::try_from(headers.len()).unwrap_or(0).to_le_bytes());
    for (name, value) in headers {
        bytes.extend_from_slice(&length(name));
        bytes.extend_from_slice(&length(value));
    }
    for (name, value) in headers {
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
    }
    bytes
}
