//! `external-filter` as a property: whatever the fleet and the request, no leg goes to a pod that
//! the selector excludes.

// The generator needs the system's randomness.
#![cfg(not(target_family = "wasm"))]
// A test that meets something unexpected must fail at once.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "panics are how a test fails"
)]

use pd_core::config::Config;
use pd_core::fleet::accept_topology;
use pd_core::flow::{Effect, Event, Flow, Head};
use pd_core::request::Endpoint;
use pd_core::select::Selector;
use pd_core::testkit::{MemoryStore, model, pod, topology};
use pd_core::worker::{Scene, Worker};
use pd_wire::profile::{ModelConfig, Profile};
use proptest::prelude::*;
use std::collections::BTreeMap;

const HANDED_OVER: &[u8] = br#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":1}}"#;

type Labels = BTreeMap<String, String>;

/// One requirement as its meaning, beside its text.
#[derive(Clone, Debug)]
enum Requirement {
    Exists(String),
    Absent(String),
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Above(String, i64),
    Below(String, i64),
}

impl Requirement {
    fn holds(&self, labels: &Labels) -> bool {
        let number = |key: &String| labels.get(key).and_then(|text| text.parse::<i64>().ok());
        match self {
            Self::Exists(key) => labels.contains_key(key),
            Self::Absent(key) => !labels.contains_key(key),
            Self::In(key, values) => labels.get(key).is_some_and(|label| values.contains(label)),
            Self::NotIn(key, values) => labels.get(key).is_none_or(|label| !values.contains(label)),
            Self::Above(key, bound) => number(key).is_some_and(|number| number > *bound),
            Self::Below(key, bound) => number(key).is_some_and(|number| number < *bound),
        }
    }

    /// The text, with `gap` between the words and `variant` choosing among spellings.
    fn text(&self, gap: &str, variant: usize) -> String {
        let one = |values: &[String]| values.len() == 1 && !variant.is_multiple_of(3);
        let list = |values: &[String]| values.join(&format!("{gap},{gap}"));
        match self {
            Self::Exists(key) => key.clone(),
            Self::Absent(key) => format!("!{gap}{key}"),
            Self::In(key, values) if one(values) => {
                format!("{key}{gap}{}{gap}{}", ["=", "=="][variant % 2], values[0])
            }
            Self::In(key, values) => format!("{key} in{gap}({})", list(values)),
            Self::NotIn(key, values) if one(values) => format!("{key}{gap}!={gap}{}", values[0]),
            Self::NotIn(key, values) => format!("{key} notin{gap}({})", list(values)),
            Self::Above(key, bound) => format!("{key}{gap}>{gap}{bound}"),
            Self::Below(key, bound) => format!("{key}{gap}<{gap}{bound}"),
        }
    }
}

fn key() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "in", "x.io/notin"]).prop_map(str::to_owned)
}

fn value() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "v", "w", "1", "2", "in"]).prop_map(str::to_owned)
}

fn requirement() -> impl Strategy<Value = Requirement> {
    let values = || prop::collection::vec(value(), 1..4);
    prop_oneof![
        key().prop_map(Requirement::Exists),
        key().prop_map(Requirement::Absent),
        (key(), values()).prop_map(|(key, values)| Requirement::In(key, values)),
        (key(), values()).prop_map(|(key, values)| Requirement::NotIn(key, values)),
        (key(), 0..3_i64).prop_map(|(key, bound)| Requirement::Above(key, bound)),
        (key(), 0..3_i64).prop_map(|(key, bound)| Requirement::Below(key, bound)),
    ]
}

/// A selector as its meaning and its text.
fn selector() -> impl Strategy<Value = (Vec<Requirement>, String)> {
    let gap = prop::sample::select(vec!["", " ", " \t "]);
    (
        prop::collection::vec(requirement(), 1..4),
        gap,
        any::<usize>(),
    )
        .prop_map(|(requirements, gap, variant)| {
            let texts: Vec<String> = requirements
                .iter()
                .map(|requirement| requirement.text(gap, variant))
                .collect();
            (requirements, texts.join(&format!("{gap},{gap}")))
        })
}

