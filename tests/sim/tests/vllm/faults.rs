//! Every kind of injected fault, by the library and over HTTP.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use pd_engine_sim::{Cut, Engine, Fault, FaultKind, On, State};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::client::{
    CHAT, Wire, chat, decode, engine, get, pair, post, prefill, prefill_of, try_post, until,
};

fn next(engine: &Engine, kind: FaultKind) {
    assert!(engine.inject(Fault::next(1, On::Any, kind)));
}

fn streamed() -> Value {
    chat(json!({"stream": true, "max_tokens": 4}))
}

#[tokio::test]
async fn a_status_hits_the_leg_it_is_for_as_often_as_said() {
    let (p, d) = pair().await;
    let headers = BTreeMap::from([("retry-after".to_owned(), "7".to_owned())]);
    let kind = FaultKind::Status {
        code: 503,
        body: Some("{\"busy\":1}".to_owned()),
        headers,
    };
    for e in [&p, &d] {
        assert!(e.inject(Fault::next(2, On::Prefill, kind.clone())));
    }
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
    for _ in 0..2 {
        let answer = post(p.address(), CHAT, &prefill_of(chat(json!({})))).await;
        assert_eq!((answer.status, answer.body.as_str()), (503, "{\"busy\":1}"));
        assert_eq!(answer.headers["retry-after"], "7");
    }
    assert_eq!(p.state().kv.kv_held, 0);
    prefill(&p).await;
    assert_eq!(p.state().requests_total, 3);
    // Without a body it is the engine's own error object.
    let bare = FaultKind::Status {
        code: 500,
        body: None,
        headers: BTreeMap::new(),
    };
    next(&d, bare);
    let answer = decode(&d, &Value::Null).await.unwrap();
    assert_eq!(answer.json()["error"]["code"], 500);
}

#[tokio::test]
async fn a_reset_before_headers_is_one() {
    let (p, _) = pair().await;
    let body = prefill_of(chat(json!({})));
    for (how, end) in [
        (Cut::Rst, ErrorKind::ConnectionReset),
        (Cut::Fin, ErrorKind::UnexpectedEof),
    ] {
        next(
            &p,
            FaultKind::ResetBeforeHeaders {
                how,
                after_ms: 0,
                after_work: false,
            },
        );
        let error = try_post(p.address(), CHAT, &body).await.unwrap_err();
        assert_eq!(error.kind(), end);
    }
    assert_eq!(p.state().kv.kv_held, 0);
    next(
        &p,
        FaultKind::ResetBeforeHeaders {
            how: Cut::Rst,
            after_ms: 0,
            after_work: true,
        },
    );
    try_post(p.address(), CHAT, &body).await.unwrap_err();
    // The work was done, and nobody knows of its KV.
    let state = until(&p, |s| s.running == 0).await;
    assert_eq!((state.kv.kv_held, state.aborted), (1, 0));
}

#[tokio::test]
async fn a_stall_lasts_its_time_or_until_the_client_leaves() {
    let d = engine("d", |_| {}).await;
    next(
        &d,
        FaultKind::StallBeforeHeaders {
            ms: Some(50),
            after_work: false,
        },
    );
    let begun = Instant::now();
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
    assert!(begun.elapsed() >= Duration::from_millis(50));
    next(&d, FaultKind::Slow { ms: 50 });
    let begun = Instant::now();
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
    assert!(begun.elapsed() >= Duration::from_millis(50));

    next(
        &d,
        FaultKind::StallBeforeHeaders {
            ms: None,
            after_work: true,
        },
    );
    let mut wire = Wire::open(d.address()).await;
    wire.post(CHAT, &chat(json!({}))).await;
    until(&d, |s| s.running == 1 && s.kv.computed_locally == 3).await;
    // The admin endpoint answers meanwhile, on both ports.
    for address in [d.address(), d.admin_address()] {
        assert_eq!(get(address, "/sim/admin/state").await.json()["running"], 1);
    }
    drop(wire);
    until(&d, |s| s.running == 0 && s.aborted == 1).await;
}

