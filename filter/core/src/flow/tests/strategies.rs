//! Strategies without phases, and what is learnt for them.

use super::*;

const OK: Event<'static> = Event::ResponseHeaders {
    status: 200,
    proxy_details: None,
    event_stream: false,
    end: false,
};

/// A VM that knows `pods` equal standard pods.
fn standard(pods: usize, config: &str) -> Stage {
    let mut served = model("m");
    for n in 0..pods {
        served = served.pod(pod(&format!("ns/s{n}")).address(&format!("10.0.0.9:{}", 8000 + n)));
    }
    Stage::serving(served, config)
}

pub(super) fn request(stage: &mut Stage, headers: &[(&str, &str)]) -> Flow {
    let headers = headers
        .iter()
        .map(|(name, value)| (*name, value.as_bytes()));
    let head = Head::read("/v1/chat/completions", Endpoint::Chat, headers);
    Flow::new(head, false, &mut stage.scene())
}

/// A chat of several prompt blocks, each user's own.
fn long(user: &str) -> Vec<u8> {
    let text = user.repeat(2000 / user.len());
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#).into_bytes()
}

fn dressed(effects: &[Effect], name: &str) -> Option<String> {
    let headers = effects.iter().find_map(|effect| match effect {
        Effect::Dress(headers) => Some(headers),
        _ => None,
    });
    let headers = headers.expect("a dressed response");
    let found = headers.iter().find(|(header, _)| *header == name);
    found.map(|(_, value)| value.clone())
}

/// Sends a request in one leg, answers it with `status`, and returns the pod's address and the
/// response headers.
pub(super) fn one_leg(
    stage: &mut Stage,
    headers: &[(&str, &str)],
    body: &[u8],
    status: u16,
) -> (String, Vec<Effect>) {
    let mut flow = request(stage, headers);
    let sent = stage.on(&mut flow, Event::Body(body));
    let address = leg(&sent).address.clone();
    let answered = Event::ResponseHeaders {
        status,
        proxy_details: None,
        event_stream: false,
        end: false,
    };
    let effects = stage.on(&mut flow, answered);
    stage.on(&mut flow, END);
    stage.assert_at_rest();
    (address, effects)
}

#[test]
fn prefix_cache_returns_to_the_pod_that_answered_the_prefix_well() {
    let strategy = [
        ("routing-strategy", "prefix-cache"),
        ("x-pd-explain", "true"),
    ];
    let mut stage = standard(8, r#"{"allowExplain": true}"#);
    let (first, effects) = one_leg(&mut stage, &strategy, &long("alice "), 200);
    assert!(
        dressed(&effects, "x-pd-decision")
            .unwrap()
            .contains("; match=0;")
    );
    for _ in 0..5 {
        let (address, effects) = one_leg(&mut stage, &strategy, &long("alice "), 200);
        assert_eq!(address, first);
        assert!(
            dressed(&effects, "x-pd-decision")
                .unwrap()
                .contains("; match=100;")
        );
        assert_eq!(
            dressed(&effects, "routing-strategy").unwrap(),
            "prefix-cache"
        );
        assert_eq!(dressed(&effects, "x-session-id"), None);
    }

    // An engine's error says nothing about its cache.
    let mut stage = standard(8, "");
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..20 {
        seen.insert(one_leg(&mut stage, &strategy, &long("bob "), 500).0);
    }
    assert!(seen.len() > 1);
}

#[test]
fn strategies_that_do_not_ask_the_prefix_index_never_touch_it() {
    for strategy in ["random", "least-request", "session-affinity"] {
        let mut stage = standard(2, "");
        one_leg(
            &mut stage,
            &[("routing-strategy", strategy)],
            &long("alice "),
            200,
        );
        assert!(
            !stage.store.keys().iter().any(|key| key.contains("prefix")),
            "{strategy}"
        );
    }
    let mut alone = standard(1, "");
    one_leg(
        &mut alone,
        &[("routing-strategy", "prefix-cache")],
        &long("alice "),
        200,
    );
    assert!(!alone.store.keys().iter().any(|key| key.contains("prefix")));
}

#[test]
fn a_session_stays_with_the_pod_its_id_names() {
    let affinity = ("routing-strategy", "session-affinity");
    let mut stage = standard(8, "");
    let (first, effects) = one_leg(&mut stage, &[affinity], CHAT, 200);
    let id = dressed(&effects, "x-session-id").unwrap();
    for _ in 0..5 {
        let (address, effects) = one_leg(&mut stage, &[affinity, ("x-session-id", &id)], CHAT, 200);
        assert_eq!(address, first);
        assert_eq!(dressed(&effects, "x-session-id").unwrap(), id);
    }
    // What names no pod of the snapshot goes anywhere, and gets the id of where it went.
    for forged in ["MTY5LjI1NC4xNjkuMjU0Ojgw", "169.254.169.254:80", "%%%"] {
        let (address, effects) =
            one_leg(&mut stage, &[affinity, ("x-session-id", forged)], CHAT, 200);
        assert!(address.starts_with("10.0.0.9:"));
        assert_ne!(dressed(&effects, "x-session-id").unwrap(), forged);
    }
}

#[test]
fn a_session_key_prefers_one_pod_and_yields_to_a_session_id() {
    let affinity = ("routing-strategy", "session-affinity");
    let mut stage = standard(8, "");
    let mut homes = std::collections::BTreeSet::new();
    for user in 0..40 {
        let key = format!("user-{user}");
        let with_key = [affinity, ("x-aibrix-session-key", key.as_str())];
        let (home, effects) = one_leg(&mut stage, &with_key, CHAT, 200);
        assert_eq!(one_leg(&mut stage, &with_key, CHAT, 200).0, home);
        // The key is the caller's own and is never told.
        assert!(!format!("{effects:?}").contains(&key));
        homes.insert(home);
    }
    assert!(homes.len() > 4, "{homes:?}");
    let (pod, effects) = one_leg(&mut stage, &[affinity], CHAT, 200);
    let id = dressed(&effects, "x-session-id").unwrap();
    for user in 0..10 {
        let key = format!("user-{user}");
        let both = [
            affinity,
            ("x-session-id", &id),
            ("x-aibrix-session-key", &key),
        ];
        assert_eq!(one_leg(&mut stage, &both, CHAT, 200).0, pod);
    }
}

#[test]
fn a_session_names_a_decode_pod_but_never_a_prefill_pod() {
    let mut stage = Stage::new(2, "");
    let affinity = ("routing-strategy", "session-affinity");
    let prefill = super::super::affinity::session_id("10.0.0.1:8000");
    let decode = super::super::affinity::session_id("10.0.0.2:8001");
    let (address, _) = one_leg(
        &mut stage,
        &[affinity, ("x-session-id", &prefill)],
        CHAT,
        200,
    );
    assert!(address.starts_with("10.0.0.2:"));
    let (address, _) = one_leg(
        &mut stage,
        &[affinity, ("x-session-id", &decode)],
        CHAT,
        200,
    );
    assert_eq!(address, "10.0.0.2:8001");
}

/// Serves a pair's request up to the answer's first content, which is `second`.
fn pair(stage: &mut Stage, body: &[u8], second: &[u8]) {
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(body));
    call(&effects);
    let prefilled = Event::CallReply {
        status: 200,
        body: HANDED_OVER,
    };
    stage.on(&mut flow, prefilled);
    stage.on(&mut flow, headers(200, true));
    for bytes in [ROLE, second] {
        stage.on(&mut flow, Event::ResponseChunk { bytes, end: false });
    }
    stage.on(&mut flow, END);
    if flow.is_orphaned() {
        stage.on(&mut flow, REFUSED);
    }
    stage.assert_at_rest();
}

