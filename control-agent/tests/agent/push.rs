//! Pushes: acknowledgement, epochs, restarts, refusals, two agents.

use std::time::Duration;

use hyper::StatusCode;
use pd_agent::push::Credentials;

use super::fixtures::{Engine, Envoy, PodSpec, PodsFile, Running, config};

const BUSY: &str = "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3\n";

#[tokio::test]
async fn topology_and_samples_arrive_and_the_agent_is_ready_once_they_did() {
    let engine = Engine::start(BUSY).await;
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address()).role("prefill")]);
    let envoy = Envoy::start().await;
    envoy.held(|held| held.forced = Some(StatusCode::SERVICE_UNAVAILABLE));
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy
        .until("refused pushes", |held| {
            (held.statuses.len() > 1).then_some(())
        })
        .await;
    assert_eq!(agent.get("/healthz").await.0, 200);
    assert_eq!(agent.get("/readyz").await.0, 503);
    envoy.held(|held| held.forced = None);
    let sample = envoy
        .until_sample("a sample", 0, |pod| pod.running == Some(3.0))
        .await;
    assert_eq!((sample.waiting, sample.kv_usage), (None, None));
    assert_eq!(
        envoy.held(|held| held.addresses()),
        [engine.address().to_string()]
    );
    assert_eq!(agent.get("/readyz").await.0, 200);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn an_unchanged_topology_is_pushed_once_and_samples_at_every_refresh() {
    let engine = Engine::start(BUSY).await;
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address())]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy
        .until("many samples", |held| (held.sampled >= 20).then_some(()))
        .await;
    assert_eq!(envoy.held(|held| held.topologies), 1);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_restarted_envoy_gets_everything_again() {
    let engine = Engine::start(BUSY).await;
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address())]);
    let (mut one, other) = (Envoy::start().await, Envoy::start().await);
    let agent = Running::start(config(&pods, &[&one, &other])).await;
    one.until_sample("a sample", 0, |_| true).await;
    other.until_sample("a sample", 0, |_| true).await;
    one.restart().await;
    one.until_sample("a sample after the restart", 0, |_| true)
        .await;
    assert_eq!(one.held(|held| held.addresses().len()), 1);
    // Another Envoy's restart is nothing to this one.
    assert_eq!(other.held(|held| held.topologies), 1);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn an_envoy_that_lost_its_snapshot_but_not_its_connections_gets_everything_again() {
    let engine = Engine::start(BUSY).await;
    let pods = PodsFile::new(&[PodSpec::new("p", engine.address())]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy.until_sample("a sample", 0, |_| true).await;
    envoy.held(|held| {
        held.topology = None;
        held.samples = None;
        held.statuses.clear();
    });
    envoy.until_sample("a sample again", 0, |_| true).await;
    // Samples refused, topology and samples accepted: no attempt was wasted.
    assert_eq!(
        envoy.held(|held| held.statuses[..3].to_vec()),
        [409, 200, 200]
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_new_process_wins_over_its_dead_predecessor() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    // Far above the wall clock's seconds.
    envoy.feed_from("predecessor", u64::MAX / 2);
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy
        .until("samples of ours", |held| {
            held.samples.is_some().then_some(())
        })
        .await;
    let stamp = envoy.held(|held| held.topology.clone().unwrap().stamp);
    assert_eq!(
        (stamp.agent.as_str(), stamp.epoch),
        ("agent-under-test", u64::MAX / 2 + 1)
    );
    assert_eq!(
        envoy.held(|held| held.statuses[..3].to_vec()),
        [409, 200, 200]
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn another_agent_is_counted_and_topped() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    envoy
        .until("samples", |held| held.samples.as_ref().map(drop))
        .await;
    for epoch in [u64::MAX / 4, u64::MAX / 3] {
        envoy.feed_from("rival", epoch);
        envoy
            .until("taken back", |held| {
                let stamp = &held.topology.as_ref()?.stamp;
                (stamp.agent == "agent-under-test" && stamp.epoch == epoch + 1).then_some(())
            })
            .await;
    }
    let target = envoy.url().replace("http://", "");
    let line = format!("pd_agent_takeovers_total{{target=\"{target}\"}}");
    assert_eq!(agent.metric(&line).await, Some(2.0));
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn two_agents_that_feed_one_envoy_both_go_on_and_count_each_other() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let mut rival = config(&pods, &[&envoy]);
    rival.agent_id = "rival".to_owned();
    let agents = [
        Running::start(config(&pods, &[&envoy])).await,
        Running::start(rival).await,
    ];
    let target = envoy.url().replace("http://", "");
    let line = format!("pd_agent_takeovers_total{{target=\"{target}\"}}");
    for agent in &agents {
        let mut takeovers = 0.0;
        for _ in 0..400 {
            takeovers = agent.metric(&line).await.unwrap_or(0.0);
            if takeovers >= 3.0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        assert!(takeovers >= 3.0, "{takeovers} takeovers");
    }
    for agent in agents {
        agent.stop().await.unwrap();
    }
}

#[tokio::test]
async fn refusals_slow_the_agent_down_and_do_not_end_it() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    for status in [400, 413, 426, 500] {
        let status = StatusCode::from_u16(status).unwrap();
        envoy.held(|held| {
            held.forced = Some(status);
            held.statuses.clear();
        });
        envoy
            .until("refused", |held| (held.statuses.len() >= 2).then_some(()))
            .await;
        envoy.held(|held| {
            held.forced = None;
            held.samples = None;
        });
        envoy
            .until("accepted", |held| held.samples.as_ref().map(drop))
            .await;
    }
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_rotated_token_is_read_again_after_a_401() {
    let pods = PodsFile::new(&[]);
    let envoy = Envoy::start().await;
    envoy.held(|held| held.token = Some("first".to_owned()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "first\n").unwrap();
    let mut config = config(&pods, &[&envoy]);
    config.credentials = Credentials::File(path.clone());
    let agent = Running::start(config).await;
    envoy
        .until("accepted", |held| held.samples.as_ref().map(drop))
        .await;
    envoy.held(|held| {
        held.token = Some("second".to_owned());
        held.samples = None;
    });
    envoy
        .until("refused", |held| {
            (held.statuses.last() == Some(&401)).then_some(())
        })
        .await;
    std::fs::write(&path, "second").unwrap();
    envoy
        .until("accepted again", |held| held.samples.as_ref().map(drop))
        .await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn an_envoy_that_comes_late_is_fed_soon() {
    let pods = PodsFile::new(&[]);
    let mut envoy = Envoy::start().await;
    envoy.stop().await;
    let agent = Running::start(config(&pods, &[&envoy])).await;
    let target = envoy.url().replace("http://", "");
    let line = format!(
        "pd_agent_pushes_total{{target=\"{target}\",kind=\"topology\",result=\"connect\"}}"
    );
    let mut tried = 0.0;
    // Long enough for the waits to have grown to their limit.
    for _ in 0..200 {
        tried = agent.metric(&line).await.unwrap_or(0.0);
        if tried >= 5.0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(tried >= 5.0, "{tried} attempts");
    envoy.restart().await;
    let back = tokio::time::Instant::now();
    envoy
        .until("fed", |held| held.samples.as_ref().map(drop))
        .await;
    assert!(
        back.elapsed() < Duration::from_secs(3),
        "{:?}",
        back.elapsed()
    );
    agent.stop().await.unwrap();
}