#[tokio::test]
async fn a_stream_breaks_after_the_chunks_it_may_send() {
    let d = engine("d", |_| {}).await;
    for (how, end) in [
        (Cut::Rst, ErrorKind::ConnectionReset),
        (Cut::Fin, ErrorKind::UnexpectedEof),
    ] {
        next(
            &d,
            FaultKind::ResetMidStream {
                after_chunks: 2,
                how,
            },
        );
        let answer = post(d.address(), CHAT, &streamed()).await;
        assert_eq!((answer.status, answer.broken), (200, Some(end)));
        // The role chunk is no content chunk.
        assert_eq!(answer.events().len(), 3);
    }
    next(&d, FaultKind::ErrorMidStream { after_chunks: 1 });
    let answer = post(d.address(), CHAT, &streamed()).await;
    let events = answer.events();
    assert_eq!(events.len(), 4);
    assert!(events[2].contains("InternalServerError"));
    assert_eq!((events[3], answer.broken), ("[DONE]", None));

    next(
        &d,
        FaultKind::StallMidStream {
            after_chunks: 1,
            ms: Some(30),
        },
    );
    let answer = post(d.address(), CHAT, &streamed()).await;
    assert_eq!(answer.events().len(), 6);
    next(
        &d,
        FaultKind::StallMidStream {
            after_chunks: 1,
            ms: None,
        },
    );
    let mut wire = Wire::open(d.address()).await;
    wire.post(CHAT, &streamed()).await;
    let text = wire.read_until("[request=").await;
    assert!(!text.contains(" t2"));
    drop(wire);
    until(&d, |s| s.aborted == 1).await;
}

#[tokio::test]
async fn an_unstreamed_answer_breaks_in_the_middle_of_its_body() {
    let p = engine("p", |_| {}).await;
    next(
        &p,
        FaultKind::ResetMidStream {
            after_chunks: 0,
            how: Cut::Fin,
        },
    );
    let answer = post(p.address(), CHAT, &prefill_of(chat(json!({})))).await;
    assert_eq!(answer.broken, Some(ErrorKind::UnexpectedEof));
    let length: usize = answer.headers["content-length"].parse().unwrap();
    assert_eq!(answer.body.len(), length / 2);
    assert_eq!(p.state().kv.kv_held, 1);
}

#[tokio::test]
async fn broken_answers() {
    let p = engine("p", |_| {}).await;
    let body = prefill_of(chat(json!({})));
    next(&p, FaultKind::BadJson);
    let answer = post(p.address(), CHAT, &body).await;
    assert_eq!((answer.status, answer.broken), (200, None));
    assert!(serde_json::from_str::<Value>(&answer.body).is_err());
    next(&p, FaultKind::NoKvParams);
    assert_eq!(post(p.address(), CHAT, &body).await.kv(), Value::Null);
    let merge = json!({"remote_host": null, "extra": [1]})
        .as_object()
        .unwrap()
        .clone();
    let remove = vec!["remote_port".to_owned()];
    next(&p, FaultKind::KvParams { merge, remove });
    let kv = post(p.address(), CHAT, &body).await.kv();
    assert_eq!(
        (&kv["remote_host"], &kv["extra"]),
        (&Value::Null, &json!([1]))
    );
    assert_eq!(kv.get("remote_port"), None);
    assert!(kv["remote_engine_id"].is_string());
    assert_eq!(p.state().kv.kv_held, 3);
    next(&p, FaultKind::BadJson);
    let answer = post(p.address(), CHAT, &streamed()).await;
    assert!(serde_json::from_str::<Value>(answer.events()[1]).is_err());
}

#[tokio::test]
async fn an_injected_death_closes_the_port() {
    let d = engine("d", |_| {}).await;
    next(&d, FaultKind::Die);
    let error = decode(&d, &Value::Null).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let refused = async || TcpStream::connect(d.address()).await.is_err();
    until(&d, |s| s.connections_open == 0).await;
    assert!(refused().await);
}

