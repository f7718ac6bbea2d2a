//! What `/metrics` says about both legs.

use serde_json::json;

use crate::pair::{Pair, answer, leg, send};
use crate::wire::{get, until};

/// The sum of the samples of this name with these labels.
fn sum(page: &str, name: &str, labels: &str) -> f64 {
    let values: Vec<f64> = page
        .lines()
        .filter(|line| line.starts_with(&format!("{name}{{")) && line.contains(labels))
        .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
        .collect();
    assert!(!values.is_empty(), "no {name} with {labels} in\n{page}");
    values.iter().sum()
}

#[tokio::test]
async fn the_queues_of_both_legs_show() {
    let (pair, port) = Pair::start(|config| config.prefill_delay_ms = 600_000.0).await;
    let waiting = send(&pair.p, &leg(port, 1, json!({})));
    let (prefill, decode) = (
        send(&pair.p, &leg(port, 2, json!({}))),
        send(&pair.d, &leg(port, 2, json!({}))),
    );
    until(&pair.p, |s| s.running == 1 && s.waiting == 1).await;
    let page = get(pair.p.address(), "/metrics").await.body;
    let role = "engine_type=\"prefill\",pp_rank=\"0\",tp_rank=\"0\",model_name=\"sim-model\"";
    for (name, expected) in [
        ("sglang:num_running_reqs", 1.0),
        ("sglang:num_queue_reqs", 0.0),
        ("sglang:num_prefill_bootstrap_queue_reqs", 1.0),
        ("sglang:num_prefill_inflight_queue_reqs", 0.0),
    ] {
        assert_eq!(sum(&page, name, role), expected, "{name}");
    }
    assert!(sum(&page, "sglang:token_usage", role) > 0.0);
    let page = get(pair.d.address(), "/metrics").await.body;
    let role = "engine_type=\"decode\"";
    assert_eq!(
        sum(&page, "sglang:num_decode_transfer_queue_reqs", role),
        1.0
    );
    assert_eq!(sum(&page, "sglang:num_running_reqs", role), 0.0);
    for sent in [waiting, prefill, decode] {
        sent.abort();
    }
    pair.idle().await;
}

#[tokio::test]
async fn finished_requests_are_counted() {
    let (pair, port) = Pair::start(|config| config.tokens = 3).await;
    let prefill = send(&pair.p, &leg(port, 1, json!({"max_tokens": 1})));
    assert_eq!(
        answer(send(&pair.d, &leg(port, 1, json!({})))).await.status,
        200
    );
    assert_eq!(answer(prefill).await.status, 200);
    for (engine, tokens) in [(&pair.p, 1.0), (&pair.d, 3.0)] {
        let page = get(engine.address(), "/metrics").await.body;
        for (name, labels, expected) in [
            ("sglang:num_requests_total", "", 1.0),
            ("sglang:generation_tokens_total", "", tokens),
            ("sglang:realtime_tokens_total", "mode=\"decode\"", tokens),
            ("sglang:time_to_first_token_seconds_count", "", 1.0),
            (
                "sglang:per_stage_req_latency_seconds_count",
                "stage=\"prefill_forward\"",
                1.0,
            ),
            ("sglang:num_aborted_requests_total", "", 0.0),
            ("sglang:gen_throughput", "", 0.0),
        ] {
            assert_eq!(sum(&page, name, labels), expected, "{name}");
        }
    }
}

#[tokio::test]
async fn each_rank_has_its_series_and_replicas_share_the_requests() {
    let (pair, port) = Pair::start(|config| {
        config.dp_size = 2;
        config.tp_size = 2;
    })
    .await;
    let sent: Vec<_> = (1..=3)
        .map(|room| send(&pair.p, &leg(port, room, json!({}))))
        .collect();
    until(&pair.p, |s| s.waiting == 3).await;
    let page = get(pair.p.address(), "/metrics").await.body;
    let name = "sglang:num_prefill_bootstrap_queue_reqs";
    for (rank, expected) in [("0", 2.0), ("1", 2.0), ("2", 1.0), ("3", 1.0)] {
        assert_eq!(sum(&page, name, &format!("tp_rank=\"{rank}\"")), expected);
    }
    assert_eq!(sum(&page, name, "dp_rank=\"1\""), 2.0);
    for sent in sent {
        sent.abort();
    }
}
