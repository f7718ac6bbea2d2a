//! The prompt itself: what an engine turns into tokens.

use super::{Endpoint, Member, Scan};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Text of the prompt: tools as they were sent, then the texts of all messages, one a line. The
/// template that an engine puts around them is not known here. `None` when there is none.
///
/// Takes memory for the text alone, whatever else the messages hold.
pub fn text(endpoint: Endpoint, body: &[u8], scan: &Scan) -> Option<String> {
    let members: &[Member] = match endpoint {
        Endpoint::Chat => &[Member::Messages],
        Endpoint::Completions => &[Member::Prompt],
        Endpoint::Responses => &[Member::Input],
        Endpoint::Messages => &[Member::System, Member::Messages],
        Endpoint::Other => return None,
    };
    let mut out = String::new();
    if endpoint != Endpoint::Completions
        && let Some(tools) = scan.value(body, Member::Tools)
    {
        push(str::from_utf8(tools).ok()?, &mut out);
    }
    for member in members {
        if let Some(value) = scan.value(body, *member) {
            let mut json = serde_json::Deserializer::from_slice(value);
            Texts(&mut out).deserialize(&mut json).ok()?;
        }
    }
    (!out.is_empty()).then_some(out)
}

/// Number of tokens of a prompt that is given as token ids. `None` for all others.
pub fn token_ids(endpoint: Endpoint, body: &[u8], scan: &Scan) -> Option<u64> {
    if endpoint != Endpoint::Completions {
        return None;
    }
    let list = scan.value(body, Member::Prompt)?.strip_prefix(b"[")?;
    let first = list.trim_ascii_start().first()?;
    if !first.is_ascii_digit() {
        return None;
    }
    let commas = memchr::memchr_iter(b',', list).count();
    u64::try_from(commas).ok()?.checked_add(1)
}

/// Gathers a text; or of a list, a message or a part of one, the texts in it.
struct Texts<'o>(&'o mut String);

/// Where the texts of a message stand.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Place {
    Content,
    Text,
    #[serde(other)]
    Elsewhere,
}

impl<'de> DeserializeSeed<'de> for Texts<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Texts<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        push(text, self.0);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element_seed(Texts(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(place) = members.next_key()? {
            match place {
                Place::Content | Place::Text => members.next_value_seed(Texts(self.0))?,
                Place::Elsewhere => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
}

fn push(text: &str, out: &mut String) {
    if !out.is_empty() {
        out.push('\n');
    }
    out.push_str(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::scan;

    fn read(endpoint: Endpoint, rest: &str) -> (Option<String>, Option<u64>) {
        let body = format!(r#"{{"model":"m",{rest}}}"#);
        let scan = scan(endpoint, body.as_bytes()).unwrap();
        let body = body.as_bytes();
        (
            text(endpoint, body, &scan),
            token_ids(endpoint, body, &scan),
        )
    }

    #[test]
    fn the_text_is_what_the_messages_say_and_not_the_json_around_it() {
        use Endpoint::{Chat, Completions, Messages, Other, Responses};
        let parts = r#"[{"type":"text","text":"a\"b"},{"type":"image_url","image_url":{"url":"data:x"}},{"type":"text","text":"c"}]"#;
        for (endpoint, rest, text) in [
            (
                Chat,
                r#""messages":[{"role":"user","content":"a\n\u00e9"}]"#.to_owned(),
                Some("a\né"),
            ),
            (
                Chat,
                format!(r#""messages":[{{"role":"system","content":"s"}},{{"content":{parts}}}]"#),
                Some("s\na\"b\nc"),
            ),
            (
                Chat,
                r#""messages":[{"x":[{"content":"no"},1,{"":{}}],"content":"c","n":[-1,0.5,true]}]"#
                    .to_owned(),
                Some("c"),
            ),
            (
                Chat,
                r#""messages":[{"content":null}],"tools":[{"type": "function"}]"#.to_owned(),
                Some(r#"[{"type": "function"}]"#),
            ),
            (Chat, r#""messages":[],"prompt":"no""#.to_owned(), None),
            (
                Completions,
                r#""prompt":"one","tools":["no"]"#.to_owned(),
                Some("one"),
            ),
            (Completions, r#""prompt":["one"]"#.to_owned(), Some("one")),
            (Responses, r#""input":"i""#.to_owned(), Some("i")),
            (
                Responses,
                format!(r#""input":[{{"role":"user","content":{parts}}}]"#),
                Some("a\"b\nc"),
            ),
            (
                Messages,
                format!(r#""messages":[{{"role":"user","content":{parts}}}],"system":"s""#),
                Some("s\na\"b\nc"),
            ),
            (Other, r#""input":"i""#.to_owned(), None),
        ] {
            assert_eq!(read(endpoint, &rest).0.as_deref(), text, "{rest}");
        }
    }

    #[test]
    fn token_ids_are_counted_without_a_tokenizer() {
        use Endpoint::{Chat, Completions};
        for (endpoint, rest, tokens) in [
            (Completions, r#""prompt":[1,22, 333]"#, Some(3)),
            (Completions, r#""prompt":[ 0 ]"#, Some(1)),
            (Completions, r#""prompt":[]"#, None),
            (Completions, r#""prompt":[[1,2]]"#, None),
            (Completions, r#""prompt":["1,2"]"#, None),
            (Completions, r#""prompt":"1,2""#, None),
            (Chat, r#""prompt":[1,2],"messages":[]"#, None),
        ] {
            assert_eq!(read(endpoint, rest).1, tokens, "{rest}");
        }
    }
}
