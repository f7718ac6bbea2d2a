//! A kept-alive client connection that never blocks.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use crate::response::Response;

const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// One connection, with at most one request on it.
pub(crate) struct Connection {
    stream: TcpStream,
    /// Request bytes around the prompt's filler.
    pub(crate) head: Vec<u8>,
    pub(crate) tail: Vec<u8>,
    /// Bytes of head, filler and tail that are sent.
    sent: usize,
    sending: bool,
    pub(crate) response: Response,
}

// === impl Connection ===

impl Connection {
    /// Connects (loopback, so it waits for that) and registers under `token`.
    pub(crate) fn open(address: SocketAddr, registry: &Registry, token: Token) -> Result<Self> {
        let stream = std::net::TcpStream::connect_timeout(&address, CONNECT_LIMIT)
            .with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(stream);
        registry.register(&mut stream, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self {
            stream,
            head: Vec::new(),
            tail: Vec::new(),
            sent: 0,
            sending: false,
            response: Response::default(),
        })
    }

    /// Starts sending `head`, `filler` and `tail`.
    pub(crate) fn start(&mut self, filler: &[u8]) -> Result<()> {
        self.sent = 0;
        self.sending = true;
        self.response.clear();
        self.flush(filler)
    }

    /// Sends what the socket takes now.
    pub(crate) fn flush(&mut self, filler: &[u8]) -> Result<()> {
        while self.sending {
            let (head, tail) = (self.head.as_slice(), self.tail.as_slice());
            let mut skip = self.sent;
            let parts = [head, filler, tail].map(|part| {
                let left = part.get(skip.min(part.len())..).unwrap_or_default();
                skip = skip.saturating_sub(part.len());
                IoSlice::new(left)
            });
            match self.stream.write_vectored(&parts) {
                Ok(0) => bail!("the server takes no more bytes"),
                Ok(count) => self.sent += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("sending"),
            }
            self.sending = self.sent < head.len() + filler.len() + tail.len();
        }
        Ok(())
    }

    /// Reads what has arrived, by way of `scratch`.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> Result<()> {
        loop {
            match self.stream.read(scratch) {
                Ok(0) => bail!("the server closed the connection"),
                Ok(count) => {
                    self.response
                        .push(scratch.get(..count).unwrap_or_default())?;
                    // Less than there was room for: nothing is left, and more will be told.
                    if count < scratch.len() {
                        return Ok(());
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("receiving"),
            }
        }
    }
}
