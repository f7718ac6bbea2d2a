//! What every prefill copy has in common: one token, no stream, nothing that costs.

use crate::request::patch::Edit;
use crate::request::{Member, Scan};
use std::borrow::Cow;

/// Sets the `caps` to one token, turns the stream off, and removes what is refused without a
/// stream, with such a cap, or costs.
pub(super) fn one_token(scan: &Scan, caps: &[Member], edits: &mut Vec<Edit<'static>>) {
    const ONE: Cow<'static, [u8]> = Cow::Borrowed(b"1");
    edits.extend(caps.iter().map(|cap| Edit::Set(*cap, ONE)));
    edits.push(Edit::Set(Member::Stream, Cow::Borrowed(b"false")));
    let dropped = [
        Member::StreamOptions,
        Member::MinTokens,
        Member::Logprobs,
        Member::TopLogprobs,
        Member::PromptLogprobs,
        Member::Echo,
    ];
    edits.extend(
        dropped
            .into_iter()
            .filter(|member| scan.has(*member))
            .map(Edit::Delete),
    );
}
