//! HTTP/1.1 answers read piece by piece: head, then a body by length or in chunks.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use memchr::memchr;

/// Larger heads, bodies and chunk sizes are refused; the answers expected here are a few KB.
const LIMIT: usize = 1 << 20;
const MAX_HEADERS: usize = 64;
/// Characters of an answer shown when it is not as it must be.
const SHOWN: usize = 600;

/// One answer as far as it has arrived.
#[derive(Default)]
pub(crate) struct Response {
    /// Bytes as they came.
    raw: Vec<u8>,
    /// Bytes of `raw` that are dealt with.
    at: usize,
    status: u16,
    stage: Stage,
    body: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Head,
    /// Body bytes missing.
    Length(usize),
    ChunkSize,
    /// Bytes missing of this chunk, then its line end.
    Chunk(usize),
    ChunkEnd,
    Trailer,
    Complete,
}

// === impl Response ===

impl Response {
    /// Forgets the answer, keeps the room.
    pub(crate) fn clear(&mut self) {
        self.raw.clear();
        self.body.clear();
        self.at = 0;
        self.status = 0;
        self.stage = Stage::Head;
    }

    /// Status code; 0 before the head is complete.
    pub(crate) fn status(&self) -> u16 {
        self.status
    }

    /// The body so far, without framing.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.stage == Stage::Complete
    }

    /// Takes more bytes of the connection.
    ///
    /// # Errors
    /// When they are not HTTP/1.1 or go beyond the end of the answer.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<()> {
        ensure!(
            self.raw.len() + bytes.len() <= LIMIT,
            "the answer is over {LIMIT} bytes"
        );
        self.raw.extend_from_slice(bytes);
        while self.step()? {}
        Ok(())
    }

    /// Deals with the next part; false when bytes for it are missing.
    fn step(&mut self) -> Result<bool> {
        let rest = self.raw.get(self.at..).unwrap_or_default();
        match self.stage {
            Stage::Head => return self.head(),
            Stage::Length(missing) => {
                let taken = missing.min(rest.len());
                self.body
                    .extend_from_slice(rest.get(..taken).unwrap_or_default());
                self.at += taken;
                if taken < missing {
                    self.stage = Stage::Length(missing - taken);
                    return Ok(false);
                }
                self.stage = Stage::Complete;
            }
            Stage::ChunkSize => {
                let Some(line) = line(rest) else {
                    return Ok(false);
                };
                // Extensions behind a semicolon mean nothing here.
                let digits = line.split(|b| *b == b';').next().unwrap_or_default();
                let size = std::str::from_utf8(digits)
                    .ok()
                    .and_then(|d| usize::from_str_radix(d.trim(), 16).ok())
                    .filter(|size| *size <= LIMIT)
                    .ok_or_else(|| anyhow!("bad chunk size"))?;
                self.at += line.len() + 2;
                self.stage = match size {
                    0 => Stage::Trailer,
                    size => Stage::Chunk(size),
                };
            }
            Stage::Chunk(missing) => {
                let taken = missing.min(rest.len());
                self.body
                    .extend_from_slice(rest.get(..taken).unwrap_or_default());
                self.at += taken;
                if taken < missing {
                    self.stage = Stage::Chunk(missing - taken);
                    return Ok(false);
                }
                self.stage = Stage::ChunkEnd;
            }
            Stage::ChunkEnd => {
                let Some(line) = line(rest) else {
                    return Ok(false);
                };
                ensure!(line.is_empty(), "a chunk is longer than its size");
                self.at += 2;
                self.stage = Stage::ChunkSize;
            }
            Stage::Trailer => {
                let Some(line) = line(rest) else {
                    return Ok(false);
                };
                self.at += line.len() + 2;
                if line.is_empty() {
                    self.stage = Stage::Complete;
                }
            }
            Stage::Complete => {
                ensure!(rest.is_empty(), "bytes follow the end of the answer");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn head(&mut self) -> Result<bool> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Response::new(&mut headers);
        let parsed = head.parse(&self.raw);
        let parsed = parsed.with_context(|| shown(&self.raw))?;
        let httparse::Status::Complete(length) = parsed else {
            return Ok(false);
        };
        let mut stage = None;
        for header in head.headers.iter() {
            if header.name.eq_ignore_ascii_case("content-length") {
                let value = std::str::from_utf8(header.value)?;
                stage = Some(Stage::Length(value.trim().parse()?));
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                stage = Some(Stage::ChunkSize);
            } else if header.name.eq_ignore_ascii_case("connection")
                && header.value.eq_ignore_ascii_case(b"close")
            {
                bail!("the server closes the connection (status {:?})", head.code);
            }
        }
        self.status = head.code.unwrap_or_default();
        self.at = length;
        self.stage = stage.ok_or_else(|| anyhow!("neither length nor chunks"))?;
        Ok(true)
    }
}

/// The beginning of bytes, for a message.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().take(SHOWN).collect()
}

/// The bytes before the first CRLF, if it has arrived.
fn line(bytes: &[u8]) -> Option<&[u8]> {
    let end = memchr(b'\n', bytes)?;
    let line = bytes.get(..end)?;
    line.strip_suffix(b"\r")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: 1\r\n\r\n";
    const LENGTH: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy";

    #[test]
    fn both_framings_are_read_however_the_bytes_are_split() {
        for (bytes, status, body) in [(CHUNKED, 200, &b"abcde"[..]), (LENGTH, 503, b"busy")] {
            for size in 1..=bytes.len() {
                let mut response = Response::default();
                for piece in bytes.chunks(size) {
                    assert!(!response.is_complete());
                    response.push(piece).unwrap();
                }
                assert!(response.is_complete(), "pieces of {size}");
                assert_eq!((response.status(), response.body()), (status, body));
            }
        }
    }

    #[test]
    fn a_response_is_used_again_after_clear() {
        let mut response = Response::default();
        response.push(LENGTH).unwrap();
        response.clear();
        response.push(CHUNKED).unwrap();
        assert_eq!((response.status(), response.body()), (200, &b"abcde"[..]));
    }

    #[test]
    fn what_is_not_an_expected_answer_is_an_error() {
        for bad in [
            &b"SMTP ready\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        ] {
            let mut response = Response::default();
            let text = String::from_utf8_lossy(bad);
            assert!(response.push(bad).is_err(), "{text}");
        }
    }
}
