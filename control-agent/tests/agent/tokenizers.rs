//! Tokenizers: pushed once, again after a restart or a change, and never in the way of the rest.

use std::path::Path;

use hyper::StatusCode;
use pd_agent::tokenizers::Source;

use super::fixtures::{Envoy, PodsFile, Running, config};

fn write(path: &Path, token: &str) {
    let text = format!(
        r#"{{ "version": "1.0", "decoder": null,
             "model": {{"type": "BPE", "vocab": {{"{token}": 0}}, "merges": []}} }}"#
    );
    let next = path.with_extension("next");
    std::fs::write(&next, text).unwrap();
    std::fs::rename(next, path).unwrap();
}

/// A directory with a tokenizer for model `m`.
fn source() -> (tempfile::TempDir, Source) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    write(&path, "first");
    let model = "org/m".to_owned();
    (directory, Source { model, path })
}

async fn digest(envoy: &Envoy, what: &str, not: &str) -> String {
    envoy
        .until(what, |held| {
            let tokenizer = held.status.tokenizers.first()?;
            (tokenizer.digest != not).then(|| tokenizer.digest.clone())
        })
        .await
}

async fn rounds(envoy: &Envoy) {
    let before = envoy.held(|held| held.sampled);
    envoy
        .until("some rounds", |held| {
            (held.sampled > before + 5).then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_tokenizer_is_pushed_once_and_again_after_a_change_and_a_restart() {
    let (pods, (_directory, source)) = (PodsFile::new(&[]), source());
    let mut envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.tokenizers = vec![source.clone()];
    let agent = Running::start(config).await;
    let first = digest(&envoy, "a tokenizer", "").await;
    rounds(&envoy).await;
    assert_eq!(envoy.held(|held| held.tokenizer_statuses.clone()), [200]);

    // Unusable for a while: what is held stays.
    std::fs::write(&source.path, "{").unwrap();
    rounds(&envoy).await;
    write(&source.path, "second, and of another length");
    let second = digest(&envoy, "the changed tokenizer", &first).await;
    assert_eq!(
        envoy.held(|held| held.tokenizer_statuses.clone()),
        [200, 200]
    );

    envoy.restart().await;
    assert_eq!(
        digest(&envoy, "a tokenizer after the restart", "").await,
        second
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn what_the_envoy_holds_already_is_not_pushed() {
    let (pods, (_directory, source)) = (PodsFile::new(&[]), source());
    let envoy = Envoy::start().await;
    let mut config = config(&pods, &[&envoy]);
    config.tokenizers = vec![source.clone()];
    let agent = Running::start(config.clone()).await;
    digest(&envoy, "a tokenizer", "").await;
    agent.stop().await.unwrap();
    // The next life of the agent finds it there.
    let agent = Running::start(config.clone()).await;
    rounds(&envoy).await;
    assert_eq!(envoy.held(|held| held.tokenizer_statuses.clone()), [200]);
    agent.stop().await.unwrap();

    // Somebody else's, of a later epoch: gone above.
    envoy.held(|held| {
        held.status.tokenizers[0].digest = "0".to_owned();
        held.status.tokenizers[0].agent = "somebody".to_owned();
        held.status.tokenizers[0].epoch = u64::MAX / 2;
    });
    let agent = Running::start(config).await;
    digest(&envoy, "ours again", "0").await;
    assert_eq!(
        envoy.held(|held| held.tokenizer_statuses.clone()),
        [200, 409, 200]
    );
    assert_eq!(
        envoy.held(|held| held.status.tokenizers[0].epoch),
        u64::MAX / 2 + 1
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_refused_tokenizer_is_not_sent_again_and_stops_nothing_else() {
    let (pods, (_directory, source)) = (PodsFile::new(&[]), source());
    let envoy = Envoy::start().await;
    envoy.held(|held| held.refuse_tokenizer = Some(StatusCode::BAD_REQUEST));
    let mut config = config(&pods, &[&envoy]);
    config.tokenizers = vec![source.clone()];
    let agent = Running::start(config).await;
    envoy
        .until("a refusal", |held| held.tokenizer_statuses.first().copied())
        .await;
    rounds(&envoy).await;
    assert_eq!(envoy.held(|held| held.tokenizer_statuses.clone()), [400]);
    // Another content is another chance.
    write(&source.path, "second, and of another length");
    digest(&envoy, "the changed tokenizer", "").await;
    agent.stop().await.unwrap();
}
