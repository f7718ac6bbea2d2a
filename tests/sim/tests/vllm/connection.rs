//! Connections: the idle limit, keep-alive, bodies, stopping.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::client::{CHAT, Wire, chat, decode, engine, post, until};

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn an_idle_connection_is_closed_after_its_time() {
    let d = engine("d", |c| c.keep_alive_ms = 150).await;
    let mut fresh = Wire::open(d.address()).await;
    let mut used = Wire::open(d.address()).await;
    used.post(CHAT, &chat(json!({}))).await;
    assert_eq!(used.answer().await.unwrap().status, 200);
    let answered = Instant::now();
    assert_eq!(used.closed().await, None);
    assert!(
        answered.elapsed() >= Duration::from_millis(140),
        "{:?}",
        answered.elapsed()
    );
    // One that was never used is not closed, as uvicorn does.
    fresh.post(CHAT, &chat(json!({}))).await;
    assert_eq!(fresh.answer().await.unwrap().status, 200);
}

#[tokio::test]
async fn a_connection_at_work_is_not_idle() {
    let d = engine("d", |c| {
        c.keep_alive_ms = 50;
        c.token_interval_ms = 60.0;
    })
    .await;
    let mut wire = Wire::open(d.address()).await;
    for stream in [false, true] {
        let body = chat(json!({"max_tokens": 4, "stream": stream}));
        wire.post(CHAT, &body).await;
        let answer = wire.answer().await.unwrap();
        assert_eq!((answer.status, answer.broken), (200, None));
    }
}

#[tokio::test]
async fn an_error_keeps_the_connection() {
    let d = engine("d", |_| {}).await;
    let mut wire = Wire::open(d.address()).await;
    wire.send("POST", CHAT, &[JSON], "{").await;
    assert_eq!(wire.answer().await.unwrap().status, 400);
    wire.post(CHAT, &chat(json!({}))).await;
    assert_eq!(wire.answer().await.unwrap().status, 200);
    let state = d.state();
    assert_eq!((state.connections_total, state.connections_open), (1, 1));
}

#[tokio::test]
async fn large_and_chunked_bodies_arrive_and_too_large_ones_are_refused() {
    let d = engine("d", |c| c.body_limit = 4 << 20).await;
    let body = json!({"messages": [{"role": "user", "content": "x".repeat(3 << 20)}]});
    assert_eq!(post(d.address(), CHAT, &body).await.status, 200);
    let record = d.log().pop().unwrap();
    assert_eq!(
        (record.body, record.body_length),
        (None, body.to_string().len())
    );
    assert_eq!(record.body_hash.len(), 16);

    let mut wire = Wire::open(d.address()).await;
    let text = chat(json!({})).to_string();
    let (one, two) = text.split_at(100);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    wire.write(&format!("{head}{:x}\r\n{one}\r\n", one.len()))
        .await;
    wire.write(&format!("{:x}\r\n{two}\r\n0\r\n\r\n", two.len()))
        .await;
    assert_eq!(wire.answer().await.unwrap().status, 200);
    assert_eq!(d.log().pop().unwrap().body, Some(text));

    let mut wire = Wire::open(d.address()).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        8 << 20
    );
    wire.write(&head).await;
    wire.write(&"x".repeat((4 << 20) + 1)).await;
    assert_eq!(wire.answer().await.unwrap().status, 413);
}

#[tokio::test]
async fn expect_continue_is_answered() {
    let d = engine("d", |_| {}).await;
    let mut wire = Wire::open(d.address()).await;
    let text = chat(json!({})).to_string();
    wire.write(&format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n", text.len())).await;
    wire.read_until("100 Continue\r\n\r\n").await;
    wire.write(&text).await;
    wire.read_until("200 OK").await;
}

#[tokio::test]
async fn stopping_closes_ports_and_connections() {
    let d = engine("d", |_| {}).await;
    let mut wire = Wire::open(d.address()).await;
    until(&d, |s| s.connections_open == 1).await;
    let (address, admin) = (d.address(), d.admin_address());
    d.stop().await;
    wire.closed().await;
    assert!(TcpStream::connect(address).await.is_err());
    assert!(TcpStream::connect(admin).await.is_err());
}

#[tokio::test]
async fn delays_are_spent() {
    let d = engine("d", |c| {
        c.prefill_delay_ms = 20.0;
        c.prefill_ms_per_kilobyte = 20.0;
        c.token_interval_ms = 10.0;
    })
    .await;
    let begun = Instant::now();
    // 1.2 kilobytes and two gaps.
    assert_eq!(decode(&d, &Value::Null).await.unwrap().status, 200);
    assert!(
        begun.elapsed() >= Duration::from_millis(60),
        "{:?}",
        begun.elapsed()
    );
}
