//! Scraping: numbers, faults, pods that come and go.

use std::time::Duration;

use hyper::StatusCode;

use super::fixtures::{Engine, Envoy, Page, PodSpec, PodsFile, Running, config, eventually};

fn page(generated: u64) -> String {
    format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"other-name\"}} 2\n\
         vllm:num_requests_running{{engine=\"1\",model_name=\"other-name\"}} 3\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"other-name\"}} 1\n\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"other-name\"}} 0.25\n\
         vllm:kv_cache_usage_perc{{engine=\"1\",model_name=\"other-name\"}} 0.75\n\
         vllm:generation_tokens_total{{engine=\"0\",model_name=\"other-name\"}} {generated}\n\
         vllm:request_success_total{{engine=\"0\",finished_reason=\"stop\"}} 4\n\
         vllm:request_prefill_time_seconds_sum{{engine=\"0\"}} 0.5\n\
         vllm:request_prefill_time_seconds_count{{engine=\"0\"}} 10\n"
    )
}

#[tokio::test]
async fn the_numbers_of_a_page_become_a_sample_and_rates_come_with_time() {
    let engine = Engine::start(&page(1000)).await;
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address())]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let sample = envoy.until_sample("a sample", 0, |_| true).await;
    assert_eq!((sample.running, sample.waiting), (Some(5.0), Some(1.0)));
    assert_eq!(
        (sample.kv_usage, sample.prefill_ms),
        (Some(0.5), Some(50.0))
    );
    assert_eq!(
        (sample.generation_throughput, sample.drain_rate),
        (None, None)
    );
    assert_eq!(
        (sample.remote_running, sample.remote_decode_tokens),
        (None, None)
    );
    let idle = envoy
        .until_sample("a rate", 0, |pod| pod.generation_throughput.is_some())
        .await;
    assert_eq!(idle.generation_throughput, Some(0.0));
    engine.show(Page::Text(page(1500)));
    let busy = |rate: f64| (100.0..=500.0).contains(&rate);
    let rate = |pod: &pd_wire::samples::PodSample| pod.generation_throughput;
    envoy
        .until_sample("a busy rate", 0, |pod| rate(pod).is_some_and(busy))
        .await;
    // The engine restarts: 30 tokens since then, never a negative rate.
    engine.show(Page::Text(page(30)));
    let after = envoy.until_sample("the rate after", 0, |pod| {
        rate(pod).is_some_and(|r| r < 100.0)
    });
    assert!(rate(&after.await).unwrap() >= 0.0);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_failing_pod_keeps_its_ageing_sample_and_does_not_hold_up_the_others() {
    let (bad, good) = (Engine::start(&page(0)).await, Engine::start(&page(0)).await);
    let pods = PodsFile::new(&[
        PodSpec::new("a-bad", bad.address()),
        PodSpec::new("b-good", good.address()),
    ]);
    let envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.schedule.concurrency = 2;
    let agent = Running::start(config).await;
    envoy.until_sample("a sample", 0, |_| true).await;
    let faults = [
        ("status", Page::Status(StatusCode::INTERNAL_SERVER_ERROR)),
        (
            "page",
            Page::Text("<html>no metrics here</html>".to_owned()),
        ),
        ("timeout", Page::Stall),
    ];
    for (kind, fault) in faults {
        let seen = good.scrapes();
        bad.show(fault);
        let line = format!("pd_agent_scrapes_total{{result=\"{kind}\"}}");
        let mut counted = None;
        for _ in 0..2000 {
            counted = agent.metric(&line).await;
            if counted.is_some() {
                break;
            }
        }
        assert!(counted.is_some(), "{kind} was never counted");
        eventually("more scrapes", || {
            (good.scrapes() >= seen + 3).then_some(())
        })
        .await;
    }
    let old = |pod: &pd_wire::samples::PodSample| pod.age_ms > 1000;
    let kept = envoy.until_sample("an ageing sample", 0, old).await;
    assert_eq!(kept.running, Some(5.0));
    envoy
        .until_sample("a fresh sample beside it", 1, |pod| pod.age_ms < 500)
        .await;
    bad.show(Page::Text(page(0)));
    envoy
        .until_sample("a fresh sample again", 0, |pod| pod.age_ms < 500)
        .await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_recreated_pod_starts_with_new_counters_and_a_changed_one_keeps_its_own() {
    let engine = Engine::start(&page(1000)).await;
    let pod = PodSpec::new("p", engine.address());
    let pods = PodsFile::new(std::slice::from_ref(&pod));
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let rated = |pod: &pd_wire::samples::PodSample| pod.generation_throughput.is_some();
    envoy.until_sample("a rate", 0, rated).await;

    pods.replace(&[pod.clone().label("changed", "yes")]);
    envoy
        .until("the change", |held| (held.topologies == 2).then_some(()))
        .await;
    let sample = envoy.until_sample("a sample", 0, |_| true).await;
    assert!(rated(&sample), "an update resets nothing");

    pods.replace(&[pod.uid("another")]);
    envoy
        .until("the new pod", |held| (held.topologies == 3).then_some(()))
        .await;
    let sample = envoy.until_sample("its first sample", 0, |_| true).await;
    assert!(!rated(&sample), "{sample:?}");
    envoy.until_sample("its rate", 0, rated).await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn only_ready_pods_of_known_engines_are_scraped_on_their_metrics_port() {
    let engine = Engine::start(&page(0)).await;
    let (unready, foreign) = (Engine::start(&page(0)).await, Engine::start(&page(0)).await);
    let port = engine.address().port().to_string();
    let pods = PodsFile::new(&[
        // The model port is another one, where nothing listens.
        PodSpec::new("a", ([127, 0, 0, 1], 9).into()).label("model.aibrix.ai/metric-port", &port),
        PodSpec::new("b", unready.address()).unready(),
        PodSpec::new("c", foreign.address()).label("model.aibrix.ai/engine", "llama"),
    ]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    eventually("scrapes", || (engine.scrapes() >= 5).then_some(())).await;
    assert_eq!((unready.scrapes(), foreign.scrapes()), (0, 0));
    assert_eq!(agent.metric("pd_agent_scrape_pods ").await, Some(1.0));
    envoy.until_sample("the one sample", 0, |_| true).await;
    assert_eq!(
        envoy.held(|held| held.samples.as_ref().unwrap().pods.len()),
        1
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn the_interval_stretches_to_keep_the_budget_and_is_shown() {
    let engine = Engine::start(&page(0)).await;
    let names = ["a", "b", "c", "d"];
    let pods = PodsFile::new(&names.map(|name| PodSpec::new(name, engine.address())));
    let envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.schedule.budget = 8;
    let agent = Running::start(config).await;
    // Four pods at eight scrapes a second: each twice a second, instead of fifty times.
    envoy
        .until("all sampled", |held| {
            (held.samples.as_ref()?.pods.len() == 4).then_some(())
        })
        .await;
    assert_eq!(
        agent.metric("pd_agent_scrape_interval_seconds ").await,
        Some(0.5)
    );
    let (begun, before) = (tokio::time::Instant::now(), engine.scrapes());
    eventually("scrapes", || {
        (engine.scrapes() >= before + 12).then_some(())
    })
    .await;
    // 12 scrapes take 1.5 s; with jitter, at least most of it.
    assert!(
        begun.elapsed() > Duration::from_millis(1000),
        "{:?}",
        begun.elapsed()
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn sglang_and_tensorrt_llm_pods_are_scraped_by_their_own_names() {
    let sglang = "sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 2.0\n\
                  sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"1\"} 1.0\n\
                  sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"0\"} 4.0\n\
                  sglang:token_usage{dp_rank=\"0\",tp_rank=\"0\"} 0.5\n\
                  sglang:gen_throughput{dp_rank=\"0\",tp_rank=\"0\"} 60.0\n\
                  sglang:gen_throughput{dp_rank=\"1\",tp_rank=\"1\"} 30.0\n";
    let sglang = Engine::start(sglang).await;
    // Whoever reads the other page takes the iterations away from its true reader.
    let trtllm = "trtllm_kv_cache_utilization{pid=\"7\"} 0.25\n\
                  trtllm_request_success_total{finished_reason=\"stop\"} 3.0\n";
    let trtllm = Engine::at("/prometheus/metrics", trtllm).await;
    let engine = "model.aibrix.ai/engine";
    let pods = PodsFile::new(&[
        PodSpec::new("a", sglang.address()).label(engine, "sglang"),
        PodSpec::new("b", trtllm.address()).label(engine, "trtllm"),
    ]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let sample = envoy.until_sample("SGLang's", 0, |_| true).await;
    assert_eq!((sample.running, sample.waiting), (Some(3.0), Some(4.0)));
    assert_eq!(
        (sample.kv_usage, sample.generation_throughput),
        (Some(0.5), Some(90.0))
    );
    let sample = envoy.until_sample("TensorRT-LLM's", 1, |_| true).await;
    assert_eq!((sample.running, sample.kv_usage), (None, Some(0.25)));
    agent.stop().await.unwrap();
}
