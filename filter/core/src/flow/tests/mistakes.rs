//! What a mistake in an annotation, a variable or a header does to requests.

use super::strategies::request;
use super::*;
use pd_wire::profile::ModelConfig;

/// What became of a request.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// Its prefill leg went out, with this timeout of ours in ms.
    Pair { timeout_ms: u64 },
    /// It went out in one leg.
    OneLeg,
    /// It was answered with this status, and the message says this.
    Answer(u16, &'static str),
}

const PAIR: Outcome = Outcome::Pair { timeout_ms: 30_000 };

/// One pair whose pods carry this annotation. The agent reads it, warns and pushes what is left.
fn serve(
    annotation: &str,
    plugin: &str,
    headers: &[(&str, &str)],
    words: &'static str,
) -> (Outcome, Vec<String>) {
    let (config, warnings) = ModelConfig::parse(annotation);
    let with_config = |built: crate::testkit::PodBuilder| match &config {
        Some(config) => built.config(config.clone()),
        None => built,
    };
    let served = model("m")
        .pod(with_config(pod("ns/p").prefill().roleset("r")))
        .pod(with_config(pod("ns/d").decode().roleset("r")));
    let mut stage = Stage::serving(served, plugin);
    let mut flow = request(&mut stage, headers);
    let effects = stage.on(&mut flow, Event::Body(CHAT));
    let outcome = if has(&effects, |effect| matches!(effect, Effect::Call(_))) {
        let timeout_ms = flow.deadline().unwrap() - stage.now_ms;
        stage.on(&mut flow, GONE);
        stage.on(&mut flow, Event::CallFailed);
        Outcome::Pair { timeout_ms }
    } else if has(&effects, |effect| matches!(effect, Effect::Send(_))) {
        stage.on(&mut flow, GONE);
        Outcome::OneLeg
    } else {
        let reply = reply(&effects);
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(!words.is_empty() && text.contains(words), "{text}");
        Outcome::Answer(reply.status, words)
    };
    stage.assert_at_rest();
    (outcome, warnings)
}

