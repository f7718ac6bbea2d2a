//! Properties a filter may read: the request and response attributes Envoy computes, then what the
//! test set for the stream, then for the gateway. Integers are 8 bytes little-endian, as Envoy
//! serialises them.

use super::stream::{Side, Stream};

/// An attribute computed from the stream, by its dotted path.
pub(crate) fn computed(stream: &Stream, path: &str) -> Option<Vec<u8>> {
    let request = || stream.headers(Side::Request);
    let header = |name: &str| request().and_then(|h| h.get(name)).map(<[u8]>::to_vec);
    if let Some(name) = path.strip_prefix("request.headers.") {
        return header(name);
    }
    if let Some(name) = path.strip_prefix("response.headers.") {
        return stream
            .headers(Side::Response)
            .and_then(|h| h.get(name))
            .map(<[u8]>::to_vec);
    }
    match path {
        "request.path" => header(":path"),
        "request.url_path" => header(":path").map(|path| {
            path.split(|b| *b == b'?')
                .next()
                .map(<[u8]>::to_vec)
                .unwrap_or_default()
        }),
        "request.host" => header(":authority"),
        "request.method" => header(":method"),
        "request.scheme" => header(":scheme"),
        "request.id" => header("x-request-id"),
        "request.size" => {
            let declared = request()
                .and_then(|h| h.text("content-length"))
                .and_then(|text| text.parse::<u64>().ok());
            Some(
                declared
                    .unwrap_or(stream.request.received)
                    .to_le_bytes()
                    .to_vec(),
            )
        }
        "request.total_size" => {
            let headers = request().map_or(0, |h| h.byte_size() as u64);
            Some((stream.request.received + headers).to_le_bytes().to_vec())
        }
        "response.code" => {
            let status = stream
                .response_headers
                .as_ref()?
                .text(":status")?
                .parse::<u64>()
                .ok()?;
            Some(status.to_le_bytes().to_vec())
        }
        "response.code_details" => stream
            .seen
            .borrow()
            .code_details
            .as_ref()
            .map(|details| details.clone().into_bytes()),
        // Envoy knows its own end of the connection once the request is on it.
        "upstream.local_address" => {
            let sent = stream.seen.borrow().upstream.is_some();
            sent.then(|| b"10.255.0.1:40000".to_vec())
        }
        "connection.id" | "connection_id" => Some(stream.connection_id.to_le_bytes().to_vec()),
        _ => None,
    }
}

/// The dotted form of an ABI property path (parts separated by NUL).
pub(crate) fn dotted(path: &[u8]) -> String {
    String::from_utf8_lossy(path).replace('\0', ".")
}

/// Whether a root context, which has no stream, may read the property.
pub(crate) fn without_stream(path: &str) -> bool {
    ["node.", "plugin_", "xds.node", "xds.listener_"]
        .iter()
        .any(|known| path.starts_with(known))
}
