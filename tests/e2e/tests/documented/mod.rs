//! Every example of AIBrix's documentation of prefill/decode disaggregation: labels, annotations and
//! variables stand here as they are written there. Only addresses and ports are the simulated
//! engines' own.

mod bands;
mod engines;
mod filters;
mod lengths;
mod mistakes;
mod overload;
mod policies;
mod profiles;
mod sessions;
mod steps;
mod tokenizers;
mod variables;

use pd_e2e::{Answer, Call, EnvoyConfig, Pod, Stand};
use pd_engine_sim::{EngineConfig, On};
use serde_json::json;

pub(crate) const CHAT: &str = "/v1/chat/completions";

/// Pod template of a prefill pod.
const PREFILL: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
    role-name: prefill
    roleset-name: group-0
"#;

/// Pod template of a decode pod.
const DECODE: &str = r#"
metadata:
  labels:
    model.aibrix.ai/name: my-model
    model.aibrix.ai/port: "8000"
    model.aibrix.ai/engine: vllm
    role-name: decode
    roleset-name: group-0
"#;

/// Switches bucketing on, in a Deployment.
const BUCKETING: &str = r#"
env:
  - name: AIBRIX_PROMPT_LENGTH_BUCKETING
    value: "true"
"#;

/// The pair `prefill-0` and `decode-0`, both with these annotations.
fn pair(annotations: &[&str]) -> Vec<Pod> {
    pair_in("0", annotations)
}

/// The pair `prefill-N` and `decode-N` of roleset `group-N`, both with these annotations.
fn pair_in(number: &str, annotations: &[&str]) -> Vec<Pod> {
    let pod = |role: &str, template: &str| {
        let pieces = [&[template], annotations].concat();
        let name = format!("{role}-{number}");
        Pod::documented(&name, &pieces).in_roleset(&format!("group-{number}"))
    };
    vec![pod("prefill", PREFILL), pod("decode", DECODE)]
}

/// Changes the engine of every pod.
fn all(pods: Vec<Pod>, change: impl Fn(&mut EngineConfig)) -> Vec<Pod> {
    pods.into_iter().map(|pod| pod.engine(&change)).collect()
}

/// Envoy with these variables in its environment, explaining its choices.
fn with(pieces: &[&str]) -> impl FnOnce(&mut EnvoyConfig) {
    let mut variables = std::collections::BTreeMap::new();
    for piece in pieces {
        variables.extend(pd_e2e::variables(piece));
    }
    move |envoy| {
        envoy.environment = variables;
        envoy.plugin = json!({ "allowExplain": true }).to_string();
    }
}

/// Starts these pods behind an Envoy with these variables.
async fn stand(name: &str, pods: Vec<Pod>, variables: &[&str]) -> Stand {
    let builder = Stand::builder(name).pods(pods);
    builder.envoy(with(variables)).start().await
}

/// A text of this many bytes that begins like no other with another number.
fn text(number: usize, bytes: usize) -> String {
    let mut text = format!("{number} ");
    while text.len() < bytes {
        text.push_str("words of one topic or another, ");
    }
    text.truncate(bytes);
    text
}

/// A chat request for the documented model.
fn chat(prompt: &str) -> Call {
    chat_with("my-model", prompt)
}

/// A chat request for another model.
fn chat_with(model: &str, prompt: &str) -> Call {
    let message = json!([{ "role": "user", "content": prompt }]);
    let body = format!(r#"{{"model":"{model}","messages":{message},"max_tokens":4}}"#);
    Call::post(CHAT, body).header("x-pd-explain", "true")
}

/// A value of `x-pd-decision`.
fn decision<'a>(answer: &'a Answer, name: &str) -> &'a str {
    let parts = answer.header("x-pd-decision").split(';');
    let mut pairs = parts.filter_map(|part| part.trim().split_once('='));
    let found = pairs.find(|(key, _)| *key == name);
    found.map_or("", |(_, value)| value)
}

/// The prefill and the decode pod that served, after checking that each did its leg and that the
/// headers name them.
fn served_by_pair(stand: &Stand, answer: &Answer) -> (String, String) {
    let legs = stand.legs(answer);
    let shown: Vec<_> = legs.iter().map(|l| (l.engine.as_str(), l.leg)).collect();
    let names = ["prefill-target-pod", "target-pod"].map(|name| answer.header(name).to_owned());
    let expected = [
        (names[0].as_str(), Some(On::Prefill)),
        (names[1].as_str(), Some(On::Decode)),
    ];
    assert_eq!(shown, expected, "{}", answer.shown());
    assert_eq!(answer.header("routing-strategy"), "pd");
    assert_addresses(stand, answer);
    let [prefill, decode] = names;
    let number = |name: &str| name.rsplit('-').next().unwrap().to_owned();
    assert_eq!(number(&prefill), number(&decode), "one roleset");
    pd_e2e::prompt_of(answer);
    (prefill, decode)
}

/// The pod that served alone, after checking that it did and that the headers name no other.
fn served_alone(stand: &Stand, answer: &Answer) -> String {
    let legs = stand.legs(answer);
    let shown: Vec<_> = legs.iter().map(|l| (l.engine.as_str(), l.leg)).collect();
    let name = answer.header("target-pod");
    assert_eq!(shown, [(name, Some(On::Decode))], "{}", answer.shown());
    assert_addresses(stand, answer);
    let identity = pd_e2e::prompt_of(answer);
    assert_eq!(identity.kv, None, "it computed the prompt itself");
    name.to_owned()
}

/// `target-pod-ip` is an address with port, `prefill-target-pod-ip` one without; there is none of
/// a prefill pod that took no part.
fn assert_addresses(stand: &Stand, answer: &Answer) {
    let decode = stand.engine(answer.header("target-pod")).address();
    assert_eq!(answer.header("target-pod-ip"), decode.to_string());
    let prefill = answer.header("prefill-target-pod");
    let ip = if prefill.is_empty() {
        String::new()
    } else {
        stand.engine(prefill).address().ip().to_string()
    };
    assert_eq!(answer.header("prefill-target-pod-ip"), ip);
}
