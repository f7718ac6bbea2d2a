//! An explanation is what a real request would get, and leaves nothing behind.

use super::strategies::request;
use super::*;
use pd_wire::control::Explained;
use pd_wire::profile::ModelConfig;

/// Headers and body.
type Request = (&'static [(&'static str, &'static str)], &'static [u8]);

/// Headers that change the choice, and the body sent with them.
const REQUESTS: [Request; 6] = [
    (&[], CHAT),
    (&[("external-filter", "odd=1")], CHAT),
    (&[("routing-strategy", "random")], CHAT),
    (&[("routing-strategy", "prefix-cache")], CHAT),
    (
        &[
            ("routing-strategy", "session-affinity"),
            ("x-aibrix-session-key", "k"),
        ],
        CHAT,
    ),
    (
        &[],
        br#"{"model":"m","n":2,"messages":[{"role":"user","content":"hi"}]}"#,
    ),
];

fn stage(rolesets: usize, annotation: &str) -> Stage {
    let mut served = model("m");
    let config = ModelConfig::parse(annotation).0;
    for n in 0..rolesets {
        let set = format!("r{n:02}");
        let odd = (n % 2).to_string();
        let mut prefill = pod(&format!("ns/p{n:02}"))
            .prefill()
            .roleset(&set)
            .label("odd", &odd);
        if let Some(config) = &config {
            prefill = prefill.config(config.clone());
        }
        let decode = pod(&format!("ns/d{n:02}"))
            .decode()
            .roleset(&set)
            .label("odd", &odd);
        served = served.pod(prefill).pod(decode);
    }
    Stage::serving(served, r#"{"tieSeed": 1}"#)
}

fn explained(stage: &mut Stage, headers: &[(&str, &str)], body: &[u8]) -> Result<Explained, Fault> {
    let headers = headers
        .iter()
        .map(|(name, value)| (*name, value.as_bytes()));
    let head = Head::read("/v1/chat/completions", Endpoint::Chat, headers);
    explain(&head, body, &mut stage.scene())
}

/// Address of a pod by `namespace/name`.
fn address(stage: &mut Stage, name: &str) -> String {
    let fleet = stage.worker.find_model("m", &stage.store).unwrap();
    let pod = fleet
        .pods
        .iter()
        .find(|pod| format!("{}/{}", pod.namespace, pod.name) == name);
    pod.unwrap().address.clone()
}

#[test]
fn the_real_request_goes_where_the_explanation_says() {
    let mut stage = stage(20, "");
    let mut flows = Vec::new();
    // Each charges something, so the next choice differs.
    for (headers, body) in REQUESTS.into_iter().cycle().take(60) {
        let told = explained(&mut stage, headers, body).unwrap();
        let mut flow = request(&mut stage, headers);
        let effects = stage.on(&mut flow, Event::Body(body));
        let sent = match &told.target.prefill {
            Some(prefill) => (address(&mut stage, prefill), &call(&effects).address),
            None => (
                address(&mut stage, &told.target.decode),
                &leg(&effects).address,
            ),
        };
        assert_eq!(sent.0, *sent.1, "{told:?}");
        flows.push(flow);
    }
}

#[test]
fn nothing_is_charged_counted_or_learnt() {
    let limited = r#"{"profiles": {"default": {"requestsPerSecond": 1}}}"#;
    let mut stage = stage(2, limited);
    let writes = stage.store.calls().1;
    for (headers, body) in REQUESTS.into_iter().cycle().take(30) {
        let told = explained(&mut stage, headers, body).unwrap();
        assert_eq!(told.requests_per_second, 1);
    }
    assert_eq!(stage.store.calls().1, writes);
    stage.assert_at_rest();
}

#[test]
fn every_candidate_is_listed_with_its_score() {
    let mut stage = stage(
        20,
        r#"{"profiles": {"default": {}, "busy": {"routingStrategy": "pd"}}}"#,
    );
    let told = explained(&mut stage, &[("config-profile", "busy")], CHAT).unwrap();
    assert_eq!((told.prefill.len(), told.decode.len()), (20, 20));
    assert_eq!(
        (told.prefill[3].pod.as_str(), told.prefill[3].match_percent),
        ("ns/p03", Some(0))
    );
    assert_eq!(
        (told.strategy.as_str(), told.strategy_source.as_str()),
        ("pd", "profile")
    );
    assert_eq!(told.profile.as_deref(), Some("busy"));
    assert_eq!(
        (told.reason.as_str(), told.target.kind.as_str()),
        ("score", "pair")
    );
    assert_eq!(told.target.roleset.as_deref(), Some("ns/r00"));
    assert_eq!(told.decode_tokens, CHAT.len() as u64 / 4);
    assert_eq!(told.prefill_tokens, 3500 + told.decode_tokens);
    let json = serde_json::to_value(&told).unwrap();
    assert_eq!(json["promptTokens"], told.prompt_tokens);
    let filtered = explained(&mut stage, &[("external-filter", "odd=1")], CHAT).unwrap();
    assert_eq!(
        (filtered.prefill.len(), filtered.profile.as_deref()),
        (10, Some("default"))
    );
    let one = explained(&mut stage, &[("routing-strategy", "random")], CHAT).unwrap();
    assert_eq!(
        (one.target.kind.as_str(), one.decode.len()),
        ("one-leg", 20)
    );
    assert_eq!(one.target.prefill, None);
}

#[test]
fn a_request_that_cannot_be_served_is_explained_by_what_its_client_would_get() {
    let mut stage = stage(1, "");
    for (headers, body, status) in [
        (&[][..], &b"{"[..], 400),
        (&[], br#"{"model":"unknown","messages":[]}"#, 404),
        (&[("routing-strategy", "none")], CHAT, 400),
        (&[("external-filter", "odd=7")], CHAT, 503),
        (&[("external-filter", "odd=(7)")], CHAT, 503),
    ] {
        let fault = explained(&mut stage, headers, body).unwrap_err();
        assert_eq!(fault.status(), status);
        let mut flow = request(&mut stage, headers);
        let effects = stage.on(&mut flow, Event::Body(body));
        assert_eq!(reply(&effects).body, fault.reply(None).body);
    }
    let mut unready = Stage::empty("");
    assert_eq!(explained(&mut unready, &[], CHAT), Err(Fault::NoSnapshot));
}
