//! Vectors: verdicts worked out by hand from the grammar of `labels.Parse`.

use super::*;

/// Labels of a pod, `key=value` each.
fn labels(text: &str) -> Vec<(String, String)> {
    let pairs = text
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn selectors_hold_for_these_labels_and_not_for_those() {
    // Selector, labels it holds for, labels it does not hold for.
    let vectors: [(&str, &[&str], &[&str]); 32] = [
        ("", &["", "a=b"], &[]),
        (" \t ", &["", "a=b"], &[]),
        ("gpu", &["gpu=h100", "gpu="], &["", "cpu=x"]),
        ("!gpu", &["", "cpu=x"], &["gpu=h100", "gpu="]),
        (" ! gpu ", &["cpu=x"], &["gpu=h100"]),
        ("gpu=h100", &["gpu=h100"], &["gpu=H100", "gpu=", ""]),
        ("gpu==h100", &["gpu=h100"], &["gpu=a100", ""]),
        ("gpu = h100", &["gpu=h100"], &["gpu=a100"]),
        ("gpu!=h100", &["gpu=a100", "", "gpu="], &["gpu=h100"]),
        ("gpu=", &["gpu="], &["", "gpu=x"]),
        ("gpu!=", &["", "gpu=x"], &["gpu="]),
        ("a=,b", &["a= b=1"], &["a=1 b=1", "a=", "b=1"]),
        ("gpu in (h100)", &["gpu=h100"], &["gpu=a100", ""]),
        (
            "gpu in (h100, a100)",
            &["gpu=h100", "gpu=a100"],
            &["gpu=b", ""],
        ),
        ("gpu in(h100,a100)", &["gpu=a100"], &["gpu=l4"]),
        ("gpu notin (h100, a100)", &["gpu=b", ""], &["gpu=a100"]),
        ("gpu in ()", &["gpu="], &["", "gpu=x"]),
        ("gpu in (,)", &["gpu="], &["", "gpu=x"]),
        ("gpu in (a,,b)", &["gpu=", "gpu=a", "gpu=b"], &["gpu=c", ""]),
        ("gpu in (a,)", &["gpu=", "gpu=a"], &["gpu=b"]),
        ("gpu notin ()", &["", "gpu=x"], &["gpu="]),
        ("gpu in (a,a)", &["gpu=a"], &["gpu=b"]),
        (
            "x in (foo,,baz),y,z notin ()",
            &["x= y=1", "x=baz y= z=1"],
            &["x=foo", "x=foo y=1 z="],
        ),
        ("in in (in)", &["in=in"], &["in=notin", ""]),
        ("notin notin (in),in", &["in=1"], &["notin=in in=1", ""]),
        ("a=in,b==notin", &["a=in b=notin"], &["a=in b=in"]),
        (
            "gpus>4",
            &["gpus=5", "gpus=0008"],
            &["gpus=4", "gpus=x", "gpus=", ""],
        ),
        (
            "gpus < 4",
            &["gpus=3", "gpus=-1"],
            &["gpus=4", "gpus=99999999999999999999", ""],
        ),
        (
            "a=1,b!=2,!c,d",
            &["a=1 d=x", "a=1 b=3 d="],
            &["a=1 b=2 d=x", "a=1 c= d=x", "a=1"],
        ),
        ("a=1,a=2", &[], &["a=1", "a=2", ""]),
        (
            "model.aibrix.ai/engine=vllm",
            &["model.aibrix.ai/engine=vllm"],
            &["engine=vllm"],
        ),
        ("v=1.2-rc_3", &["v=1.2-rc_3"], &["v=1.2"]),
    ];
    for (text, holds, fails) in vectors {
        let selector = Selector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        for (set, expected) in [(holds, true), (fails, false)] {
            for pod in set {
                assert_eq!(
                    selector.matches(&labels(pod)),
                    expected,
                    "{text:?} for {pod:?}"
                );
            }
        }
    }
}

#[test]
fn mistakes_are_named() {
    let long_name = "n".repeat(64);
    let long_prefix = format!("{}/n", "p".repeat(254));
    let vectors: [(&str, &str); 34] = [
        ("=", "found \"=\", expected a label key"),
        ("==a", "found \"==\", expected a label key"),
        (",", "found \",\", expected a label key"),
        (",a", "found \",\", expected a label key"),
        ("a,", "found \"\", expected a label key"),
        ("a,,b", "found \",\", expected a label key"),
        ("!", "found \"\", expected a label key"),
        ("!!a", "found \"!\", expected a label key"),
        ("!a=b", "found \"=\", expected a comma or the end"),
        ("!a in (b)", "found \"in\", expected a comma or the end"),
        ("a b", "found \"b\", expected =, ==, !=, in, notin, > or <"),
        (
            "a IN (b)",
            "found \"IN\", expected =, ==, !=, in, notin, > or <",
        ),
        (
            "a ! b",
            "found \"!\", expected =, ==, !=, in, notin, > or <",
        ),
        ("a===b", "found \"=\", expected a label value"),
        ("a=!b", "found \"!\", expected a label value"),
        ("a=b c", "found \"c\", expected a comma or the end"),
        ("a=(b)", "found \"(\", expected a label value"),
        ("a=)", "found \")\", expected a comma or the end"),
        ("a in b", "found \"b\", expected ("),
        ("a in", "found \"\", expected ("),
        ("a in (b", "found \"\", expected a comma or )"),
        ("a in (b,", "found \"\", expected a comma or )"),
        ("a in (b c)", "found \"c\", expected a comma or )"),
        ("a in (b))", "found \")\", expected a comma or the end"),
        ("a in (=)", "found \"=\", expected a label value"),
        ("a in (b) c", "found \"c\", expected a comma or the end"),
        ("a>", "\"\" is no whole number"),
        ("a<x", "\"x\" is no whole number"),
        (
            "a>9223372036854775808",
            "\"9223372036854775808\" is no whole number",
        ),
        ("a=\"b\"", "\"\\\"b\\\"\" is no label value"),
        ("-a", "\"-a\" is no label key"),
        ("/a", "\"/a\" is no label key"),
        ("a/b/c", "\"a/b/c\" is no label key"),
        ("é", "\"é\" is no label key"),
    ];
    for (text, mistake) in vectors {
        let error = Selector::parse(text).map_or_else(|error| error.to_string(), |_| String::new());
        assert!(error.starts_with(mistake), "{text:?}: {error}");
    }
    for key in [&long_name, &long_prefix, "a_b/c", "a/", "a..b/c", "A/b"] {
        assert_eq!(
            Selector::parse(key),
            Err(SelectorError::Key(excerpt(key))),
            "{key}"
        );
    }
    for value in [&long_name, "-a", "a-", ".", "a/b", "'b'"] {
        let text = format!("k={value}");
        assert_eq!(
            Selector::parse(&text),
            Err(SelectorError::Value(excerpt(value)))
        );
    }
    assert!(Selector::parse(&"n".repeat(63)).is_ok());
    assert!(Selector::parse(&format!("{}/n", "p".repeat(253))).is_ok());
}

#[test]
fn length_requirements_and_values_are_bounded() {
    let list = |count: usize| vec!["a"; count].join(",");
    assert!(Selector::parse(&list(MAX_REQUIREMENTS)).is_ok());
    assert_eq!(
        Selector::parse(&list(MAX_REQUIREMENTS + 1)),
        Err(SelectorError::TooMany)
    );
    let set = |count: usize| format!("a in ({})", list(count));
    assert!(Selector::parse(&set(MAX_VALUES)).is_ok());
    assert_eq!(
        Selector::parse(&set(MAX_VALUES + 1)),
        Err(SelectorError::TooMany)
    );
    assert!(Selector::parse(&" ".repeat(MAX_LENGTH)).is_ok());
    assert_eq!(
        Selector::parse(&" ".repeat(MAX_LENGTH + 1)),
        Err(SelectorError::TooLong)
    );
}
