//! Pods and pairs that fail are left alone, by all workers, until a trial brings them back.

use crate::stand::{
    D0, D1, DONE, ERROR, P0, P1, ROLE, assert_quiet, chat, healthy, logged, status_at, target, vllm,
};
use pd_wasm_tests::{CallId, Exchange, Gateway, Outcome, Script};
use pd_wire::control::Ejected;

/// Every tie goes to roleset r0.
const CONFIG: &str = r#"{"tieSeed":1,"prefillScorePolicy":"least_request","ejectAfterFailures":3,"prefillRetries":1}"#;

/// Sum of the counters whose name begins so, after the tick that shows them.
fn counted(gateway: &mut Gateway, beginning: &str) -> u64 {
    gateway.advance(100);
    let meters = gateway.meters();
    let names = meters.names();
    let named = names.iter().filter(|name| name.starts_with(beginning));
    named.map(|name| meters.counter(name)).sum()
}

/// Who is ejected, as a worker sees it.
fn ejected(gateway: &mut Gateway, worker: usize) -> Vec<Ejected> {
    status_at(gateway, worker).ejected
}

/// A request of a worker, and where its calls went.
fn ask(gateway: &mut Gateway, worker: usize) -> (Outcome, Vec<String>) {
    let outcome = gateway.run(chat(true).worker(worker));
    let targets = outcome.calls.iter().map(target).collect();
    (outcome, targets)
}

/// Two workers; P0 refuses until it is ejected.
fn with_a_dead_pod() -> Gateway {
    let mut gateway = healthy(2, CONFIG);
    gateway.engine(P0, |_| Script::refuse());
    gateway.advance(100);
    for worker in [0, 1, 0] {
        assert!(ejected(&mut gateway, worker).is_empty());
        let (outcome, targets) = ask(&mut gateway, worker);
        outcome.expect(200);
        assert_eq!(targets, [P0, P1], "retried");
    }
    gateway.advance(100);
    gateway
}

