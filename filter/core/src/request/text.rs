//! The inside of JSON strings: finding the bytes that matter, resolving escapes.

use wide::u8x16;

/// Bytes looked at together.
const BLOCK: usize = 16;

/// One bit (the first byte's is the lowest) for every byte that is `"`, `\` or a control character.
#[inline]
fn marks(block: &[u8; BLOCK]) -> u32 {
    let block = u8x16::from(*block);
    let control = block.min(u8x16::splat(0x1f)).simd_eq(block);
    let quote = block.simd_eq(u8x16::splat(b'"'));
    let slash = block.simd_eq(u8x16::splat(b'\\'));
    (control | quote | slash).to_bitmask()
}

/// Blocks without a mark after which the wide loop takes over; most strings end before.
const SHORT_BLOCKS: usize = 16;

/// Number of leading bytes that may stand in a JSON string: plain ones and two-byte escapes.
///
/// `escaped` is set when there is an escape. What stops the run (a quote, a control character, a
/// `\u`, the end) is for the caller to judge.
#[inline]
pub(crate) fn text_run(bytes: &[u8], escaped: &mut bool) -> usize {
    let mut run = 0;
    let mut plain_blocks = 0;
    while let Some(block) = bytes.get(run..).and_then(<[u8]>::first_chunk::<BLOCK>) {
        let mut marks = marks(block);
        let mut width = BLOCK;
        plain_blocks = if marks == 0 { plain_blocks + 1 } else { 0 };
        while marks != 0 {
            let bit = marks.trailing_zeros();
            let at = run + bit as usize;
            match bytes.get(at..) {
                Some([b'\\', next, ..]) if is_short_escape(*next) => *escaped = true,
                _ => return at,
            }
            // The escaped byte is no mark of its own, and may stand in the next block.
            marks &= !(0b11 << bit);
            width = width.max(at + 2 - run);
        }
        run += width;
        if plain_blocks == SHORT_BLOCKS {
            plain_blocks = 0;
            run += wide_run(bytes.get(run..).unwrap_or_default());
        }
    }
    let plain = |b: &&u8| **b >= 0x20 && **b != b'"' && **b != b'\\';
    run + bytes
        .get(run..)
        .unwrap_or_default()
        .iter()
        .take_while(plain)
        .count()
}

/// Whole blocks of plain bytes.
fn wide_run(bytes: &[u8]) -> usize {
    let (blocks, _) = bytes.as_chunks::<64>();
    // One pass for all three questions; the compiler turns the fold into vector compares
    // (SSE2, simd128).
    let is_plain = |block: &&[u8; 64]| {
        !block.iter().fold(false, |found, &b| {
            found | (b < 0x20) | (b == b'"') | (b == b'\\')
        })
    };
    blocks.iter().take_while(is_plain).count() * 64
}

/// True for what may follow a `\` and ends the escape.
pub(crate) const fn is_short_escape(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't')
}

/// Length of the leading run of whole numbers, each followed by `,` or `, `.
///
/// `bytes` starts at an element of an array. Token-id prompts are megabytes of nothing else;
/// whatever is not plain (zero, a fraction, a line break) ends the run early and is left to the
/// caller.
#[inline]
pub(crate) fn integer_run(bytes: &[u8]) -> usize {
    const BLOCK: usize = 32;
    if !bytes.first().is_some_and(|b| (b'1'..=b'9').contains(b)) {
        return 0;
    }
    let (here, _) = bytes.as_chunks::<BLOCK>();
    let (next, _) = bytes.get(1..).unwrap_or_default().as_chunks::<BLOCK>();
    // Any two neighbours of such a run: a digit before a digit or comma; a comma before a space
    // or the first digit of a number; a space before the first digit of a number.
    let is_run = |(here, next): &(&[u8; BLOCK], &[u8; BLOCK])| {
        here.iter().zip(next.iter()).fold(true, |ok, (&a, &b)| {
            let first = b.wrapping_sub(b'1') < 9;
            let digit = b.wrapping_sub(b'0') < 10;
            let after_digit = (a.wrapping_sub(b'0') < 10) & (digit | (b == b','));
            let after_comma = (a == b',') & (first | (b == b' '));
            let after_space = (a == b' ') & first;
            ok & (after_digit | after_comma | after_space)
        })
    };
    let run = here.iter().zip(next).take_while(is_run).count() * BLOCK;
    // Back to the last element that is known to begin inside the run.
    let run = bytes.get(..run).unwrap_or_default();
    match run.iter().rposition(|&b| b == b',') {
        Some(comma) => comma + 1,
        None => 0,
    }
}

