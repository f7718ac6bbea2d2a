//! What `/metrics` says about both legs.

use serde_json::json;

use crate::client::{CHAT, chat, decode, get, pair, post, prefill, until};

/// The value of a sample whose line starts so.
fn value(page: &str, sample: &str) -> f64 {
    let line = page.lines().find(|line| line.starts_with(sample));
    let line = line.unwrap_or_else(|| panic!("no {sample} in\n{page}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn the_pull_shows_on_the_decode_engine_and_the_computing_on_the_other() {
    let (p, d) = pair().await;
    let kv = prefill(&p).await;
    let page = get(p.address(), "/metrics").await;
    assert_eq!(
        page.headers["content-type"],
        "text/plain; version=1.0.0; charset=utf-8"
    );
    // Held KV is usage though nothing runs.
    assert!(value(&page.body, "vllm:kv_cache_usage_perc{") > 0.0);
    assert_eq!(value(&page.body, "vllm:num_requests_running{"), 0.0);
    let tokens = kv["remote_num_tokens"].as_f64().unwrap();
    let local = "vllm:prompt_tokens_by_source_total{source=\"local_compute\"";
    assert_eq!(value(&page.body, local), tokens);

    assert_eq!(decode(&d, &kv).await.unwrap().status, 200);
    let usage = get(p.address(), "/metrics").await.body;
    assert_eq!(value(&usage, "vllm:kv_cache_usage_perc{"), 0.0);
    let page = get(d.address(), "/metrics").await.body;
    for (sample, expected) in [
        ("vllm:external_prefix_cache_hits_total{", tokens),
        (
            "vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"",
            tokens,
        ),
        (
            "vllm:prompt_tokens_by_source_total{source=\"local_compute\"",
            0.0,
        ),
        ("vllm:prompt_tokens_total{", tokens),
        ("vllm:generation_tokens_total{", 3.0),
        ("vllm:request_success_total{finished_reason=\"length\"", 1.0),
        ("vllm:nixl_xfer_time_seconds_count{", 1.0),
        ("vllm:nixl_bytes_transferred_sum{", 196_608.0),
        ("vllm:time_to_first_token_seconds_count{", 1.0),
        ("vllm:request_prefill_time_seconds_count{", 1.0),
        ("vllm:request_prefill_time_seconds_bucket{le=\"0.3\"", 1.0),
        ("vllm:request_prefill_time_seconds_bucket{le=\"+Inf\"", 1.0),
        ("vllm:nixl_num_failed_transfers_total{", 0.0),
    ] {
        assert_eq!(value(&page, sample), expected, "{sample}");
    }
    assert!(page.contains("engine=\"0\",model_name=\"sim-model\""));
}

#[tokio::test]
async fn failures_and_departures_are_counted_as_the_real_one_does() {
    let (p, d) = pair().await;
    let mut kv = prefill(&p).await;
    kv["remote_engine_id"] = json!("other");
    assert_eq!(decode(&d, &kv).await.unwrap().status, 500);
    d.set_pace(serde_json::from_value(json!({"token_interval_ms": 3_600_000})).unwrap())
        .unwrap();
    let mut wire = crate::client::Wire::open(d.address()).await;
    wire.post(CHAT, &chat(json!({}))).await;
    until(&d, |s| s.running == 1).await;
    let page = get(d.address(), "/metrics").await.body;
    assert_eq!(value(&page, "vllm:num_requests_running{"), 1.0);
    drop(wire);
    until(&d, |s| s.aborted == 1).await;
    let page = get(d.address(), "/metrics").await.body;
    assert_eq!(value(&page, "vllm:nixl_num_failed_transfers_total{"), 1.0);
    assert_eq!(
        value(
            &page,
            "vllm:request_success_total{finished_reason=\"error\""
        ),
        1.0
    );
    assert_eq!(
        value(
            &page,
            "vllm:request_success_total{finished_reason=\"abort\""
        ),
        0.0
    );
    assert_eq!(value(&page, "vllm:num_requests_running{"), 0.0);
}

#[tokio::test]
async fn every_sample_belongs_to_a_family_and_parses() {
    let (p, _) = pair().await;
    post(p.address(), CHAT, &chat(json!({}))).await;
    let page = get(p.address(), "/metrics").await.body;
    let mut family = "";
    let mut samples = 0;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            family = rest.split_once(' ').unwrap().0;
        } else if !line.starts_with('#') {
            assert!(
                line.starts_with(family) && family.starts_with("vllm:"),
                "{line}"
            );
            let (_, number) = line.rsplit_once(' ').unwrap();
            assert!(number.parse::<f64>().unwrap().is_finite(), "{line}");
            samples += 1;
        }
    }
    assert!(samples > 100);
}
