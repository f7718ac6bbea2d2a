//! Request bodies: built once per size, made unique by a counter at the start of the prompt.

use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

/// Hexadecimal digits of the counter.
const COUNTER_DIGITS: usize = 16;
/// Members the client adds to the prefill leg it sends by hand.
const PREFILL_TAIL: &[u8] = br#","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#;
/// What a prompt consists of: words, and an escape every line as in real ones.
const LINE: &str =
    "Twelve brave foxes carried letters past the quiet mill before dawn, singing.\\n";

/// Chat requests of one size.
pub(crate) struct Prompt {
    client: Head,
    prefill: Head,
    /// The prompt behind the counter, to the end of `messages`.
    filler: Vec<u8>,
    stream: bool,
}

/// Which of the requests that carry a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// What a client of the gateway sends.
    Whole,
    /// Prefill leg by hand.
    Prefill,
    /// Decode leg by hand.
    Decode,
}

/// What comes before the counter.
struct Head {
    http: Vec<u8>,
    json: Vec<u8>,
}

/// Numbers that no earlier request used, nor one of an earlier run against the same server, whose
/// prefix index would know the prompt.
pub(crate) struct Counter(AtomicU64);

// === impl Counter ===

impl Counter {
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanoseconds = now.map_or(0, |d| d.as_nanos());
        Self(AtomicU64::new(
            u64::try_from(nanoseconds).unwrap_or_default(),
        ))
    }

    /// A number for the next request. Its bits are reversed: what changes most comes first, so that
    /// prompts differ from their first byte on.
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed).reverse_bits()
    }
}

// === impl Prompt ===

impl Prompt {
    /// Requests whose client body has exactly `size` bytes.
    ///
    /// # Errors
    /// When `size` has no room for the members around the prompt.
    pub(crate) fn new(model: &str, size: usize, stream: bool, host: &str) -> Result<Self> {
        let client = Head::new(model, stream, 16, host);
        let fixed = client.json.len() + COUNTER_DIGITS + r#""}]}"#.len();
        ensure!(size > fixed, "a body needs more than {fixed} bytes");
        let room = size - fixed;
        let mut filler = LINE.repeat(room / LINE.len());
        // Spaces rather than a cut line: a cut could split the escape.
        filler.extend(std::iter::repeat_n(' ', room % LINE.len()));
        filler.push_str(r#""}]"#);
        Ok(Self {
            client,
            prefill: Head::new(model, false, 1, host),
            filler: filler.into_bytes(),
            stream,
        })
    }

    /// The middle of every request, which is never copied.
    pub(crate) fn filler(&self) -> &[u8] {
        &self.filler
    }

    /// Whether answers are streamed.
    pub(crate) fn streams(&self) -> bool {
        self.stream
    }

    /// Writes what goes before the filler to `head` and what goes behind it to `tail`. `params` are
    /// the hand-over parameters of the decode leg.
    pub(crate) fn write(
        &self,
        leg: Leg,
        number: u64,
        params: &str,
        head: &mut Vec<u8>,
        tail: &mut Vec<u8>,
    ) {
        head.clear();
        tail.clear();
        match leg {
            Leg::Whole => tail.extend_from_slice(b"}"),
            Leg::Prefill => tail.extend_from_slice(PREFILL_TAIL),
            Leg::Decode => {
                tail.extend_from_slice(br#","kv_transfer_params":"#);
                tail.extend_from_slice(params.as_bytes());
                tail.extend_from_slice(b"}");
            }
        }
        let fixed = match leg {
            Leg::Whole | Leg::Decode => &self.client,
            Leg::Prefill => &self.prefill,
        };
        let length = fixed.json.len() + COUNTER_DIGITS + self.filler.len() + tail.len();
        head.extend_from_slice(&fixed.http);
        // Writing to a vector cannot fail.
        let _ = write!(head, "{length}\r\n\r\n");
        head.extend_from_slice(&fixed.json);
        let _ = write!(head, "{number:0COUNTER_DIGITS$x}");
    }
}

// === impl Head ===

impl Head {
    fn new(model: &str, stream: bool, tokens: u32, host: &str) -> Self {
        let http = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: "
        );
        let json = format!(
            r#"{{"model":"{model}","stream":{stream},"max_tokens":{tokens},"messages":[{{"role":"user","content":""#
        );
        Self {
            http: http.into_bytes(),
            json: json.into_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn body(prompt: &Prompt, leg: Leg, number: u64, params: &str) -> (String, usize) {
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        prompt.write(leg, number, params, &mut head, &mut tail);
        let whole = [&head, prompt.filler(), &tail].concat();
        let text = String::from_utf8(whole).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let (_, length) = head.split_once("content-length: ").unwrap();
        (body.to_owned(), length.parse().unwrap())
    }

    #[test]
    fn bodies_have_the_size_asked_for_and_are_json() {
        for size in [200, 8192, 1 << 20] {
            for stream in [false, true] {
                let prompt = Prompt::new("m", size, stream, "h").unwrap();
                let (text, length) = body(&prompt, Leg::Whole, 7, "");
                assert_eq!((text.len(), length), (size, size));
                let json: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(json["stream"], stream);
            }
        }
        assert!(Prompt::new("m", 50, false, "h").is_err());
    }

    #[test]
    fn legs_by_hand_carry_the_same_prompt_and_their_parameters() {
        let prompt = Prompt::new("m", 400, true, "h").unwrap();
        let (prefill, length) = body(&prompt, Leg::Prefill, 9, "");
        assert_eq!(prefill.len(), length);
        let (decode, length) = body(&prompt, Leg::Decode, 9, r#"{"remote_port":5}"#);
        assert_eq!(decode.len(), length);
        let prefill: Value = serde_json::from_str(&prefill).unwrap();
        let decode: Value = serde_json::from_str(&decode).unwrap();
        assert_eq!(prefill["messages"], decode["messages"]);
        assert_eq!(prefill["max_tokens"], 1);
        assert_eq!(prefill["stream"], false);
        assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!(decode["stream"], true);
        assert_eq!(decode["kv_transfer_params"]["remote_port"], 5);
    }

    #[test]
    fn prompts_differ_in_their_first_byte_more_often_than_not() {
        let counter = Counter::new();
        let first: Vec<u64> = (0..16).map(|_| counter.next() >> 60).collect();
        let mut distinct = first.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 16, "{first:x?}");
    }
}