#[tokio::test]
async fn the_admin_endpoint_arms_clears_refuses_and_resumes() {
    let d = engine("d", |_| {}).await;
    let admin = d.admin_address();
    let fault = json!({"next": "all", "on": "decode", "kind": {"type": "status", "code": 429}});
    assert_eq!(post(admin, "/sim/admin/faults", &fault).await.status, 200);
    for _ in 0..3 {
        assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 429);
    }
    let state = get(d.address(), "/sim/admin/state").await.json();
    assert_eq!(state["faults"][0]["kind"]["code"], 429);
    let read: State = serde_json::from_value(state).unwrap();
    assert_eq!((read.requests_total, read.kv), (3, d.state().kv));
    assert_eq!(
        post(admin, "/sim/admin/clear", &json!({})).await.status,
        200
    );
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);

    let mut idle = Wire::open(d.address()).await;
    until(&d, |s| s.connections_open == 1).await;
    let refuse = json!({"kind": {"type": "refuse_connections"}});
    assert_eq!(post(admin, "/sim/admin/faults", &refuse).await.status, 200);
    assert_eq!(idle.closed().await, Some(ErrorKind::ConnectionReset));
    until(&d, |s| s.connections_open == 0).await;
    assert!(TcpStream::connect(d.address()).await.is_err());
    let resume = json!({"kind": {"type": "resume_connections"}});
    assert_eq!(post(admin, "/sim/admin/faults", &resume).await.status, 200);
    let mut attempts = 0;
    while TcpStream::connect(d.address()).await.is_err() {
        attempts += 1;
        assert!(attempts < 1000);
        tokio::task::yield_now().await;
    }
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);

    let unknown = json!({"kind": {"type": "nonsense"}});
    assert_eq!(post(admin, "/sim/admin/faults", &unknown).await.status, 400);
    let pace = post(admin, "/sim/admin/delays", &json!({"tokens": 3})).await;
    assert_eq!(pace.json()["tokens"], 3);
    assert_eq!(
        post(admin, "/sim/admin/delays", &json!({"tokens": 0}))
            .await
            .status,
        400
    );
    assert_eq!(
        post(admin, "/sim/admin/reset-counters", &json!({}))
            .await
            .status,
        200
    );
    let state = d.state();
    assert_eq!((state.requests_total, state.kv.computed_locally), (0, 0));
    assert!(d.log().is_empty());
    assert_eq!(get(admin, "/v1/models").await.status, 404);
}

#[tokio::test]
async fn kept_connections_survive_a_refusal_of_new_ones() {
    let d = engine("d", |_| {}).await;
    let mut kept = Wire::open(d.address()).await;
    until(&d, |s| s.connections_open == 1).await;
    d.refuse(true);
    let mut attempts = 0;
    while TcpStream::connect(d.address()).await.is_ok() {
        attempts += 1;
        assert!(attempts < 1000);
        tokio::task::yield_now().await;
    }
    kept.post(CHAT, &chat(json!({}))).await;
    assert_eq!(kept.answer().await.unwrap().status, 200);
}

#[tokio::test]
async fn a_scrape_fault_hits_metrics_and_nothing_else() {
    let d = engine("d", |_| {}).await;
    let kind = FaultKind::Status {
        code: 500,
        body: None,
        headers: BTreeMap::new(),
    };
    assert!(d.inject(Fault::next(1, On::Scrape, kind)));
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
    assert_eq!(get(d.address(), "/metrics").await.status, 500);
    assert_eq!(get(d.address(), "/metrics").await.status, 200);
}

#[tokio::test]
async fn random_faults_repeat_with_their_seed() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let d = engine("d", |_| {}).await;
        let kind = FaultKind::Status {
            code: 500,
            body: None,
            headers: BTreeMap::new(),
        };
        let mut fault = Fault::every(On::Any, kind);
        fault.probability = 0.5;
        fault.seed = 42;
        assert!(d.inject(fault));
        let mut statuses = Vec::new();
        for _ in 0..40 {
            statuses.push(decode(&d, &Value::Null).await.unwrap().status);
        }
        assert!(statuses.contains(&200) && statuses.contains(&500));
        runs.push(statuses);
    }
    assert_eq!(runs[0], runs[1]);
}