fn labels() -> impl Strategy<Value = Labels> {
    prop::collection::btree_map(key(), value(), 0..4)
}

proptest! {
    #[test]
    fn a_selector_means_what_its_parts_mean((requirements, text) in selector(), labels in labels()) {
        let selector = Selector::parse(&text).unwrap();
        let pairs: Vec<_> = labels.clone().into_iter().collect();
        let expected = requirements.iter().all(|requirement| requirement.holds(&labels));
        prop_assert_eq!(selector.matches(&pairs), expected, "{}", text);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[a-c=!<>(), /.\"é]{0,24}") {
        let _ = Selector::parse(&text);
    }

    #[test]
    fn no_leg_goes_to_an_excluded_pod(
        pods in prop::collection::vec((0..3_usize, 0..3_usize, labels(), any::<bool>()), 1..12),
        (requirements, text) in selector(),
        strategy in prop::sample::select(
            vec!["", "pd", "random", "least-request", "prefix-cache", "session-affinity"]),
        answers in 1..3_u32,
        config in prop::sample::select(
            vec!["{}", r#"{"prefillFallback":"decode"}"#, r#"{"localPrefillMaxTokens":9}"#]),
        seed in any::<u8>(),
    ) {
        let mut served = model("m");
        let mut allowed: BTreeMap<String, bool> = BTreeMap::new();
        for (at, (role, roleset, labels, combined)) in pods.iter().enumerate() {
            let address = format!("10.0.0.{}:8000", at + 1);
            let mut built = pod(&format!("ns/p{at}")).address(&address);
            for (key, value) in labels {
                built = built.label(key, value);
            }
            let roleset = format!("r{roleset}");
            built = match role {
                0 => built.prefill().roleset(&roleset),
                1 => built.decode().roleset(&roleset),
                _ => {
                    let profile = Profile { combined: *combined, ..Profile::default() };
                    built.config(ModelConfig {
                        profiles: [("default".to_owned(), profile)].into(),
                        ..ModelConfig::default()
                    })
                }
            };
            served = served.pod(built);
            let fits = requirements.iter().all(|requirement| requirement.holds(labels));
            allowed.insert(address, fits);
        }
        let store = MemoryStore::new();
        accept_topology(&store, &topology(1, 1).model(served).json(), 0).unwrap();
        let config = Config::parse(config.as_bytes(), |_| None).unwrap();
        let mut worker = Worker::new([seed; 32]);
        let mut scene = Scene { worker: &mut worker, config: &config, store: &store, now_ms: 5 };
        let headers = [
            ("external-filter", text.as_bytes()),
            ("routing-strategy", strategy.as_bytes()),
            // The first pod's.
            ("x-session-id", b"MTAuMC4wLjE6ODAwMA=="),
        ];
        let head = Head::read("/v1/chat/completions", Endpoint::Chat, headers.into_iter());
        let body = format!(r#"{{"model":"m","n":{answers},"messages":[{{"role":"user","content":"hello"}}]}}"#);
        let mut flow = Flow::new(head, false, &mut scene);
        let mut effects = flow.on(Event::Body(body.as_bytes()), &mut scene);
        if effects.iter().any(|effect| matches!(effect, Effect::Call(_))) {
            effects.extend(flow.on(Event::CallReply { status: 200, body: HANDED_OVER }, &mut scene));
        }
        let mut reached = 0;
        for effect in &effects {
            let address = match effect {
                Effect::Call(call) => &call.address,
                Effect::Send(leg) => &leg.address,
                _ => continue,
            };
            reached += 1;
            prop_assert!(allowed[address], "{address} under {text}: {pods:?}");
        }
        let answered = effects.iter().any(|effect| matches!(effect, Effect::Reply(_)));
        prop_assert_eq!(reached == 0, answered);
    }
}
