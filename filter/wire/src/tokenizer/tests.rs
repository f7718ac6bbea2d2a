use super::*;
use crate::topology::{Stamp, WIRE_VERSION};
use std::borrow::Cow;

const SMALL: &str = r#"{"version":"1.0","truncation":{"max_length":4},"decoder":{"type":"Unknown"},"model":{"type":"BPE","dropout":0.5,"unk_token":"","end_of_word_suffix":"","vocab":{"a":0," ":1,"a ":2,"aa":3},"merges":["a a",["a"," "]]}}"#;

#[test]
fn what_counting_does_not_need_is_neither_read_nor_pushed() {
    let file = TokenizerFile::parse(SMALL.as_bytes()).unwrap();
    assert_eq!((&file.normalizer, &file.model.unk_token), (&None, &None));
    let merges = [("a", "a"), ("a", " ")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(file.model.merges, merges);
    assert_eq!(file.impossible_merge(), None);
    let pushed = String::from_utf8(file.to_json().unwrap()).unwrap();
    assert!(pushed.contains(r#""merges":["a a",["a"," "]]"#), "{pushed}");
    for gone in ["truncation", "decoder", "dropout", "version"] {
        assert!(!pushed.contains(gone), "{pushed}");
    }
    assert_eq!(TokenizerFile::parse(pushed.as_bytes()).unwrap(), file);
}

#[test]
fn the_version_line_of_old_merges_is_no_merge() {
    let old = SMALL.replace(r#"["a a","#, r##"["#version: 0.2","a a","##);
    assert_eq!(
        TokenizerFile::parse(old.as_bytes())
            .unwrap()
            .model
            .merges
            .len(),
        2
    );
}

#[test]
fn all_mistakes_are_named_at_once() {
    let wrong = SMALL
        .replace(r#""unk_token":"""#, r#""unk_token":"?""#)
        .replace(r#"["a a","#, r#"["aa aa","#)
        .replace(
            r#""model""#,
            r#""normalizer":{"type":"Prepend","prepend":""},"model""#,
        );
    let Err(TokenizerError::Mistakes(mistakes)) = TokenizerFile::parse(wrong.as_bytes()) else {
        panic!("mistakes")
    };
    for (mistake, part) in mistakes.iter().zip(["unk_token", "merges", "prepend"]) {
        assert!(mistake.contains(part), "{mistake}");
    }
    assert_eq!(mistakes.len(), 3);
}

#[test]
fn what_does_not_fit_a_message_is_refused() {
    let mut file = TokenizerFile::parse(SMALL.as_bytes()).unwrap();
    let token = "x".repeat(MAX_PUSHED);
    file.model.vocab.push((token, 4));
    assert!(matches!(file.to_json(), Err(TokenizerError::TooLarge { len }) if len > MAX_PUSHED));
}

fn stamp() -> Stamp {
    Stamp {
        version: WIRE_VERSION,
        agent: "agent".to_owned(),
        epoch: 3,
        sequence: 7,
    }
}

#[test]
fn a_message_is_a_line_and_the_file_as_it_is() {
    let message = Message {
        stamp: stamp(),
        model: "org/mo\"del\n".to_owned(),
        file: Cow::Borrowed(b"{\n}\n"),
    };
    let encoded = message.encode().unwrap();
    assert!(encoded.ends_with(b"\n{\n}\n"));
    assert_eq!(Message::parse(&encoded).unwrap(), message);
    // XXH64 of no bytes, from its specification.
    assert_eq!(digest(b""), 0xEF46_DB37_51D8_E999);
}

#[test]
fn messages_that_are_none_are_refused_with_a_reason() {
    let line = |model: &str, stamp: &Stamp| {
        let stamp = serde_json::to_string(stamp).unwrap();
        format!("{{\"model\":{model:?},\"stamp\":{stamp}}}\n{{}}")
    };
    let good = line("m", &stamp());
    assert!(Message::parse(good.as_bytes()).is_ok());
    let cases = [
        (String::new(), "the first line"),
        ("\n{}".to_owned(), "the first line"),
        (good.replace('\n', ""), "the first line"),
        (good.replace("\n{}", ""), "no line ends"),
        (line("", &stamp()), "1 to 1024 bytes"),
        (line(&"m".repeat(1025), &stamp()), "1 to 1024 bytes"),
        (
            line(
                "m",
                &Stamp {
                    epoch: 0,
                    ..stamp()
                },
            ),
            "stamp.epoch",
        ),
        (
            line(
                "m",
                &Stamp {
                    version: 9,
                    ..stamp()
                },
            ),
            "wire version 9",
        ),
        (
            format!("{good}{}", " ".repeat(MAX_MESSAGE)),
            "over the limit",
        ),
    ];
    for (text, reason) in cases {
        let error = Message::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
