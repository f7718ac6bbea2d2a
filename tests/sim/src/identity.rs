//! What a generated text says about its origin.
//!
//! The first generated token carries the whole identity in one piece, so it survives `max_tokens: 1`
//! and is one stream chunk. KV is identified by the hash of the prompt that was written into the
//! blocks the decode engine read: when `kv` differs from `prompt`, a real engine would have
//! answered with wrong text.

use std::fmt;

use xxhash_rust::xxh64::xxh64;

/// Hash of a prompt: XXH64, seed 0, over the bytes of the JSON value of `messages`, `prompt` or
/// `input` exactly as they stood in the body, without surrounding white space.
pub fn prompt_hash(raw: &[u8]) -> u64 {
    xxh64(raw, 0)
}

/// Where a text came from, as its first token tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Response id of the request that generated the text.
    pub request: String,
    /// Name of the engine that generated it.
    pub engine: String,
    /// [`prompt_hash`] of the prompt this request carried.
    pub prompt: u64,
    /// Hash of the prompt whose KV was used; `None` when the engine computed the prompt itself.
    pub kv: Option<u64>,
    /// `remote_request_id` the KV was pulled under.
    pub from: Option<String>,
}

impl Identity {
    /// The first identity in a text, if there is one. The text may be a whole response body, JSON
    /// or a stream: as long as request id and names need no escaping in JSON, neither does it.
    pub fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("[request=")?;
        let (inner, _) = rest.split_once(']')?;
        let mut words = inner.split(' ');
        let request = words.next()?.to_owned();
        let mut word =
            |key: &str| -> Option<&str> { words.next()?.strip_prefix(key)?.strip_prefix('=') };
        let engine = word("engine")?.to_owned();
        let prompt = u64::from_str_radix(word("prompt")?, 16).ok()?;
        let kv = match word("kv")? {
            "local" => None,
            hash => Some(u64::from_str_radix(hash, 16).ok()?),
        };
        let from = match word("from")? {
            "-" => None,
            id => Some(id.to_owned()),
        };
        Some(Self {
            request,
            engine,
            prompt,
            kv,
            from,
        })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[request={}", Plain(&self.request))?;
        write!(f, " engine={}", Plain(&self.engine))?;
        write!(f, " prompt={:016x}", self.prompt)?;
        match self.kv {
            Some(kv) => write!(f, " kv={kv:016x}")?,
            None => f.write_str(" kv=local")?,
        }
        match &self.from {
            Some(from) => write!(f, " from={}]", Plain(from)),
            None => f.write_str(" from=-]"),
        }
    }
}

/// A caller's id with the characters replaced that would end a word or the group.
struct Plain<'a>(&'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let splits = |c: char| c == ' ' || c == '[' || c == ']';
        let mut first = true;
        for piece in self.0.split(splits) {
            if !first {
                f.write_str("_")?;
            }
            first = false;
            f.write_str(piece)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_being_written_and_read() {
        for (kv, from) in [
            (None, None),
            (Some(7), Some("cmpl-x-0-1a2b3c4d".to_owned())),
        ] {
            let identity = Identity {
                request: "chatcmpl-1".to_owned(),
                engine: "decode-0".to_owned(),
                prompt: 0xdead_beef,
                kv,
                from,
            };
            let text = format!("{identity} t2 t3");
            assert_eq!(Identity::parse(&text), Some(identity));
        }
    }

    #[test]
    fn separators_in_a_request_id_do_not_break_the_group() {
        let identity = Identity {
            request: "a b]c".to_owned(),
            engine: "e".to_owned(),
            prompt: 1,
            kv: None,
            from: None,
        };
        let read = Identity::parse(&identity.to_string()).unwrap();
        assert_eq!(read.request, "a_b_c");
        assert_eq!(Identity::parse("no group here"), None);
    }
}
