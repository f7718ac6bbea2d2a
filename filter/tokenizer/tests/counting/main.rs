//! Counting with real tokenizers (trained with Hugging Face's own library on this project's
//! README, in the two shapes that served models have), and with files that are not what they
//! should be.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod odd;
#[cfg(not(target_family = "wasm"))]
mod properties;

use pd_tokenizer::Counter;
use pd_wire::tokenizer::TokenizerFile;
use serde_json::{Value, json};

/// Words, then bytes, as Llama 3 and Qwen; with a truncation and a padding that must not count.
const BYTES: &str = include_str!("../data/bytes.json");
/// The whole text at once and a fallback to bytes, as Llama 2.
const SENTENCE: &str = include_str!("../data/sentence.json");
/// What Python's `tokenizers` 0.23.3 counts.
const COUNTS: &str = include_str!("../data/counts.json");

/// A counter made of a file's text.
fn counter(text: &str) -> Result<Counter, String> {
    let file = TokenizerFile::parse(text.as_bytes()).map_err(|error| error.to_string())?;
    Counter::build(file).map_err(|error| error.to_string())
}

/// A small tokenizer: words of `a` and `b`.
fn small() -> Value {
    json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "BPE",
            "unk_token": null,
            "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3},
            "merges": ["a b", ["ab", "a"]],
        },
    })
}

#[test]
fn real_tokenizers_count_as_the_reference_does() {
    let (bytes, sentence) = (counter(BYTES).unwrap(), counter(SENTENCE).unwrap());
    let counts: Vec<Value> = serde_json::from_str(COUNTS).unwrap();
    assert_eq!(counts.len(), 32);
    for count in counts {
        let counter = if count["file"] == "bytes.json" {
            &bytes
        } else {
            &sentence
        };
        let text = count["text"].as_str().unwrap();
        assert_eq!(counter.count(text), count["tokens"].as_u64(), "{count}");
    }
}

#[test]
fn the_pushed_form_counts_the_same_and_is_shorter() {
    for text in [BYTES, SENTENCE] {
        let file = TokenizerFile::parse(text.as_bytes()).unwrap();
        assert_eq!(file.impossible_merge(), None);
        let pushed = file.to_json().unwrap();
        assert!(
            pushed.len() * 2 < text.len(),
            "{} of {}",
            pushed.len(),
            text.len()
        );
        assert_eq!(TokenizerFile::parse(&pushed).unwrap(), file);
    }
}

#[test]
fn counts_worked_out_by_hand() {
    let counter = counter(&small().to_string()).unwrap();
    // abab = ab·ab and ab·a first where an a follows: aba·b; "bb" has no merge.
    for (text, tokens) in [("", 0), ("a", 1), ("ab aba", 2), ("abab", 2), ("bb ab", 3)] {
        assert_eq!(counter.count(text), Some(tokens), "{text}");
    }
}
