use super::patch::{Edit, Lead, build};
use super::*;
use std::borrow::Cow;

fn read(endpoint: Endpoint, body: &str) -> Result<Scan, BodyError> {
    scan(endpoint, body.as_bytes())
}

fn chat(members: &str) -> Result<Scan, BodyError> {
    read(Endpoint::Chat, &format!(r#"{{"model":"m",{members}}}"#))
}

fn completion(members: &str) -> bool {
    let body = format!(r#"{{"model":"m",{members}}}"#);
    read(Endpoint::Completions, &body).unwrap().hands_over
}

#[test]
fn paths_name_endpoints_whatever_their_query() {
    assert_eq!(
        Endpoint::of_path("/v1/chat/completions?x=/v1/messages"),
        Endpoint::Chat
    );
    assert_eq!(Endpoint::of_path("/v1/completions"), Endpoint::Completions);
    assert_eq!(Endpoint::of_path("/v1/responses"), Endpoint::Responses);
    assert_eq!(Endpoint::of_path("/v1/messages"), Endpoint::Messages);
    assert_eq!(
        Endpoint::of_path("/v1/messages/count_tokens"),
        Endpoint::Other
    );
    assert_eq!(Endpoint::of_path("/v1/embeddings"), Endpoint::Other);
}

#[test]
fn the_model_is_decoded_and_must_be_a_name() {
    assert_eq!(
        read(Endpoint::Other, r#"{"mod\u0065l":"a\u00e9\n"}"#)
            .unwrap()
            .model,
        "aé\n"
    );
    assert_eq!(
        read(Endpoint::Chat, "{}").unwrap_err(),
        BodyError::ModelMissing
    );
    for body in [
        r#"{"model":""}"#,
        r#"{"model":null}"#,
        r#"{"model":1}"#,
        r#"{"model":["m"]}"#,
    ] {
        assert_eq!(
            read(Endpoint::Chat, body).unwrap_err(),
            BodyError::ModelNotAName,
            "{body}"
        );
    }
}

#[test]
fn stream_is_a_boolean_or_nothing() {
    assert!(chat(r#""stream":true"#).unwrap().stream);
    for quiet in [
        r#""stream":false"#,
        r#""stream":null"#,
        r#""x":{"stream":true}"#,
    ] {
        assert!(!chat(quiet).unwrap().stream, "{quiet}");
    }
    for odd in ["1", "\"true\"", "{}", "[true]"] {
        let body = format!(r#""stream":{odd}"#);
        assert_eq!(chat(&body).unwrap_err(), BodyError::StreamNotBoolean);
    }
}

#[test]
fn reserved_members_are_refused_on_every_endpoint_however_they_are_spelt() {
    for member in Member::ALL.iter().filter(|member| member.is_reserved()) {
        let name = member.name();
        let (first, rest) = name.split_at(1);
        let escaped = format!("\\u{:04x}{rest}", first.as_bytes()[0]);
        let all_escaped: String = name.bytes().map(|byte| format!("\\u{byte:04X}")).collect();
        for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Other] {
            for key in [name, &escaped, &all_escaped] {
                let body = format!(r#"{{"model":"m","x":1,"{key}":null}}"#);
                assert_eq!(
                    read(endpoint, &body).unwrap_err(),
                    BodyError::Reserved(name),
                    "{key}"
                );
            }
        }
        let nested = format!(r#""x":{{"{name}":1}}"#);
        assert!(chat(&nested).is_ok());
    }
    assert_eq!(
        Member::ALL
            .iter()
            .filter(|member| member.is_reserved())
            .count(),
        8
    );
}

#[test]
fn a_controlled_member_may_occur_once() {
    assert_eq!(
        chat(r#""max_tokens":1,"max_tok\u0065ns":1"#).unwrap_err(),
        BodyError::Duplicate("max_tokens")
    );
    assert!(chat(r#""user":1,"user":2"#).is_ok());
}

#[test]
fn what_is_not_one_json_object_is_refused_with_its_cause() {
    use BodyError::{Empty, Json, NotAnObject, NotUtf8};
    let at = |body: &[u8]| match scan(Endpoint::Chat, body).unwrap_err() {
        Json(error) => (error.at, error.what),
        other => panic!("{other:?}"),
    };
    assert_eq!(read(Endpoint::Chat, " \n").unwrap_err(), Empty);
    assert_eq!(read(Endpoint::Chat, "\u{feff}").unwrap_err(), Empty);
    assert_eq!(read(Endpoint::Chat, "[]").unwrap_err(), NotAnObject);
    assert_eq!(read(Endpoint::Chat, "\"{}\"").unwrap_err(), NotAnObject);
    assert_eq!(
        scan(Endpoint::Chat, b"{\"a\":\"\xff\"}").unwrap_err(),
        NotUtf8 { at: 6 }
    );
    assert_eq!(
        at(b"{\"model\":\"m\"} x"),
        (14, "unexpected text after the end")
    );
    assert_eq!(
        at(b"{\"model\":\"m\",}"),
        (13, "expected a key in double quotes")
    );
    assert_eq!(at(b"{\"model\":\"m\""), (12, "the text ends too early"));
    assert_eq!(at(b"{\"a\":\"\\ud800\"}"), (12, "unpaired surrogate"));
    assert_eq!(at(b"{\"a\":\"\n\"}"), (6, "control character in a string"));
    assert_eq!(at(b"{\"a\":01}"), (6, "expected ',' or '}'"));
    assert_eq!(at(b"{\"a\":[11,22,]}"), (12, "expected a value"));
}

#[test]
fn nesting_is_bounded_as_in_the_reference_parser() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let nest = |depth: usize| {
            let value = format!("{}1{}", open.repeat(depth - 1), close.repeat(depth - 1));
            format!(r#"{{"model":"m","x":{value}}}"#)
        };
        for depth in [MAX_DEPTH as usize, MAX_DEPTH as usize + 1] {
            let ours = read(Endpoint::Chat, &nest(depth)).is_ok();
            let theirs = serde_json::from_str::<serde_json::Value>(&nest(depth)).is_ok();
            assert_eq!((ours, theirs), (depth == 127, depth == 127));
        }
        assert!(read(Endpoint::Chat, &nest(100_000)).is_err());
    }
    // The same bound holds inside messages, which are walked differently.
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    assert!(chat(&format!(r#""messages":[{{"content":{deep}}}]"#)).is_err());
}

#[test]
fn only_one_sequence_hands_over() {
    for one in [
        r#""prompt":"a""#,
        r#""prompt":["a"]"#,
        r#""prompt":[1,2,3]"#,
        r#""prompt":[[1,2,3]]"#,
        r#""prompt":[]"#,
        r#""n":1,"best_of":null"#,
        r#""n":1.0,"prompt_embeds":null"#,
    ] {
        assert!(completion(one), "{one}");
    }
    let long = "11, ".repeat(40);
    let mixed = format!(r#""prompt":[{long}"a"]"#);
    for several in [
        r#""prompt":["a","b"]"#,
        r#""prompt":[[1],[2]]"#,
        r#""prompt":[1,"a"]"#,
        &mixed,
        r#""n":2"#,
        r#""best_of":2"#,
        r#""n":"1""#,
        r#""n":1e1"#,
        r#""prompt_embeds":["AAAA"]"#,
    ] {
        assert!(!completion(several), "{several}");
    }
    assert!(!chat(r#""n":3,"messages":[]"#).unwrap().hands_over);
    assert!(
        chat(r#""prompt":["a","b"]"#).unwrap().hands_over,
        "chat has no prompt"
    );
}

fn identity(endpoint: Endpoint, body: &str) -> String {
    let scanned = read(endpoint, body).unwrap();
    let pieces: Vec<_> = scanned
        .identity(body.as_bytes())
        .map(|piece| str::from_utf8(piece).unwrap())
        .collect();
    assert_eq!(
        pieces.iter().map(|piece| piece.len()).sum::<usize>(),
        scanned.text_bytes()
    );
    pieces.join("|")
}

#[test]
fn the_identity_is_the_raw_text_of_the_prompt_in_a_fixed_order() {
    let body = r#"{"messages":[{"content":"a\n","role":"user","x":1},{"role":"assistant","content":[ {"t":1} ]},
        {"role":"tool"},7,{"role":"x","role":"y","content":null}],"model":"m","prompt":"p","input":"i","system":"s","tools":[1]}"#;
    assert_eq!(
        identity(Endpoint::Chat, body),
        r#"[1]|"user"|"a\n"|"assistant"|[ {"t":1} ]|"tool"|"y"|null"#
    );
    assert_eq!(
        identity(Endpoint::Messages, body),
        r#""s"|[1]|"user"|"a\n"|"assistant"|[ {"t":1} ]|"tool"|"y"|null"#
    );
    assert_eq!(identity(Endpoint::Completions, body), r#""p""#);
    assert_eq!(identity(Endpoint::Responses, body), r#"[1]|"i""#);
    assert_eq!(identity(Endpoint::Other, body), "");
}

#[test]
fn pieces_are_bounded_and_later_text_still_counts() {
    let messages = vec![r#"{"content":12}"#; MAX_PIECES + 10].join(",");
    let body = format!(r#"{{"model":"m","messages":[{messages}]}}"#);
    let scanned = read(Endpoint::Chat, &body).unwrap();
    assert_eq!(scanned.identity(body.as_bytes()).count(), MAX_PIECES);
    assert_eq!(scanned.text_bytes(), 2 * (MAX_PIECES + 10));
}

#[test]
fn deleting_takes_one_comma_wherever_the_member_stands() {
    let delete = |members: &[Member], body: &str| {
        let scanned = read(Endpoint::Chat, body).unwrap();
        let edits: Vec<_> = members.iter().map(|member| Edit::Delete(*member)).collect();
        String::from_utf8(build(body.as_bytes(), &scanned, &edits)).unwrap()
    };
    use Member::{Echo, Model, N, Stream};
    assert_eq!(delete(&[Model], r#"{ "model" : "m" }"#), "{  }");
    assert_eq!(delete(&[N], r#"{"n":1 , "model":"m"}"#), r#"{"model":"m"}"#);
    assert_eq!(
        delete(&[N], r#"{"model":"m" , "n":1 }"#),
        r#"{"model":"m" }"#
    );
    assert_eq!(
        delete(&[N, Echo], r#"{"model":"m","n":1,"echo":2}"#),
        r#"{"model":"m"}"#
    );
    assert_eq!(
        delete(
            &[N, Echo, Stream],
            r#"{"n":1,"stream":true,"x":[],"echo":2,"model":"m"}"#
        ),
        r#"{"x":[],"model":"m"}"#
    );
    assert_eq!(
        delete(
            &[N, Echo, Stream],
            r#"{"n":1,"model":"m","stream":true,"echo":2}"#
        ),
        r#"{"model":"m"}"#
    );
    assert_eq!(delete(&[N, Model], r#"{"n":1,"model":"m"}"#), "{}");
}

#[test]
fn the_last_of_several_edits_counts_and_an_emptied_body_takes_no_comma() {
    let one = |json: &'static [u8]| Cow::Borrowed(json);
    let body = br#"{"model":"m"}"#;
    let scanned = scan(Endpoint::Chat, body).unwrap();
    let edits = [
        Edit::Set(Member::N, one(b"1")),
        Edit::Delete(Member::Model),
        Edit::Set(Member::N, one(b"2")),
    ];
    assert_eq!(build(body, &scanned, &edits), br#"{"n":2}"#);
    let edits = [
        Edit::Delete(Member::Model),
        Edit::Set(Member::Model, one(b"\"x\"")),
    ];
    assert_eq!(build(body, &scanned, &edits), br#"{"model":"x"}"#);
}

#[test]
fn a_prefix_replaces_everything_up_to_the_first_member() {
    let body = b" \n{ \"model\":\"m\"}";
    let scanned = scan(Endpoint::Chat, body).unwrap();
    let front = Lead::of(body, &scanned).with(b"\"a\":1");
    assert_eq!(front.replace, 3);
    assert_eq!(front.bytes, b" \n{\"a\":1,");
}

#[test]
fn messages_of_errors_name_the_field_and_never_the_text() {
    let error = chat(r#""x":"secret prompt" 1"#).unwrap_err();
    assert!(!error.to_string().contains("secret"), "{error}");
    assert_eq!(chat(r#""rid":"secret""#).unwrap_err().param(), Some("rid"));
    assert!(
        chat(r#""rid":"secret""#)
            .unwrap_err()
            .to_string()
            .contains("`rid`")
    );
}