#[test]
fn a_dead_pod_is_ejected_by_the_failures_all_workers_saw_and_a_trial_brings_it_back() {
    let mut gateway = with_a_dead_pod();
    for worker in 0..2 {
        let [out] = &ejected(&mut gateway, worker)[..] else {
            panic!("one is ejected")
        };
        assert_eq!(out.pods, ["ns/r0-p"]);
        assert_eq!(
            (out.phase.as_str(), out.cause.as_str()),
            ("ejected", "transport")
        );
        assert!((9000..=10_000).contains(&out.remaining_ms));
    }
    assert!(logged(
        &gateway,
        "pod ns/r0-p of model m is ejected for 10 s"
    ));
    let counter = "gateway_pd_ejection_total{model=m,kind=prefill,class=transport}";
    assert_eq!(counted(&mut gateway, counter), 1);
    let spared = |gateway: &mut Gateway, ms: u64| {
        let until = gateway.now_ms() + ms;
        let mut worker = 0;
        while gateway.now_ms() < until {
            let (outcome, targets) = ask(gateway, worker);
            outcome.expect(200);
            assert_eq!(targets, [P1], "nothing goes to an ejected pod");
            gateway.advance(500);
            worker = 1 - worker;
        }
    };
    spared(&mut gateway, 9000);
    gateway.advance(1500);

    // One request is the trial. It fails, is served elsewhere, and the pod is out for longer.
    let (outcome, targets) = ask(&mut gateway, 1);
    outcome.expect(200);
    assert_eq!(targets, [P0, P1]);
    gateway.advance(100);
    assert_eq!(ejected(&mut gateway, 0)[0].times, 2);
    spared(&mut gateway, 19_000);

    // The pod has come back; so does its share of the requests, on both workers.
    gateway.engine(P0, vllm);
    gateway.advance(1500);
    assert_eq!(ejected(&mut gateway, 0)[0].phase, "trial_due");
    for worker in [0, 1, 1, 0] {
        let (outcome, targets) = ask(&mut gateway, worker);
        outcome.expect(200);
        assert_eq!(targets, [P0]);
        gateway.advance(100);
        assert!(ejected(&mut gateway, worker).is_empty());
    }
    assert!(logged(&gateway, "pod ns/r0-p of model m serves again"));
    assert_eq!(counted(&mut gateway, "gateway_request_model_fail_total"), 0);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn of_many_requests_one_is_the_trial_whichever_worker_they_come_to() {
    let mut gateway = with_a_dead_pod();
    gateway.engine(P0, |_| Script::stall());
    gateway.advance(10_000);
    let flights: Vec<_> = (0..20)
        .map(|n| gateway.send(chat(true).worker(n % 2)))
        .collect();
    let stalled: Vec<CallId> = gateway
        .pending_calls()
        .iter()
        .filter(|call| target(call) == P0)
        .map(|call| call.id)
        .collect();
    assert_eq!(stalled.len(), 1);
    gateway.advance(200);
    assert_eq!(ejected(&mut gateway, 1)[0].phase, "on_trial");
    gateway.answer(stalled[0], crate::stand::prefilled());
    gateway.advance(200);
    for flight in flights {
        gateway.outcome(flight).expect(200);
    }
    assert!(ejected(&mut gateway, 0).is_empty());
    assert_quiet(&mut gateway, 2);
}

#[test]
fn a_trial_that_dies_with_its_worker_is_given_up() {
    let mut gateway = with_a_dead_pod();
    gateway.engine(P0, |_| Script::stall());
    gateway.advance(10_000);
    gateway.send(chat(true));
    gateway.advance(200);
    assert_eq!(ejected(&mut gateway, 1)[0].phase, "on_trial");
    gateway.kill_vm(0);
    gateway.engine(P0, vllm);
    gateway.advance(25_000);
    assert_eq!(ask(&mut gateway, 1).1, [P1]);
    gateway.advance(6000);
    assert_eq!(ask(&mut gateway, 1).1, [P0]);
    gateway.advance(100);
    assert!(ejected(&mut gateway, 1).is_empty());
}

#[test]
fn a_pair_whose_transfers_fail_is_parted_and_its_pods_serve_on() {
    let mut gateway = healthy(2, CONFIG);
    gateway.engine(D0, |sent| {
        if sent.json()["kv_transfer_params"].is_object() {
            Script::stream(10, &[ROLE, ERROR, DONE])
        } else {
            vllm(sent)
        }
    });
    for worker in [0, 1, 1] {
        ask(&mut gateway, worker).0.expect(502);
        // The other worker sees at a tick that its charges are given back.
        gateway.advance(100);
    }
    let out = ejected(&mut gateway, 0);
    assert_eq!(out[0].pods, ["ns/r0-p", "ns/r0-d"]);
    assert_eq!(out[0].cause, "hand_over");
    let several = || {
        let body = r#"{"model":"m","n":2,"messages":[{"role":"user","content":"Hello"}]}"#;
        Exchange::post("/v1/chat/completions", body).header("content-type", "application/json")
    };
    for worker in [0, 1, 0, 1] {
        let (outcome, targets) = ask(&mut gateway, worker);
        outcome.expect(200);
        assert_eq!(targets, [P1]);
        let alone = gateway.run(several().worker(worker));
        assert_eq!(alone.expect(200).header("target-pod-ip"), Some(D0));
        gateway.advance(100);
    }
    // The transfers work again.
    gateway.engine(D0, vllm);
    gateway.advance(10_000);
    let (outcome, targets) = ask(&mut gateway, 1);
    assert_eq!(outcome.expect(200).header("target-pod-ip"), Some(D0));
    assert_eq!(targets, [P0]);
    assert!(ejected(&mut gateway, 0).is_empty());
    assert_eq!(
        counted(&mut gateway, "gateway_request_model_"),
        3 + 4 + 4 + 1
    );
    assert_quiet(&mut gateway, 2);
}

#[test]
fn overload_the_requests_own_fault_and_one_lost_connection_eject_nobody() {
    let overflow = || {
        let body =
            "upstream connect error or disconnect/reset before headers. reset reason: overflow";
        Script::answer(503, body)
    };
    let closed = || {
        let body = "upstream connect error or disconnect/reset before headers. \
                    reset reason: connection termination";
        Script::answer(503, body)
    };
    let scripts: [(&dyn Fn() -> Script, usize); 4] = [
        (&|| crate::stand::engine_error(429), 10),
        (&|| crate::stand::engine_error(503), 10),
        (&overflow, 10),
        (&closed, 3),
    ];
    for (script, times) in scripts {
        let mut gateway = healthy(1, CONFIG);
        let sent = script();
        gateway.engine(P0, move |_| sent.clone());
        for _ in 0..times {
            let (outcome, targets) = ask(&mut gateway, 0);
            outcome.expect(200);
            assert_eq!(targets, [P0, P1]);
        }
        assert!(ejected(&mut gateway, 0).is_empty());
    }
    let mut gateway = healthy(1, CONFIG);
    gateway.engine(P0, |_| crate::stand::engine_error(400));
    for _ in 0..10 {
        assert_eq!(ask(&mut gateway, 0).0.status, Some(400));
    }
    assert!(ejected(&mut gateway, 0).is_empty());
}

#[test]
fn the_last_pair_stays_whatever_becomes_of_it() {
    let mut gateway = healthy(1, CONFIG);
    gateway.engine(D0, |_| Script::reset());
    gateway.engine(D1, |_| Script::refuse());
    for _ in 0..40 {
        ask(&mut gateway, 0).0.expect(503);
        gateway.advance(50);
    }
    assert_eq!(ejected(&mut gateway, 0).len(), 1);
    gateway.engine(D0, vllm);
    gateway.engine(D1, vllm);
    for _ in 0..40 {
        ask(&mut gateway, 0).0.expect(200);
        gateway.advance(500);
    }
    assert!(ejected(&mut gateway, 0).is_empty());
    assert_quiet(&mut gateway, 1);
}
