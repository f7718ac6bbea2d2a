//! Whatever passes the checks counts any text without a panic.

use crate::counter;
use proptest::prelude::*;
use serde_json::{Value, json};

fn word() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "a", "b", " ", "  ", "▁", "é", "e\u{301}", "ﬁ", "\n", "x", "Ġ", "😀",
    ])
    .prop_map(str::to_owned)
}

fn normalizer() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        prop::sample::select(vec!["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
            .prop_map(|kind| json!({"type": kind})),
        word().prop_map(|text| json!({"type": "Prepend", "prepend": text})),
        (word(), prop_oneof![Just(String::new()), word()]).prop_map(
            |(from, to)| json!({"type": "Replace", "pattern": {"String": from}, "content": to})
        ),
    ];
    prop::collection::vec(leaf, 0..5)
        .prop_map(|steps| json!({"type": "Sequence", "normalizers": steps}))
}

fn pre_tokenizer() -> impl Strategy<Value = Value> {
    let behavior = || {
        prop::sample::select(vec![
            "Removed",
            "Isolated",
            "MergedWithPrevious",
            "MergedWithNext",
            "Contiguous",
        ])
    };
    let patterns = prop_oneof![
        word().prop_map(|text| json!({"String": text})),
        prop::sample::select(vec![
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+",
            "a*",
            "^",
            "$",
            r"\b",
            "(?=a)",
            "(?<=a)",
            r"(a|b)\K",
            "(?:)",
            "(a+)+b",
        ])
        .prop_map(|text| json!({"Regex": text})),
    ];
    let leaf = prop_oneof![
        prop::sample::select(vec!["Whitespace", "WhitespaceSplit", "Digits", "Punctuation"])
            .prop_map(|kind| json!({"type": kind})),
        (patterns, behavior(), any::<bool>()).prop_map(|(pattern, behavior, invert)| {
            json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
        }),
        (any::<bool>(), any::<bool>()).prop_map(|(space, regex)| {
            json!({"type": "ByteLevel", "add_prefix_space": space, "use_regex": regex})
        }),
        (prop::sample::select(vec!["first", "never", "always"]), any::<bool>()).prop_map(
            |(scheme, split)| {
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
            }
        ),
    ];
    prop::collection::vec(leaf, 0..4)
        .prop_map(|steps| json!({"type": "Sequence", "pretokenizers": steps}))
}

fn added() -> impl Strategy<Value = Value> {
    let token =
        (prop::collection::vec(word(), 1..3), any::<[bool; 4]>()).prop_map(|(content, flags)| {
            json!({"content": content.concat(), "single_word": flags[0], "lstrip": flags[1],
               "rstrip": flags[2], "normalized": flags[3]})
        });
    prop::collection::vec(token, 0..4).prop_map(Value::from)
}

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => word(),
        1 => any::<char>().prop_map(String::from),
        1 => r"\PC{0,8}",
        1 => r"[0-9a-zA-Z'.,;! \t\r\n]{0,12}",
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { ..ProptestConfig::default() })]

    #[test]
    fn nothing_that_passes_the_checks_panics(
        normalizer in normalizer(),
        pre_tokenizer in pre_tokenizer(),
        added_tokens in added(),
        flags in any::<[bool; 5]>(),
        texts in prop::collection::vec(text(), 1..4),
    ) {
        let option = |on: bool, text: &str| if on { json!(text) } else { Value::Null };
        let file = json!({
            "added_tokens": added_tokens, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "model": {
                "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "▁": 3, "<unk>": 4, "b</w>": 5,
                    "<0xC3>": 6, "<0xA9>": 7, "Ġ": 8, "Ġa": 9, " ": 10, "  ": 11},
                "merges": ["a b", "Ġ a", [" ", " "]],
                "unk_token": option(flags[0], "<unk>"), "end_of_word_suffix": option(flags[1], "</w>"),
                "fuse_unk": flags[2], "byte_fallback": flags[3], "ignore_merges": flags[4],
            },
        });
        // Some added tokens cannot be told apart once normalized.
        let Ok(counter) = counter(&file.to_string()) else { return Ok(()) };
        for text in texts {
            counter.count(&text);
        }
    }
}
