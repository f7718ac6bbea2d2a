//! What clients ask for by header: strategies, filters, limits; and what an operator is told of it.

use crate::stand::{
    assert_quiet, bare, chat, config, control, pod, push, status_at, topology, two_pairs, vllm,
};
use pd_wasm_tests::{Exchange, Gateway};
use pd_wire::control::Explained;
use pd_wire::names;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A gateway whose model has `pods` standard pods, labelled `n=<number>`.
fn standard(workers: usize, pods: usize) -> Gateway {
    let mut gateway = Gateway::new(config(workers, r#"{"allowExplain":true}"#));
    let pods: Vec<Value> = (0..pods)
        .map(|n| {
            let mut pod = pod(
                &format!("s{n}"),
                "standard",
                None,
                &format!("10.0.7.{n}:8000"),
            );
            pod["labels"] = json!({"n": n.to_string(), "model.aibrix.ai/name": "m"});
            pod
        })
        .collect();
    push(&mut gateway, &topology(1, &pods)).expect(200);
    gateway.other_engines(vllm);
    gateway
}

/// A chat of about 2 KB, each user's own.
fn long(user: &str) -> Exchange {
    let text = user.repeat(2000 / user.len());
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
    Exchange::json("/v1/chat/completions", &body)
}

fn served_by(gateway: &mut Gateway, exchange: Exchange) -> String {
    let outcome = gateway.run(exchange);
    outcome.expect(200);
    outcome.header("target-pod").unwrap().to_owned()
}

#[test]
fn a_prefix_learnt_by_one_worker_is_found_by_another() {
    let mut gateway = standard(2, 8);
    let ask = |user: &str, worker| {
        let exchange = long(user).header("routing-strategy", "prefix-cache");
        exchange.header("x-pd-explain", "true").worker(worker)
    };
    for user in ["alice ", "bob ", "carol "] {
        let home = served_by(&mut gateway, ask(user, 0));
        for worker in [1, 0, 1] {
            // What has ended is known to the other workers after a tick.
            gateway.advance(200);
            let outcome = gateway.run(ask(user, worker));
            assert_eq!(outcome.header("target-pod"), Some(home.as_str()));
            let decision = outcome.header("x-pd-decision").unwrap();
            assert!(decision.contains("; match=100; decode="), "{decision}");
        }
    }
    // Charges given back are shown at every tick.
    gateway.advance(200);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn a_session_stays_with_its_pod_by_id_and_by_key() {
    let mut gateway = standard(2, 8);
    let ask = |worker| {
        let exchange = chat(false).header("routing-strategy", "session-affinity");
        exchange.worker(worker)
    };
    let outcome = gateway.run(ask(0));
    let id = outcome.header("x-session-id").unwrap().to_owned();
    let home = outcome.header("target-pod").unwrap().to_owned();
    for worker in [0, 1, 1] {
        let next = ask(worker).header("x-session-id", &id);
        assert_eq!(served_by(&mut gateway, next), home);
    }
    let mut homes = BTreeSet::new();
    for user in 0..20 {
        let key = format!("user-{user}");
        let home = served_by(&mut gateway, ask(0).header("x-aibrix-session-key", &key));
        let again = served_by(&mut gateway, ask(1).header("x-aibrix-session-key", &key));
        assert_eq!(again, home);
        homes.insert(home);
    }
    assert!(homes.len() > 3, "{homes:?}");
    // No other strategy issues an id, and none takes an address from a client.
    assert_eq!(gateway.run(chat(false)).header("x-session-id"), None);
    let forged = ask(0).header("x-session-id", "MTY5LjI1NC4xNjkuMjU0Ojgw");
    let outcome = gateway.run(forged);
    assert!(
        outcome
            .upstream()
            .header("target-pod")
            .unwrap()
            .starts_with("10.0.7.")
    );
    // Charges given back are shown at every tick.
    gateway.advance(200);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn external_filter_leaves_only_what_it_selects() {
    let mut gateway = standard(1, 8);
    for strategy in [
        "random",
        "least-request",
        "prefix-cache",
        "session-affinity",
    ] {
        let mut seen = BTreeSet::new();
        for _ in 0..20 {
            let exchange = long("alice ").header("routing-strategy", strategy).header(
                "external-filter",
                "n in (2, 5), n!=5, model.aibrix.ai/name=m, !drained",
            );
            seen.insert(served_by(&mut gateway, exchange));
        }
        assert_eq!(seen, BTreeSet::from(["s2".to_owned()]), "{strategy}");
    }
    for (filter, words) in [
        ("n>100", "excludes all of its pods"),
        ("n in (2", "is no label selector"),
    ] {
        let outcome = gateway.run(chat(false).header("external-filter", filter));
        outcome.expect(503);
        assert_eq!(outcome.header("x-error-routing"), Some("true"));
        let message = outcome.json()["error"]["message"].to_string();
        assert!(message.contains(words), "{message}");
        assert!(outcome.upstream.is_none() && outcome.calls.is_empty());
    }
    assert_quiet(&mut gateway, 1);
}

#[test]
fn external_filter_holds_for_both_legs_of_a_pair() {
    let mut pods = two_pairs();
    for pod in &mut pods {
        let set = pod["roleset"].clone();
        pod["labels"] = json!({"set": set});
    }
    let mut gateway = bare(1, "");
    gateway.other_engines(vllm);
    push(&mut gateway, &topology(2, &pods)).expect(200);
    for set in ["r0", "r1", "r0", "r1"] {
        let outcome = gateway.run(chat(true).header("external-filter", &format!("set=={set}")));
        outcome.expect(200);
        for header in ["target-pod", "prefill-target-pod"] {
            assert!(outcome.header(header).unwrap().starts_with(set));
        }
    }
    assert_quiet(&mut gateway, 1);
}

/// Two pairs whose model has this annotation.
fn annotated(workers: usize, replicas: u32, annotation: Value) -> Gateway {
    let mut pods = two_pairs();
    pods[1]["config"] = json!(0);
    let mut topology = topology(2, &pods);
    topology["replicas"] = json!(replicas);
    topology["models"][0]["configs"] = json!([annotation]);
    let mut gateway = bare(workers, "");
    gateway.other_engines(vllm);
    push(&mut gateway, &topology).expect(200);
    gateway
}

#[test]
fn the_rate_over_all_workers_is_the_limit() {
    let profiles = json!({"profiles": {"default": {"requestsPerSecond": 20}, "free": {}}});
    for (replicas, share) in [(1, 20.0), (3, 20.0 / 3.0)] {
        let mut gateway = annotated(2, replicas, profiles.clone());
        let (mut accepted, seconds) = (0, 12);
        for request in 0..seconds * 50 {
            let outcome = gateway.run(chat(false).worker(request % 2));
            match outcome.status {
                Some(200) => accepted += 1,
                _ => {
                    outcome.expect(429);
                    assert_eq!(outcome.header("retry-after"), Some("1"));
                    assert_eq!(outcome.header("x-error-model-rps-exceeded"), Some("true"));
                    assert_eq!(outcome.json()["error"]["code"], "rate_limit_exceeded");
                }
            }
            gateway.advance(20);
        }
        let rate = f64::from(accepted) / seconds as f64;
        assert!(
            (rate / share - 1.0).abs() < 0.1,
            "{rate} a second for {share}"
        );
        for _ in 0..60 {
            gateway
                .run(chat(false).header("config-profile", "free"))
                .expect(200);
        }
        // Charges given back are shown at every tick.
        gateway.advance(200);
        assert_quiet(&mut gateway, 2);
    }
}

#[test]
fn lost_races_do_not_lift_the_limit() {
    let profiles = json!({"profiles": {"default": {"requestsPerSecond": 10}}});
    let mut gateway = annotated(2, 1, profiles);
    let (mut accepted, seconds) = (0, 6);
    for request in 0..seconds * 40 {
        // Every write of the choice loses some, now and then all of its races.
        gateway.shared().race_next_writes(request as u32 % 12);
        let outcome = gateway.run(chat(false).worker(request % 2));
        gateway.shared().race_next_writes(0);
        accepted += u32::from(outcome.status == Some(200));
        gateway.advance(25);
    }
    let rate = f64::from(accepted) / seconds as f64;
    assert!((9.0..=11.0).contains(&rate), "{rate} a second for 10");
    // Charges given back are shown at every tick.
    gateway.advance(200);
    assert_quiet(&mut gateway, 2);
}

/// Asks how a chat would be served.
fn explain(path: &str, body: impl Into<Vec<u8>>) -> Exchange {
    control("POST", path).body(body)
}

#[test]
fn explain_tells_the_choice_and_leaves_nothing_behind() {
    let mut gateway = bare(1, r#"{"tieSeed":1}"#);
    gateway.other_engines(vllm);
    let body = crate::stand::chat_body(true);
    let before = gateway.shared().keys(names::VM_ID);
    let outcome = gateway.run(explain(names::PATH_EXPLAIN, body.clone()));
    let told: Explained = serde_json::from_value(outcome.expect(200).json()).unwrap();
    assert!(outcome.calls.is_empty() && outcome.upstream.is_none());
    assert_eq!(gateway.shared().keys(names::VM_ID), before);
    assert_eq!(
        (told.strategy.as_str(), told.reason.as_str()),
        ("pd", "score")
    );
    assert_eq!((told.prefill.len(), told.decode.len()), (2, 2));
    assert_quiet(&mut gateway, 1);

    let real = gateway.run(chat(true));
    let pair = [told.target.prefill.unwrap(), told.target.decode];
    let named = ["prefill-target-pod", "target-pod"].map(|name| real.header(name).unwrap());
    assert_eq!(pair, named.map(|name| format!("ns/{name}")));

    let completion = r#"{"model":"m","prompt":["a","b"]}"#;
    let path = format!("{}/v1/completions", names::PATH_EXPLAIN);
    let outcome = gateway.run(explain(&path, completion));
    assert_eq!(outcome.expect(200).json()["reason"], "no_hand_over");
    let headers = explain(names::PATH_EXPLAIN, body.clone()).header("routing-strategy", "random");
    assert_eq!(
        gateway.run(headers).expect(200).json()["target"]["kind"],
        "one-leg"
    );

    for (exchange, status) in [
        (explain(names::PATH_EXPLAIN, "{"), 400),
        (explain(names::PATH_EXPLAIN, ""), 400),
        (
            explain(names::PATH_EXPLAIN, r#"{"model":"x","messages":[]}"#),
            404,
        ),
        (explain("/pd/v1/explain/v1/models", body.clone()), 404),
        (explain("/pd/v1/explainer", body.clone()), 404),
        (
            explain(names::PATH_EXPLAIN, body.clone()).header("external-filter", "="),
            503,
        ),
    ] {
        gateway.run(exchange).expect(status);
    }
    // Not on the data listener, and not without the token.
    let outside = Exchange::post(names::PATH_EXPLAIN, body.clone());
    gateway.run(outside).expect(404);
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let mut guarded = Gateway::new(config(1, &json!({"controlTokens": [hash]}).to_string()));
    guarded.run(explain(names::PATH_EXPLAIN, body)).expect(401);
    assert_quiet(&mut gateway, 1);
}

#[test]
fn status_tells_the_models_and_what_the_config_was_warned_of() {
    let mut gateway = bare(2, r#"{"bucketServe":true}"#);
    let mut pods = two_pairs();
    pods[0]["ready"] = json!(false);
    push(&mut gateway, &topology(2, &pods)).expect(200);
    for worker in 0..2 {
        let status = status_at(&mut gateway, worker);
        let [model] = &status.models[..] else {
            panic!("one model: {:?}", status.models)
        };
        assert_eq!((model.name.as_str(), model.pods), ("m", 4));
        assert_eq!((model.usable, model.rolesets), (3, 1));
        assert_eq!(status.warnings.len(), 1);
        assert!(status.warnings[0].starts_with("bucketServe"));
        assert_eq!(status.knobs["bucketServe"], false);
    }
}
