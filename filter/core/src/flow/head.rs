//! What the request's headers say.

use crate::request::Endpoint;
use crate::select::{Selector, SelectorError};
use crate::session::SessionKey;
use pd_wire::names;

/// Where a request goes by method and path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route<'a> {
    /// An inference request; the body decides.
    Inference(Endpoint),
    /// `GET /v1/models`.
    Models,
    /// `GET /v1/models/{id}`.
    Model(&'a str),
    /// `GET /readyz`.
    Ready,
    /// Nothing is served there.
    Unknown,
}

/// Inference paths that are routed in one leg.
const ONE_LEG: [&str; 8] = [
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/rerank",
    "/classify",
    "/tokenize",
    "/detokenize",
];

/// Finds the route of a request; a query string is ignored here and kept on the legs.
#[must_use]
pub fn route<'a>(method: &str, path: &'a str) -> Route<'a> {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    match method {
        "POST" => match Endpoint::of_path(path) {
            Endpoint::Other if !ONE_LEG.contains(&path) => Route::Unknown,
            endpoint => Route::Inference(endpoint),
        },
        "GET" => match path {
            "/v1/models" => Route::Models,
            "/readyz" => Route::Ready,
            _ => match path.strip_prefix("/v1/models/") {
                Some(id) if !id.is_empty() => Route::Model(id),
                _ => Route::Unknown,
            },
        },
        _ => Route::Unknown,
    }
}

/// The headers that routing reads or passes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Path with query, as it came.
    pub path: String,
    /// Which API.
    pub endpoint: Endpoint,
    /// `routing-strategy`.
    pub strategy: Option<String>,
    /// `config-profile`.
    pub profile: Option<String>,
    /// The client's own `x-request-id`, echoed back.
    pub client_request_id: Option<String>,
    /// `x-aibrix-session-key`.
    pub session: Option<SessionKey>,
    /// `external-filter`, read once; a mistake in it is told when the body is there.
    pub filter: Option<Result<Selector, SelectorError>>,
    /// `x-session-id`, as the gateway issued it.
    pub session_id: Option<String>,
    /// `x-pd-explain: true`.
    pub explain: bool,
    /// `content-type: application/json`, with or without parameters.
    pub says_json: bool,
    /// Headers that the prefill leg carries as the client sent them.
    pub forwarded: Vec<(&'static str, String)>,
}

/// Client headers that reach both legs.
const FORWARDED: [&str; 3] = ["authorization", "traceparent", "tracestate"];

impl Head {
    /// Collects what matters from header pairs with lower-case names. Values that are no UTF-8
    /// are left out: nothing of ours can carry them. Session keys are opaque and stay behind.
    pub fn read<'a>(
        path: &str,
        endpoint: Endpoint,
        headers: impl Iterator<Item = (&'a str, &'a [u8])>,
    ) -> Self {
        let mut head = Self {
            path: path.to_owned(),
            endpoint,
            strategy: None,
            profile: None,
            client_request_id: None,
            session: None,
            filter: None,
            session_id: None,
            explain: false,
            says_json: false,
            forwarded: Vec::new(),
        };
        for (name, value) in headers {
            // Most headers are none of ours, so their values are not looked at.
            let text = || std::str::from_utf8(value).ok();
            match name {
                names::HEADER_SESSION_KEY => head.session = SessionKey::read(value),
                names::HEADER_FILTER => {
                    head.filter = match text() {
                        Some(text) => non_empty(text).map(|text| Selector::parse(&text)),
                        // What cannot be read must not let every pod through.
                        None => Some(Err(SelectorError::NotText)),
                    };
                }
                // One that is no text is an unknown one.
                names::HEADER_STRATEGY => {
                    head.strategy = non_empty(&String::from_utf8_lossy(value))
                }
                names::HEADER_PROFILE => set(&mut head.profile, text()),
                names::HEADER_REQUEST_ID => set(&mut head.client_request_id, text()),
                names::HEADER_SESSION_ID => set(&mut head.session_id, text()),
                "content-type" => head.says_json = text().is_some_and(is_json),
                names::HEADER_EXPLAIN => head.explain = value.trim_ascii() == b"true",
                _ => {
                    if let Some(known) = FORWARDED.iter().find(|known| **known == name)
                        && let Some(value) = text()
                    {
                        head.forwarded.push((known, value.to_owned()));
                    }
                }
            }
        }
        head
    }
}

/// True for the one media type `application/json`. A list of types, as the proxy makes of a header
/// that came twice, is none that engines read.
fn is_json(value: &str) -> bool {
    let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
    kind.trim().eq_ignore_ascii_case("application/json") && !parameters.contains(',')
}

/// Takes the text of a header; one that is no text is left out.
fn set(place: &mut Option<String>, text: Option<&str>) {
    if let Some(text) = text {
        *place = non_empty(text);
    }
}

/// Trimmed text, `None` when nothing is left.
fn non_empty(text: &str) -> Option<String> {
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_string_does_not_change_the_route() {
        let chat = Route::Inference(Endpoint::Chat);
        assert_eq!(route("POST", "/v1/chat/completions?a=/b"), chat);
        assert_eq!(
            route("GET", "/v1/models/org/name"),
            Route::Model("org/name")
        );
        assert_eq!(route("GET", "/v1/models/"), Route::Unknown);
        assert_eq!(route("GET", "/v1/chat/completions"), Route::Unknown);
        assert_eq!(route("PUT", "/v1/models"), Route::Unknown);
    }

    #[test]
    fn only_the_one_json_type_says_json() {
        for (value, says) in [
            ("application/json", true),
            ("Application/JSON ; charset=utf-8", true),
            ("application/json,text/plain", false),
            ("application/json;a=b,text/plain", false),
            ("application/jsonlines", false),
            ("", false),
        ] {
            let headers = [("content-type", value.as_bytes())];
            let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
            assert_eq!(head.says_json, says, "{value}");
        }
    }

    #[test]
    fn headers_that_are_no_text_are_left_out() {
        let headers: [(&str, &[u8]); 3] = [
            ("authorization", b"Bearer a\xff"),
            ("traceparent", b"00-a"),
            ("x-pd-explain", b"true"),
        ];
        let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
        assert_eq!(head.forwarded, [("traceparent", "00-a".to_owned())]);
        assert!(head.explain);
    }

    #[test]
    fn a_session_key_may_be_any_bytes_and_is_not_passed_on() {
        let headers = [("x-aibrix-session-key", b"a\xff".as_slice())];
        let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
        assert_eq!(head.session, SessionKey::read(b"a\xff"));
        assert!(head.session.is_some() && head.forwarded.is_empty());
        let headers = [("x-aibrix-session-key", b"".as_slice())];
        let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
        assert_eq!(head.session, None);
    }

    #[test]
    fn a_strategy_that_is_no_text_is_an_unknown_one() {
        let headers = [("routing-strategy", b"r\xe9".as_slice())];
        let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
        assert_eq!(head.strategy.as_deref(), Some("r\u{fffd}"));
    }

    #[test]
    fn a_filter_that_is_no_text_is_a_mistake_and_a_blank_one_is_none() {
        let filter = |value: &'static [u8]| {
            let headers = [("external-filter", value)];
            Head::read("/x", Endpoint::Chat, headers.into_iter()).filter
        };
        assert_eq!(filter(b"a=\xff"), Some(Err(SelectorError::NotText)));
        assert_eq!(filter(b"  "), None);
        assert_eq!(filter(b" a "), Some(Selector::parse("a")));
    }
}