/// Resolves the escapes of a validated JSON string (without its quotes).
///
/// `None` only for text that the cursor would have refused.
pub(crate) fn unescape(raw: &[u8]) -> Option<String> {
    let mut out = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            out.push(byte);
            continue;
        }
        let (&kind, after) = rest.split_first()?;
        rest = after;
        let plain = match kind {
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let (unit, after) = code_unit(rest)?;
                rest = after;
                if (0xD800..0xDC00).contains(&unit) {
                    let (low, after) = code_unit(rest.strip_prefix(b"\\u")?)?;
                    rest = after;
                    char::decode_utf16([unit, low]).next()?.ok()?
                } else {
                    char::from_u32(u32::from(unit))?
                }
            }
            other => char::from(other),
        };
        out.extend_from_slice(plain.encode_utf8(&mut [0; 4]).as_bytes());
    }
    String::from_utf8(out).ok()
}

/// Reads four hex digits.
pub(crate) fn code_unit(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (digits, rest) = bytes.split_first_chunk::<4>()?;
    let mut unit = 0;
    for &digit in digits {
        unit = unit << 4 | char::from(digit).to_digit(16)? as u16;
    }
    Some((unit, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(bytes: &[u8]) -> (usize, bool) {
        let mut escaped = false;
        (text_run(bytes, &mut escaped), escaped)
    }

    #[test]
    fn a_run_ends_at_the_first_byte_that_matters_wherever_it_stands() {
        for stop in [&b"\""[..], b"\0", b"\x1f", b"\\u", b"\\x", b"\\\0"] {
            for len in 0..300 {
                let bytes = [vec![b'\xc3'; len].as_slice(), stop, &[b'a'; 70]].concat();
                assert_eq!(run(&bytes), (len, false), "stop {stop:?}");
            }
        }
        for byte in [0x20, 0x21, 0x23, 0x5b, 0x5d, 0x7f, 0x80, 0xa2, 0xdc, 0xff] {
            assert_eq!(run(&vec![byte; 301]).0, 301, "byte {byte:#x}");
        }
    }

    #[test]
    fn a_run_goes_on_behind_two_byte_escapes_wherever_they_stand() {
        for escape in [
            r#"\""#, r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r#"\\\""#,
        ] {
            for len in 0..100 {
                let before = "a".repeat(len);
                let text = format!("{before}{escape}bcdefghijklmnop\"rest of the text");
                assert_eq!(run(text.as_bytes()), (text.find("p\"").unwrap() + 1, true));
            }
        }
    }

    #[test]
    fn an_integer_run_ends_behind_a_comma_before_anything_unusual() {
        let tokens = "11,22, 345,".repeat(20);
        let run = integer_run(tokens.as_bytes());
        assert!(run > 100 && tokens[..run].ends_with(','), "{run}");
        for odd in ["0,", "01,", "1.5,", "1,,", "1 2,", ",", "1,  2,", "x"] {
            let text = format!("{tokens}{odd}{tokens}");
            let run = integer_run(text.as_bytes());
            assert!(
                run <= tokens.len() && text[..run].ends_with(','),
                "{odd}: {run}"
            );
        }
        assert_eq!(integer_run(b"0,1,2"), 0);
        assert_eq!(integer_run("7".repeat(500).as_bytes()), 0);
    }

    #[test]
    fn escapes_resolve_to_the_text_they_mean() {
        let raw = br#"a\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00z"#;
        assert_eq!(unescape(raw).unwrap(), "a\"\\/\u{8}\u{c}\n\r\té😀z");
    }
}
