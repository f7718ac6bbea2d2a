//! What an engine says a prompt came to.

use crate::request::cursor::{Cursor, JsonError};

/// Tokens of the prompt by the `usage` of a reply: `prompt_tokens`, or `input_tokens` as the
/// responses and messages APIs call them. `None` when the reply does not say.
///
/// Reads no further than `usage`: vLLM writes it before the hand-over, which is the long part.
pub fn prompt_tokens(reply: &[u8]) -> Option<u64> {
    let usage = member(reply, &[b"usage"])?;
    let count = member(usage, &[b"prompt_tokens", b"input_tokens"])?;
    str::from_utf8(count).ok()?.parse().ok()
}

/// The value of the first member of an object with one of these names.
fn member<'t>(object: &'t [u8], names: &[&[u8]]) -> Option<&'t [u8]> {
    /// Ends the walk: found, or no JSON.
    struct Stop;
    impl From<JsonError> for Stop {
        fn from(_: JsonError) -> Self {
            Self
        }
    }
    let mut cursor = Cursor::new(object);
    let mut found = None;
    // An object walked to its end has no such member; one that ends otherwise may be no JSON.
    let _stopped = cursor.object(0, |cursor, key| {
        let wanted = names.contains(&cursor.slice(key.inner()));
        let value = cursor.value(1)?;
        if wanted {
            found = Some(value);
            return Err(Stop);
        }
        Ok(())
    });
    object.get(found?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_tokens_are_read_under_both_names_wherever_usage_stands() {
        for (reply, tokens) in [
            (
                r#"{"id":"x","usage":{"prompt_tokens":812,"total_tokens":813},"kv":[1,"#,
                Some(812),
            ),
            (
                r#" {"usage" : {"output_tokens":1, "input_tokens" : 7 } }"#,
                Some(7),
            ),
            (
                r#"{"choices":[{"usage":{"prompt_tokens":1}}],"usage":{"prompt_tokens":2}}"#,
                Some(2),
            ),
            (r#"{"usage":{"prompt_tokens":0}}"#, Some(0)),
            (r#"{"usage":{"prompt_tokens":-1}}"#, None),
            (r#"{"usage":{"prompt_tokens":1.5}}"#, None),
            (r#"{"usage":{"prompt_tokens":"9"}}"#, None),
            (r#"{"usage":{"total_tokens":9}}"#, None),
            (r#"{"usage":null}"#, None),
            (r#"{"usage":{"prompt_tokens":9"#, None),
            (r#"{"id":"x"}"#, None),
            ("[]", None),
            ("", None),
        ] {
            assert_eq!(prompt_tokens(reply.as_bytes()), tokens, "{reply}");
        }
        assert_eq!(prompt_tokens(b"{\"\xff\":"), None);
    }
}