fn profile(fields: &str) -> String {
    format!(r#"{{"profiles": {{"default": {{{fields}}}}}}}"#)
}

#[test]
fn every_mistake_in_an_annotation_has_its_outcome() {
    let bucketing = r#"{"promptLengthBucketing": true}"#;
    let outside = "no pod of this model takes a prompt of about";
    for (annotation, plugin, expected, warnings) in [
        // Text that is no annotation counts as none.
        ("{".to_owned(), "", PAIR, 1),
        ("[]".to_owned(), "", PAIR, 1),
        (r#"{"profiles": 7}"#.to_owned(), "", PAIR, 2),
        // Unknown names: the next source decides.
        (profile(r#""routingStrategy": "fastest""#), "", PAIR, 1),
        (
            profile(r#""routingStrategy": "fastest""#),
            r#"{"routingAlgorithm": "random"}"#,
            Outcome::OneLeg,
            1,
        ),
        (
            r#"{"lockedRoutingStrategy": "fastest"}"#.to_owned(),
            "",
            PAIR,
            1,
        ),
        // Unknown policies: the one fails its requests, the other is passed over.
        (
            profile(r#""routingConfig": {"decodeScorePolicy": "fastest"}"#),
            "",
            Outcome::Answer(503, "unknown decodeScorePolicy fastest"),
            1,
        ),
        (
            profile(r#""routingConfig": {"prefillScorePolicy": "fastest"}"#),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"prefillFallback": "fastest"}"#),
            "",
            PAIR,
            1,
        ),
        // A range that holds no length takes no prompt, where ranges count.
        (
            profile(
                r#""routingConfig": {"promptLenBucketMinLength": 9, "promptLenBucketMaxLength": 3}"#,
            ),
            bucketing,
            Outcome::Answer(503, outside),
            1,
        ),
        (
            profile(
                r#""routingConfig": {"promptLenBucketMinLength": 9, "promptLenBucketMaxLength": 3}"#,
            ),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"promptLenBucketMaxLength": -1}"#),
            bucketing,
            Outcome::Answer(503, outside),
            1,
        ),
        (
            profile(r#""routingConfig": {"promptLenBucketMinLength": -9}"#),
            bucketing,
            PAIR,
            0,
        ),
        (
            profile(r#""routingConfig": {"promptLenBucketMinLength": "9"}"#),
            bucketing,
            PAIR,
            1,
        ),
        // Negative settings and those of another type: what is below stands.
        (
            profile(r#""routingConfig": {"pd": {"prefillRequestTimeout": -1}}"#),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"pd": {"prefillRequestTimeout": "9"}}"#),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"pd": {"prefillRequestTimeout": -1}}"#),
            r#"{"prefillRequestTimeout": 7}"#,
            Outcome::Pair { timeout_ms: 7000 },
            1,
        ),
        (
            profile(r#""routingConfig": {"pd": {"tokenLoadRequestCost": -1}}"#),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"pd": {"prefillRetries": -1}}"#),
            "",
            PAIR,
            1,
        ),
        (
            profile(r#""routingConfig": {"pd": {"localPrefillMaxTokens": -1}}"#),
            "",
            PAIR,
            1,
        ),
        (profile(r#""requestsPerSecond": -1"#), "", PAIR, 1),
        (profile(r#""requestsPerSecond": "1""#), "", PAIR, 1),
        (profile(r#""routingConfig": []"#), "", PAIR, 1),
    ] {
        let words = match expected {
            Outcome::Answer(_, words) => words,
            _ => "",
        };
        let (outcome, warned) = serve(&annotation, plugin, &[], words);
        assert_eq!(outcome, expected, "{annotation} under {plugin}");
        assert_eq!(warned.len(), warnings, "{annotation}: {warned:?}");
    }
}

#[test]
fn a_mistake_in_a_routing_header_is_the_clients() {
    let annotation = profile(r#""routingConfig": {"pd": {"prefillRequestTimeout": 5}}"#);
    let unknown = "unknown routing-strategy";
    let five = Outcome::Pair { timeout_ms: 5000 };
    for (header, expected) in [
        (
            ("routing-strategy", "fastest"),
            Outcome::Answer(400, unknown),
        ),
        (
            ("routing-strategy", "pd,random"),
            Outcome::Answer(400, unknown),
        ),
        // An unknown profile is the default one, as in the reference; blanks are nothing.
        (("config-profile", "nobody"), five),
        (("config-profile", "  "), Outcome::Pair { timeout_ms: 5000 }),
        (
            ("routing-strategy", "  "),
            Outcome::Pair { timeout_ms: 5000 },
        ),
    ] {
        let (outcome, _) = serve(&annotation, "", &[header], unknown);
        assert_eq!(outcome, expected, "{header:?}");
    }
}

#[test]
fn a_bad_variable_is_warned_of_and_requests_go_on_by_the_next_source() {
    for (variable, value) in [
        ("ROUTING_ALGORITHM", "fastest"),
        ("AIBRIX_PREFILL_SCORE_POLICY", "fastest"),
        ("AIBRIX_DECODE_SCORE_POLICY", "fastest"),
        ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "-1"),
        ("AIBRIX_TOKEN_LOAD_REQUEST_COST", "-1"),
        ("AIBRIX_HYBRID_CACHE_LOAD_FACTOR", "NaN"),
    ] {
        let given = |name: &str| (name == variable).then(|| value.to_owned());
        let config = Config::parse(b"", given).unwrap();
        assert_eq!(config.warnings.len(), 1, "{variable}");
        assert!(
            config.warnings[0].starts_with(variable),
            "{:?}",
            config.warnings
        );
        assert_eq!(
            *config.knobs,
            pd_wire::knobs::Knobs::default(),
            "{variable}"
        );
    }
}