#[test]
fn a_decode_pod_that_took_the_prefix_over_serves_the_next_turn_alone() {
    let mut stage = Stage::new(1, r#"{"localPrefillMaxTokens": 100}"#);
    let body = long("alice ");
    // The engine could not pull the KV: the pod does not hold it.
    pair(&mut stage, &body, ERROR);
    pair(&mut stage, &body, TOKEN);
    let mut flow = stage.flow();
    let effects = stage.on(&mut flow, Event::Body(&body));
    assert_eq!(leg(&effects).address, "10.0.0.2:8000");
    stage.on(&mut flow, OK);
    stage.on(&mut flow, END);
    stage.assert_at_rest();
}

#[test]
fn a_prompt_served_in_one_leg_is_remembered_too() {
    let mut stage = Stage::new(1, r#"{"localPrefillMaxTokens": 1100}"#);
    // About 500 tokens, all of them missing: short enough.
    let (first, _) = one_leg(&mut stage, &[], &long("alice "), 200);
    assert_eq!(first, "10.0.0.2:8000");
    // About 1,500 tokens, of which 500 are held.
    let text = "alice ".repeat(1000);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let (second, _) = one_leg(&mut stage, &[], body.as_bytes(), 200);
    assert_eq!(second, first);
    let unknown = "bob ".repeat(1500);
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{unknown}"}}]}}"#);
    let mut flow = stage.flow();
    call(&stage.on(&mut flow, Event::Body(body.as_bytes())));
}

#[test]
fn without_local_prefill_one_pair_costs_no_index() {
    let mut stage = Stage::new(1, "");
    pair(&mut stage, &long("alice "), TOKEN);
    assert!(!stage.store.keys().iter().any(|key| key.contains("prefix")));
    // With a choice of prefill pods the prefill pod alone is learnt.
    let mut stage = Stage::new(2, "");
    let mut flow = stage.flow();
    stage.on(&mut flow, Event::Body(&long("alice ")));
    let prefilled = Event::CallReply {
        status: 200,
        body: HANDED_OVER,
    };
    stage.on(&mut flow, prefilled);
    let learnt = stage.store.calls();
    stage.on(&mut flow, OK);
    assert_eq!(stage.store.calls(), learnt);
}

#[test]
fn a_model_in_pairs_stays_one_while_its_prefill_pods_are_away() {
    for (config, serves) in [
        (r#"{"prefillFallback":"strict"}"#, false),
        ("", false),
        (r#"{"prefillFallback":"decode"}"#, true),
    ] {
        let prefill = pod("ns/p0").prefill().roleset("r").draining();
        let decode = pod("ns/d0").decode().roleset("r").address("10.0.0.2:8000");
        let mut stage = Stage::serving(model("m").pod(prefill).pod(decode), config);
        let mut flow = stage.flow();
        let effects = stage.on(&mut flow, Event::Body(CHAT));
        if serves {
            assert_eq!(leg(&effects).address, "10.0.0.2:8000");
        } else {
            let reply = reply(&effects);
            assert_eq!(reply.status, 503);
            let text = String::from_utf8_lossy(&reply.body);
            assert!(text.contains("prefill pods are not ready"), "{text}");
        }
    }
}
