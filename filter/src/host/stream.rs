//! Headers, body and properties of the stream in effect.

use super::headers::Headers;
use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, MapType};

/// All request headers.
pub fn request_headers() -> Headers {
    super::raw::header_pairs(MapType::HttpRequestHeaders)
}

/// Sets a request header.
pub fn set_request_header(name: &str, value: &str) {
    set(MapType::HttpRequestHeaders, name, value);
}

/// Removes a request header.
pub fn remove_request_header(name: &str) {
    if let Err(status) = hostcalls::set_map_value(MapType::HttpRequestHeaders, name, None) {
        log::warn!("header {name} was refused: {status:?}");
    }
}

/// Sets a response header. The host writes values as they are, and names of pods come from
/// outside: a line end in one must not begin another header.
pub fn set_response_header(name: &str, value: &str) {
    let map = MapType::HttpResponseHeaders;
    if value.bytes().any(|byte| byte.is_ascii_control()) {
        set(
            map,
            name,
            &value.replace(|c: char| c.is_ascii_control(), "_"),
        );
    } else {
        set(map, name, value);
    }
}

fn set(map: MapType, name: &str, value: &str) {
    if !super::raw::set_header(map, name, value) {
        log::warn!("header {name} was refused by the host");
    }
}

/// All response headers.
pub fn response_headers() -> Headers {
    super::raw::header_pairs(MapType::HttpResponseHeaders)
}

/// Status of the response.
pub fn response_status() -> Option<u16> {
    status(MapType::HttpResponseHeaders)
}

/// Status of the answer to a call; `None` when there is none.
pub fn call_status() -> Option<u16> {
    status(MapType::HttpCallResponseHeaders)
}

fn status(map: MapType) -> Option<u16> {
    text(hostcalls::get_map_value_bytes(map, ":status").ok()??)?
        .parse()
        .ok()
}

/// True when the answer to a call came from upstream: the proxy then says how long it took.
pub fn call_reached_upstream() -> bool {
    let map = MapType::HttpCallResponseHeaders;
    let name = "x-envoy-upstream-service-time";
    matches!(hostcalls::get_map_value_bytes(map, name), Ok(Some(_)))
}

/// `size` bytes of a buffer from `start`; empty when there are none.
pub fn read(buffer: BufferType, start: usize, size: usize) -> Vec<u8> {
    if size == 0 {
        return Vec::new();
    }
    hostcalls::get_buffer(buffer, start, size)
        .ok()
        .flatten()
        .unwrap_or_default()
}

/// A textual property of the stream.
pub fn property(path: &[&str]) -> Option<String> {
    text(hostcalls::get_property(path.to_vec()).ok()??)
}

/// A property that is a number (the host gives 64 bits, little endian).
pub fn number(path: &[&str]) -> Option<u64> {
    let bytes = hostcalls::get_property(path.to_vec()).ok()??;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Puts a text into the stream's filter state, for access logs.
pub fn note(name: &str, text: &str) {
    if !super::raw::set_property(name, text) {
        log::warn!("filter state {name} was refused by the host");
    }
}

fn text(bytes: Vec<u8>) -> Option<String> {
    String::from_utf8(bytes).ok()
}
