//! Prompt lengths with a tokenizer: exact where an estimate would choose other pods.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use pd_e2e::{Pod, Programs, Stand, within};
use serde_json::json;

use super::lengths::{COMPLETE_DECODE, COMPLETE_PREFILL, COMPLETE_STANDARD};
use super::{BUCKETING, chat, decision, with};

/// A byte-level BPE, the kind that large models use, whose merges make each of the words `ab`,
/// `abc` and `abcd`, with the space before it, one token.
fn words() -> String {
    let letters = ('!'..='~').map(String::from);
    // How byte-level vocabularies write a space.
    let space = ["Ġ"];
    let merges = [
        ("a", "b"),
        ("ab", "c"),
        ("abc", "d"),
        ("Ġ", "abcd"),
        ("Ġ", "abc"),
        ("Ġ", "ab"),
    ];
    let merged = merges.map(|(left, right)| format!("{left}{right}"));
    let tokens = letters.chain(space.map(str::to_owned)).chain(merged);
    let vocab: BTreeMap<String, usize> = tokens.zip(0..).collect();
    let merges = merges.map(|(left, right)| format!("{left} {right}"));
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": true,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "vocab": vocab,
            "merges": merges,
        },
    })
    .to_string()
}

/// 8100 bytes of 2100 words: 2025 tokens by the usual four bytes each, so within the range that
/// ends at 2048, but 2100 of the tokenizer's.
fn more_than_it_seems() -> String {
    let (long, short) = ("abc ".repeat(1800), "ab ".repeat(300));
    (long + &short).trim_end().to_owned()
}

/// 8300 bytes of 2000 words: 2075 by the usual measure.
fn less_than_it_seems() -> String {
    let (long, short) = ("abcd ".repeat(300), "abc ".repeat(1700));
    (long + &short).trim_end().to_owned()
}

async fn expect(stand: &Stand, prompt: &str, pod: &str, words: Option<u64>) -> Result<()> {
    let answer = stand.send(chat(prompt)).await.expect(200);
    ensure!(answer.header("target-pod") == pod, answer.shown());
    if let Some(words) = words {
        let length: u64 = decision(&answer, "prompt_tokens").parse()?;
        // The role may count as a word or two.
        ensure!(length.abs_diff(words) <= 4, answer.shown());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pushed_tokenizer_decides_what_an_estimate_would_get_wrong() {
    let pods = || {
        [
            Pod::documented("prefill-0", &[COMPLETE_PREFILL]),
            Pod::documented("decode-0", &[COMPLETE_DECODE]),
            Pod::documented("standard", &[COMPLETE_STANDARD]),
        ]
    };
    let builder = Stand::builder("estimated").pods(pods());
    let stand = builder.envoy(with(&[BUCKETING])).start().await;
    expect(&stand, &more_than_it_seems(), "decode-0", None)
        .await
        .unwrap();
    expect(&stand, &less_than_it_seems(), "standard", None)
        .await
        .unwrap();
    drop(stand);

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, words()).unwrap();
    let argument = format!("my-model={}", file.display());
    let stand = Stand::builder("tokenizer")
        .pods(pods())
        .envoy(|envoy: &mut pd_e2e::EnvoyConfig| {
            with(&[BUCKETING])(envoy);
            envoy.wasm = Programs::counting_filter();
        })
        .agent_arguments(["--tokenizer".to_owned(), argument])
        .start()
        .await;
    // One worker after the other loads it.
    within(
        Duration::from_secs(20),
        "every worker counts words",
        || async {
            for _ in 0..6 {
                expect(&stand, &more_than_it_seems(), "standard", Some(2100)).await?;
                expect(&stand, &less_than_it_seems(), "decode-0", Some(2000)).await?;
            }
            anyhow::Ok(())
        },
    )
    .await;
    stand.settled(Duration::from_secs(5)).await;
}

#[test]
fn a_file_that_is_no_tokenizer_stops_the_agent_before_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let [file, pods] = ["tokenizer.json", "pods.yaml"].map(|name| folder.path().join(name));
    std::fs::write(&file, r#"{"version":"1.0","model":{"type":"Runes"}}"#).unwrap();
    std::fs::write(&pods, "{apiVersion: v1, kind: List, items: []}").unwrap();
    let mut agent = Command::new(Programs::agent());
    agent.arg("--pods-file").arg(&pods);
    agent.args(["--envoy", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"]);
    agent.arg("--tokenizer");
    agent.arg(format!("my-model={}", file.display()));
    let output = agent.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    println!("{error}");
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("--tokenizer") && error.contains("tokenizer.json"));
}
