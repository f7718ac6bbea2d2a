//! A client cannot choose an address, steer the router, or see internals; engines do not either.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pd_e2e::{Call, Stand, chat_body, prompt_of};
use pd_engine_sim::{Fault, FaultKind, On};
use tokio::net::TcpListener;

/// An address that counts who connects.
async fn canary() -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&count);
    tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    (address, count)
}

fn forged(call: Call, target: SocketAddr) -> Call {
    call.header("target-pod", &target.to_string())
        .header("Target-Pod", &target.to_string())
        .header("x-envoy-original-dst-host", &target.to_string())
        .header("x-envoy-upstream-rq-timeout-ms", "1")
        .header("x-envoy-expected-rq-timeout-ms", "1")
        .header("x-envoy-upstream-alt-stat-name", "forged")
        .header("X-Envoy-Retry-On", "5xx")
        .header("x-envoy-max-retries", "9")
        .header("x-envoy-hedge-on-per-try-timeout", "true")
        .header("x-envoy-original-path", "/forged")
        .header("x-envoy-internal", "true")
        .header("x-envoy-decorator-operation", "forged")
        .header("x-envoy-ip-tags", "forged")
        .header("x-envoy-anything", "forged")
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_headers_are_harmless_and_internal_ones_do_not_reach_engines() {
    let stand = Stand::pairs("forged", 1).await;
    let (target, count) = canary().await;
    for stream in [false, true] {
        let call = Call::post("/v1/chat/completions", chat_body("forged", stream));
        let answer = stand.send(forged(call, target)).await.expect(200);
        prompt_of(&answer);
        let legs = stand.legs(&answer);
        assert_eq!(legs.len(), 2);
        for leg in &legs {
            let internal: Vec<_> = leg
                .headers
                .keys()
                .filter(|name| name.starts_with("x-envoy-") || *name == "target-pod")
                .collect();
            assert!(internal.is_empty(), "{internal:?} reached {}", leg.engine);
        }
        let internal: Vec<_> = answer
            .headers
            .keys()
            .filter(|name| name.as_str().starts_with("x-envoy"))
            .collect();
        assert!(internal.is_empty(), "{internal:?} reached the client");
    }
    for call in [
        Call::get("/v1/chat/completions"),
        Call::get("/"),
        Call::get("/anything"),
        Call::post("/v1/unknown", "{}"),
        Call::get("/metrics"),
        Call::new(hyper::Method::OPTIONS, "/v1/chat/completions"),
    ] {
        let answer = stand.send(forged(call, target)).await;
        assert_eq!(answer.status, 404, "{}", answer.shown());
    }
    // Answered by the filter, with the forged headers gone as well.
    stand
        .send(forged(Call::get("/v1/models"), target))
        .await
        .expect(200);
    stand
        .send(forged(Call::get("/readyz"), target))
        .await
        .expect(200);
    assert_eq!(
        count.load(Ordering::Relaxed),
        0,
        "somebody connected to the forged address"
    );
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_legs_get_fresh_ids_and_the_clients_credentials_and_trace() {
    let stand = Stand::pairs("ids", 1).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut ids = Vec::new();
    for _ in 0..2 {
        let call = Call::post("/v1/chat/completions", chat_body("ids", false))
            .header("x-request-id", "the-clients-own")
            .header("authorization", "Bearer secret-of-the-client")
            .header("traceparent", trace)
            .header("tracestate", "a=b");
        let answer = stand.send(call).await.expect(200);
        assert_eq!(
            answer.header("x-request-id"),
            "the-clients-own",
            "{}",
            answer.shown()
        );
        let legs = stand.legs(&answer);
        assert_eq!(legs.len(), 2);
        for leg in &legs {
            assert_eq!(leg.headers["authorization"], "Bearer secret-of-the-client");
            assert_eq!(leg.headers["tracestate"], "a=b");
            // A proxy may add a span of its own; the trace stays.
            assert!(leg.headers["traceparent"].contains("0af7651916cd43dd8448eb211c80319c"));
            assert_ne!(leg.headers["x-request-id"], "the-clients-own");
        }
        ids.push(answer.header("request-id").to_owned());
    }
    assert_ne!(ids[0], ids[1], "ids are fresh");
    let log = stand.envoy.log();
    assert!(
        !log.contains("secret-of-the-client"),
        "credentials were logged"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_cannot_say_what_only_the_gateway_may() {
    let stand = Stand::pairs("engine-headers", 1).await;
    for status in [200, 400, 503] {
        let says = FaultKind::Status {
            code: status,
            body: Some("{}".to_owned()),
            headers: [
                ("x-error-pd-prefill", "true"),
                ("X-Error-Routing", "true"),
                ("prefill-target-pod", "another"),
                ("x-session-id", "1"),
                ("x-pd-decision", "fair"),
                ("x-aibrix-config-profile", "gold"),
                ("x-engine", "kept"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        };
        let fault = Fault::next(1, On::Decode, says);
        assert!(stand.engine("decode-r0").inject(fault));
        let call = Call::post("/v1/chat/completions", chat_body("x", false));
        let answer = stand.send(call).await;
        assert_eq!(answer.status, status, "{}", answer.shown());
        assert_eq!(answer.header("x-engine"), "kept");
        assert_eq!(answer.header("prefill-target-pod"), "prefill-r0");
        let foreign = answer
            .headers
            .keys()
            .filter(|name| name.as_str().starts_with("x-"));
        assert!(foreign.eq(["x-engine"]), "{}", answer.shown());
        // The call that frees the KV of a failed leg must not meet the next fault.
        stand.envoy.settled(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_listener_serves_its_own_purpose_only() {
    let stand = Stand::pairs("listeners", 1).await;
    let control = stand.envoy.control();
    for call in [
        Call::post("/v1/chat/completions", chat_body("x", false)),
        Call::get("/v1/models"),
        Call::get("/"),
        Call::new(hyper::Method::DELETE, pd_wire::names::PATH_TOPOLOGY),
    ] {
        let answer = call.send(control).await.unwrap();
        assert!([404, 405].contains(&answer.status), "{}", answer.shown());
    }
    let held = stand.envoy.status().await.unwrap().topology;
    for call in [
        Call::put(pd_wire::names::PATH_TOPOLOGY, "{}"),
        Call::put(pd_wire::names::PATH_SAMPLES, "x"),
        Call::get(pd_wire::names::PATH_STATUS),
        Call::get(pd_wire::names::PATH_LEDGERS),
        Call::post("/pd/v1/explain", chat_body("x", false)),
    ] {
        stand.send(call).await.expect(404);
    }
    let still = stand.envoy.status().await.unwrap().topology;
    assert_eq!(held.map(|t| t.sequence), still.map(|t| t.sequence));
    assert_eq!(stand.seen("decode-r0").len(), 0);
}
