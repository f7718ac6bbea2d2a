//! The filter's control endpoint, as seen by the agent.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use pd_wire::control::{Ledgers, PushReply, Status};
use pd_wire::names;

use super::Kind;
use crate::http::{Client, ExchangeError};

/// Largest answer to a push, in bytes.
const MAX_REPLY: usize = 64 << 10;
/// Largest ledger answer, in bytes.
const MAX_LEDGERS: usize = 16 << 20;
/// How much longer than others the push of a tokenizer may take: it is megabytes.
const PATIENCE: u32 = 5;
/// Largest state, in bytes.
const MAX_STATUS: usize = 16 << 20;

/// Address of a control listener: `http://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvoyUrl(String);

impl std::str::FromStr for EnvoyUrl {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const SHAPE: &str = "not of the form http://HOST:PORT";
        let uri: Uri = text.parse().map_err(|_| SHAPE)?;
        let authority = uri.authority().ok_or(SHAPE)?.as_str();
        let bare = matches!(uri.path(), "" | "/") && uri.query().is_none();
        let good = uri.scheme_str() == Some("http") && bare && !authority.contains('@');
        match uri.port_u16() {
            Some(port) if port != 0 && good => Ok(Self(authority.to_owned())),
            _ => Err(SHAPE),
        }
    }
}

/// Where the bearer token comes from.
#[derive(Clone)]
pub enum Credentials {
    /// The endpoint asks for none.
    None,
    /// Given at start.
    Fixed(String),
    /// A file, read at start and again whenever an Envoy answers 401 (rotation).
    File(PathBuf),
}

// By hand: a token must not reach a log.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fixed(_) => f.write_str("Fixed(…)"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
        }
    }
}

impl Credentials {
    /// The value of the `authorization` header, if there is to be one.
    pub fn header(&self) -> Result<Option<HeaderValue>, String> {
        let token = match self {
            Self::None => return Ok(None),
            Self::Fixed(token) => token.clone(),
            Self::File(path) => std::fs::read_to_string(path).map_err(|error| error.to_string())?,
        };
        let token = token.trim();
        if token.is_empty() {
            return Err("the token is empty".to_owned());
        }
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| "the token holds characters no header may hold".to_owned())?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// Answer to a push.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its body, if it was one of the filter's.
    pub reply: Option<PushReply>,
}

/// Client of one Envoy's control endpoint.
#[derive(Debug)]
pub struct ControlClient {
    url: EnvoyUrl,
    client: Client,
    credentials: Credentials,
    header: Mutex<Option<HeaderValue>>,
    timeout: Duration,
}

impl ControlClient {
    /// A client whose exchanges take `timeout` at most. A token that cannot be read is tried
    /// again after the first 401.
    pub fn new(url: EnvoyUrl, credentials: Credentials, timeout: Duration) -> Self {
        let header = Mutex::new(credentials.header().ok().flatten());
        Self {
            url,
            client: Client::new(Duration::from_secs(30)),
            credentials,
            header,
            timeout,
        }
    }

    /// Host and port.
    pub fn name(&self) -> &str {
        &self.url.0
    }

    /// Pushes a message.
    pub async fn put(&self, kind: Kind, body: Vec<u8>) -> Result<Answer, ExchangeError> {
        let (path, content_type) = match kind {
            Kind::Topology => (names::PATH_TOPOLOGY, "application/json"),
            Kind::Samples => (names::PATH_SAMPLES, "application/octet-stream"),
            Kind::Tokenizer => (names::PATH_TOKENIZERS, "application/octet-stream"),
        };
        let timeout = match kind {
            Kind::Topology | Kind::Samples => self.timeout,
            Kind::Tokenizer => self.timeout.saturating_mul(PATIENCE),
        };
        let request = self.request(Method::PUT, path, Some(content_type), body.into())?;
        let (status, body) = self.client.exchange(request, MAX_REPLY, timeout).await?;
        if status == StatusCode::UNAUTHORIZED {
            self.read_token();
        }
        Ok(Answer {
            status,
            reply: serde_json::from_slice(&body).ok(),
        })
    }

    /// Reads the ledgers; `None` when the answer is none.
    pub async fn ledgers(&self, timeout: Duration) -> Result<Option<Ledgers>, ExchangeError> {
        let request = self.request(Method::GET, names::PATH_LEDGERS, None, Bytes::new())?;
        let (status, body) = self.client.exchange(request, MAX_LEDGERS, timeout).await?;
        let ledgers = (status == StatusCode::OK).then(|| serde_json::from_slice(&body).ok());
        Ok(ledgers.flatten())
    }

    /// Reads the filter's state; `None` when the answer is none.
    pub async fn status(&self, timeout: Duration) -> Result<Option<Status>, ExchangeError> {
        let request = self.request(Method::GET, names::PATH_STATUS, None, Bytes::new())?;
        let (status, body) = self.client.exchange(request, MAX_STATUS, timeout).await?;
        let read = (status == StatusCode::OK).then(|| serde_json::from_slice(&body).ok());
        Ok(read.flatten())
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        content_type: Option<&'static str>,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, ExchangeError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.url.0));
        if let Some(content_type) = content_type {
            request = request.header(CONTENT_TYPE, content_type);
        }
        let header = self
            .header
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(header) = header {
            request = request.header(AUTHORIZATION, header);
        }
        request
            .body(Full::new(body))
            .map_err(|error| ExchangeError::Connect(error.to_string()))
    }

    fn read_token(&self) {
        if let (Credentials::File(_), Ok(header)) = (&self.credentials, self.credentials.header()) {
            *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_and_a_port_make_an_envoy_url() {
        for good in [
            "http://127.0.0.1:9901",
            "http://envoy.local:80/",
            "http://[::1]:9901",
        ] {
            assert!(good.parse::<EnvoyUrl>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "127.0.0.1:9901",
            "https://h:1",
            "http://h",
            "http://h:0",
            "http://h:1/x",
            "http://h:1/?q",
            "http://u:p@h:1",
            "http://h:99999",
        ] {
            assert!(bad.parse::<EnvoyUrl>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_token_is_never_printed() {
        let credentials = Credentials::Fixed("s3cret".to_owned());
        let header = credentials.header().unwrap().unwrap();
        assert_eq!(header.to_str().unwrap(), "Bearer s3cret");
        assert!(!format!("{credentials:?} {header:?}").contains("s3cret"));
        assert!(Credentials::Fixed(" \n".to_owned()).header().is_err());
        assert!(Credentials::Fixed("a\nb".to_owned()).header().is_err());
    }
}
