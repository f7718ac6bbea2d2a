//! `external-filter`: every kind of choice keeps to it.

use super::strategies::{one_leg, request};
use super::*;
use pd_wire::profile::{ModelConfig, Profile};

const PAIR: &[u8] = CHAT;
const ONE_LEG: &[u8] = br#"{"model":"m","n":2,"messages":[{"role":"user","content":"hi"}]}"#;

/// Two rolesets, `r0` on old and `r1` on new GPUs, and with `combined` such a pod on each.
fn stage(combined: bool, config: &str) -> Stage {
    let mut served = model("m");
    let annotation = ModelConfig {
        profiles: [(
            "default".to_owned(),
            Profile {
                combined: true,
                ..Profile::default()
            },
        )]
        .into(),
        ..ModelConfig::default()
    };
    for (n, gpu) in ["old", "new"].into_iter().enumerate() {
        let set = format!("r{n}");
        let labelled = |name: String, octet: usize| {
            let address = format!("10.0.{n}.{octet}:8000");
            pod(&format!("ns/{name}"))
                .label("gpu", gpu)
                .address(&address)
        };
        served = served
            .pod(labelled(format!("p{n}"), 1).prefill().roleset(&set))
            .pod(labelled(format!("d{n}"), 2).decode().roleset(&set));
        if combined {
            served = served.pod(labelled(format!("s{n}"), 3).config(annotation.clone()));
        }
    }
    Stage::serving(served, config)
}

#[test]
fn pairs_combined_pods_and_single_legs_keep_to_the_filter() {
    for (gpu, network) in [("gpu=old", "10.0.0."), ("gpu notin (old), gpu", "10.0.1.")] {
        let filter = ("external-filter", gpu);
        for _ in 0..10 {
            let mut pairs = stage(true, "");
            let mut flow = request(&mut pairs, &[filter]);
            let prefill = pairs.on(&mut flow, Event::Body(PAIR));
            assert_eq!(call(&prefill).address, format!("{network}1:8000"));
            let reply = Event::CallReply {
                status: 200,
                body: HANDED_OVER,
            };
            let decode = pairs.on(&mut flow, reply);
            assert_eq!(leg(&decode).address, format!("{network}2:8000"));

            let mut combined = stage(true, "");
            let (address, _) = one_leg(&mut combined, &[filter], ONE_LEG, 200);
            assert_eq!(address, format!("{network}3:8000"));
            let mut decode = stage(false, "");
            let (address, _) = one_leg(&mut decode, &[filter], ONE_LEG, 200);
            assert_eq!(address, format!("{network}2:8000"));
            for strategy in [
                "random",
                "least-request",
                "prefix-cache",
                "session-affinity",
            ] {
                let strategy = ("routing-strategy", strategy);
                // The session's own pod is not exempt.
                let session = ("x-session-id", "MTAuMC4wLjM6ODAwMA==");
                let (address, _) = one_leg(&mut combined, &[filter, strategy, session], PAIR, 200);
                assert_eq!(address, format!("{network}3:8000"));
            }
        }
    }
}

#[test]
fn a_retry_keeps_to_the_filter() {
    let mut stage = stage(false, "");
    let mut flow = request(&mut stage, &[("external-filter", "gpu=old")]);
    call(&stage.on(&mut flow, Event::Body(PAIR)));
    stage.on(&mut flow, Event::CallFailed);
    let effects = stage.on(&mut flow, Event::Body(PAIR));
    assert_eq!(reply(&effects).status, 503);
    stage.assert_at_rest();
}

#[test]
fn no_pod_left_and_a_malformed_filter_are_a_503_that_says_so() {
    for (filter, words) in [
        ("gpu=newest", "external-filter excludes all of its pods"),
        (
            "role-name=prefill",
            "external-filter excludes all of its pods",
        ),
        ("gpu in (old", "external-filter is no label selector: found"),
        ("gpu=\"old\"", "without quotes"),
    ] {
        for body in [PAIR, ONE_LEG] {
            let mut stage = stage(true, "");
            let mut flow = request(&mut stage, &[("external-filter", filter)]);
            let effects = stage.on(&mut flow, Event::Body(body));
            let reply = reply(&effects);
            assert_eq!(reply.status, 503, "{filter}");
            let text = String::from_utf8_lossy(&reply.body).replace('\\', "");
            assert!(text.contains(words), "{text}");
            assert!(
                reply
                    .headers
                    .contains(&("x-error-routing", "true".to_owned()))
            );
            assert_eq!(endings(&effects), 1);
            stage.assert_at_rest();
        }
    }
    // Pods are left, but no roleset is.
    let mut stage = stage(false, r#"{"prefillFallback": "strict"}"#);
    let mut flow = request(
        &mut stage,
        &[("external-filter", "gpu"), ("routing-strategy", "pd")],
    );
    call(&stage.on(&mut flow, Event::Body(PAIR)));
}

#[test]
fn only_the_filtered_pods_decide_whether_pairs_can_work() {
    let mut served = model("m");
    for engine in ["vllm", "sglang"] {
        let pod = |name: &str| {
            pod(&format!("ns/{engine}-{name}"))
                .engine(engine)
                .label("e", engine)
        };
        served = served
            .pod(pod("p").prefill().roleset(engine))
            .pod(pod("d").decode().roleset(engine));
    }
    let mut stage = Stage::serving(served, "");
    let mut flow = request(&mut stage, &[]);
    let effects = stage.on(&mut flow, Event::Body(PAIR));
    assert_eq!(reply(&effects).status, 503);
    let mut flow = request(&mut stage, &[("external-filter", "e!=sglang")]);
    call(&stage.on(&mut flow, Event::Body(PAIR)));
}
