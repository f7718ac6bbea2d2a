//! Files that are not what they should be are refused with a reason, and never panic.

use crate::{BYTES, SENTENCE, counter, small};
use serde_json::{Value, json};

/// The small tokenizer with one value changed, by its path.
fn with(pointer: &str, value: Value) -> String {
    let mut file = small();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    file.pointer_mut(parent).unwrap()[key] = value;
    file.to_string()
}

fn refused(text: &str, reason: &str) {
    let error = counter(text).err().unwrap_or_default();
    assert!(
        error.contains(reason),
        "{error:?} does not say {reason:?} of {text}"
    );
}

#[test]
fn kinds_that_are_not_counted_with_are_refused_by_name() {
    refused(
        &with("/model/type", json!("WordPiece")),
        "unknown variant `WordPiece`",
    );
    refused(
        &with("/model/type", json!("Unigram")),
        "unknown variant `Unigram`",
    );
    refused(&with("/model/vocab", json!([["a", -1.5]])), "not Unigram");
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    refused(
        &with("/normalizer", precompiled),
        "unknown variant `Precompiled`",
    );
    refused(
        &with("/pre_tokenizer", json!({"type": "FixedLength"})),
        "unknown variant",
    );
    refused(
        &with("/pre_tokenizer", json!({"add_prefix_space": true})),
        "missing field `type`",
    );
    let regex = json!({"type": "Replace", "pattern": {"Regex": "^"}, "content": "x"});
    refused(&with("/normalizer", regex), "Regex is not counted with");
}

#[test]
fn merges_that_a_builder_trips_over_are_refused() {
    let cases = [
        // Cut off behind the prefix, the right part would have less than no bytes.
        (
            with("/model/continuing_subword_prefix", json!("####")),
            "make no token",
        ),
        // Longer than the longest token: beyond the builder's buffer.
        (with("/model/merges", json!(["aba ab"])), "make no token"),
        (with("/model/merges", json!(["b a"])), "out of vocabulary"),
        (with("/model/merges", json!(["a x"])), "out of vocabulary"),
        (with("/model/merges", json!(["ab"])), "not of two parts"),
        (with("/model/merges", json!(["a b c"])), "not of two parts"),
        (with("/model/merges", json!([["a"]])), "not of two parts"),
        (
            with("/model/merges", json!([["a", "b", "c"]])),
            "not of two parts",
        ),
        (
            with("/model/merges", json!([{"a": "b"}])),
            "a merge of two parts",
        ),
        (with("/model/merges", json!({})), "a list of merges"),
        (with("/model/vocab", json!({})), "0 entries"),
        (with("/model/vocab", json!({"a": -1})), "invalid value"),
        (
            with("/model/vocab", json!({"a": 4_294_967_296_u64})),
            "invalid value",
        ),
        (
            with("/model/unk_token", json!("[UNK]")),
            "not in model.vocab",
        ),
    ];
    for (text, reason) in cases {
        refused(&text, reason);
    }
    let error = counter(&with("/model/merges", json!(["b a"]))).unwrap_err();
    assert!(error.starts_with("model:"), "{error}");
}

#[test]
fn an_impossible_merge_is_found_before_anything_is_built() {
    let impossible = |merges: Value| {
        let text = with("/model/merges", merges);
        let file = pd_wire::tokenizer::TokenizerFile::parse(text.as_bytes()).unwrap();
        file.impossible_merge()
    };
    assert_eq!(impossible(json!(["a b", "ab a"])), None);
    assert!(
        impossible(json!(["a b", "b a"]))
            .unwrap()
            .contains("\"b\" and \"a\"")
    );
}

#[test]
fn patterns_and_sequences_are_bounded() {
    let split = |pattern: Value| {
        let split = json!({"type": "Split", "pattern": pattern, "behavior": "Isolated"});
        with("/pre_tokenizer", split)
    };
    refused(&split(json!({"Regex": "("})), "pre_tokenizer: ");
    refused(
        &split(json!({"Regex": "(".repeat(4000)})),
        "pre_tokenizer: ",
    );
    refused(
        &split(json!({"Regex": "(x{1000}){1000}"})),
        "pre_tokenizer: ",
    );
    refused(&split(json!({"Regex": ""})), "0 bytes");
    refused(&split(json!({"String": "x".repeat(4097)})), "4097 bytes");
    let mut deep = json!({"type": "NFC"});
    for _ in 0..4 {
        deep = json!({"type": "Sequence", "normalizers": [deep]});
    }
    refused(&with("/normalizer", deep), "at most");
    let wide = json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "Digits"}); 33]});
    refused(&with("/pre_tokenizer", wide), "33 steps");
    let nested = format!(
        "{}{}",
        r#"{"type":"Sequence","normalizers":["#.repeat(2000),
        "]}".repeat(2000)
    );
    let text = small()
        .to_string()
        .replace("\"normalizer\":null", &format!("\"normalizer\":{nested}"));
    refused(&text, "recursion limit");
}

#[test]
fn added_tokens_that_swallow_white_space_do_no_harm() {
    // One that takes the spaces behind it, and one that is nothing but spaces and takes those
    // before it: together they are beyond what the library copes with.
    let token = |content: &str, lstrip: bool, rstrip: bool| {
        json!({"id": 9, "content": content, "single_word": false, "lstrip": lstrip,
               "rstrip": rstrip, "normalized": false, "special": true})
    };
    let tokens = json!([token("<s>", false, true), token("  ", true, false)]);
    let counter = counter(&with("/added_tokens", tokens)).unwrap();
    assert_eq!(counter.count("a <s>    ab"), Some(5));
    // One that normalizes to nothing would be found everywhere, also inside characters.
    let mut file = small();
    file["normalizer"] = json!({"type": "Replace", "pattern": {"String": "x"}, "content": ""});
    let added = |content: &str| json!({"id": 9, "content": content, "normalized": true});
    file["added_tokens"] = json!([added("x")]);
    refused(&file.to_string(), "added_tokens: ");
}

#[test]
fn text_without_a_token_is_not_counted_as_shorter() {
    let mut file = small();
    file["model"]["vocab"]["?"] = json!(4);
    file["model"]["unk_token"] = json!("?");
    let known = counter(&file.to_string()).unwrap();
    assert_eq!(known.count("azza"), Some(4));
    file["model"]["fuse_unk"] = json!(true);
    assert_eq!(counter(&file.to_string()).unwrap().count("azza"), Some(3));
}

#[test]
fn every_cut_and_every_flipped_byte_is_an_error_or_harmless() {
    for text in [BYTES, SENTENCE] {
        let step = 997;
        for at in (0..text.len()).step_by(step) {
            if let Some(cut) = text.get(..at) {
                assert!(counter(cut).is_err(), "cut at {at}");
            }
            let mut bytes = text.as_bytes().to_vec();
            bytes[at] ^= 1 << (at % 7);
            // What is no UTF-8 is refused by the parser; what parses has to count without harm.
            let Ok(text) = String::from_utf8(bytes) else {
                continue;
            };
            if let Ok(counter) = counter(&text) {
                counter.count("The filter <s> 12 \u{e9}\u{1f600}  x");
            }
        }
    }
}
