//! Byte-pair encoding of one word, as far as the number of its tokens goes.
//!
//! The algorithm of the `tokenizers` crate (`models/bpe`), whose own builder reads files: its
//! imports keep a module from loading in Envoy before 1.37. Numbers instead of texts for tokens
//! also take half the memory. A word is cut into characters; of all neighbours that have a merge,
//! the pair of the lowest rank, the leftmost first, becomes one, until no pair has a merge.

use ahash::AHashMap;
use pd_wire::tokenizer as wire;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Words whose count is remembered, and the longest such word in bytes: words repeat in any text.
const CACHED_WORDS: usize = 4096;
const CACHED_LEN: usize = 64;

/// A vocabulary and its merges.
pub(crate) struct Bpe {
    vocab: AHashMap<String, u32>,
    /// Rank and result of a pair.
    merges: AHashMap<(u32, u32), (u32, u32)>,
    unknown: Option<u32>,
    fuse_unk: bool,
    /// Tokens of the 256 bytes, where unknown characters are written as bytes.
    bytes: Option<Vec<Option<u32>>>,
    ignore_merges: bool,
    prefix: Option<String>,
    suffix: Option<String>,
    cache: RefCell<AHashMap<String, usize>>,
}

/// A part of a word; linked to its neighbours by position.
#[derive(Clone, Copy)]
struct Part {
    id: u32,
    before: Option<usize>,
    behind: Option<usize>,
    /// Merged into the one before.
    gone: bool,
}

/// The parts of one word.
#[derive(Default)]
struct Word(Vec<Part>);

// === impl Bpe ===

impl Bpe {
    /// Ranks are the places in the list.
    pub(crate) fn build(model: wire::Bpe) -> Result<Self, String> {
        let mut vocab: AHashMap<String, u32> = model.vocab.into_iter().collect();
        let prefix = model.continuing_subword_prefix;
        let mut merges = AHashMap::with_capacity(model.merges.len());
        let mut merged = String::new();
        for (rank, (left, right)) in (0_u32..).zip(&model.merges) {
            let rest = prefix.as_deref().unwrap_or("");
            let rest = right.strip_prefix(rest).unwrap_or(right);
            merged.clear();
            merged.extend([left.as_str(), rest]);
            let id = |token: &str| vocab.get(token).copied();
            let (Some(a), Some(b), Some(new)) = (id(left), id(right), id(&merged)) else {
                return Err(format!(
                    "merge of {left:?} and {right:?} is out of vocabulary"
                ));
            };
            merges.insert((a, b), (rank, new));
        }
        let byte = |byte: u8| vocab.get(&format!("<{byte:#04X}>")).copied();
        let bytes = (u8::MIN..=u8::MAX).map(byte).collect();
        let unknown = model.unk_token.and_then(|token| vocab.get(&token).copied());
        if !model.ignore_merges {
            // From here on only single characters are looked up.
            let len = |text: &Option<String>| text.as_ref().map_or(0, String::len);
            let around = len(&prefix).saturating_add(len(&model.end_of_word_suffix));
            let longest = char::MAX_LEN_UTF8.saturating_add(around);
            vocab.retain(|token, _| token.len() <= longest);
            vocab.shrink_to_fit();
        }
        Ok(Self {
            unknown,
            fuse_unk: model.fuse_unk,
            bytes: model.byte_fallback.then_some(bytes),
            ignore_merges: model.ignore_merges,
            prefix,
            suffix: model.end_of_word_suffix,
            cache: RefCell::default(),
            merges,
            vocab,
        })
    }

    /// Tokens of a word. A character that has no token, no bytes and no stand-in counts for
    /// nothing, as in the engine.
    pub(crate) fn count(&self, word: &str) -> usize {
        if word.is_empty() {
            return 0;
        }
        if self.ignore_merges && self.vocab.contains_key(word) {
            return 1;
        }
        let short = word.len() <= CACHED_LEN;
        if short && let Some(count) = self.cache.borrow().get(word) {
            return *count;
        }
        let mut parts = self.parts(word);
        parts.merge(&self.merges);
        let count = parts.0.iter().filter(|part| !part.gone).count();
        let mut cache = self.cache.borrow_mut();
        if short && cache.len() < CACHED_WORDS {
            cache.insert(word.to_owned(), count);
        }
        count
    }

    /// The word as characters.
    fn parts(&self, word: &str) -> Word {
        let mut parts = Word(Vec::with_capacity(word.len()));
        let mut unknown_before = false;
        let mut chars = word.char_indices().peekable();
        while let Some((at, char)) = chars.next() {
            let text = self.spelled(char, at == 0, chars.peek().is_none());
            if let Some(id) = self.vocab.get(&text) {
                parts.push(*id);
                unknown_before = false;
            } else if let Some(bytes) = self.as_bytes(&text) {
                bytes.into_iter().for_each(|id| parts.push(id));
            } else if let Some(id) = self.unknown {
                if !(self.fuse_unk && unknown_before) {
                    parts.push(id);
                }
                unknown_before = true;
            }
        }
        parts
    }

    /// A character with what is written before and behind it.
    fn spelled(&self, char: char, first: bool, last: bool) -> String {
        let prefix = self.prefix.as_deref().filter(|_| !first);
        let suffix = self.suffix.as_deref().filter(|_| last);
        let mut text = String::with_capacity(4);
        text.extend(prefix);
        text.push(char);
        text.extend(suffix);
        text
    }

    /// The bytes of a text as tokens, if there is one for each.
    fn as_bytes(&self, text: &str) -> Option<Vec<u32>> {
        let tokens = self.bytes.as_ref()?;
        text.bytes()
            .map(|byte| *tokens.get(usize::from(byte))?)
            .collect()
    }
}

// === impl Word ===

impl Word {
    fn push(&mut self, id: u32) {
        let at = self.0.len();
        if let Some(last) = self.0.last_mut() {
            last.behind = Some(at);
        }
        self.0.push(Part {
            id,
            before: at.checked_sub(1),
            behind: None,
            gone: false,
        });
    }

    fn merge(&mut self, merges: &AHashMap<(u32, u32), (u32, u32)>) {
        let mut queue = BinaryHeap::new();
        for at in 0..self.0.len() {
            queue.extend(self.candidate(at, merges));
        }
        while let Some(Reverse(candidate)) = queue.pop() {
            let (_, at, new) = candidate;
            // The pair may have become another one since.
            let Some(Reverse((_, _, now))) = self.candidate(at, merges) else {
                continue;
            };
            if now != new {
                continue;
            }
            let Some((before, behind)) = self.join(at, new) else {
                continue;
            };
            let pairs = [before, behind.map(|_| at)];
            queue.extend(
                pairs
                    .into_iter()
                    .flatten()
                    .filter_map(|at| self.candidate(at, merges)),
            );
        }
    }

    /// Rank, place and result of the part at a place with the one behind it.
    fn candidate(
        &self,
        at: usize,
        merges: &AHashMap<(u32, u32), (u32, u32)>,
    ) -> Option<Reverse<(u32, usize, u32)>> {
        let left = self.0.get(at).filter(|part| !part.gone)?;
        let right = self.0.get(left.behind?)?;
        let (rank, new) = merges.get(&(left.id, right.id))?;
        Some(Reverse((*rank, at, *new)))
    }

    /// Makes one part of two; returns its neighbours.
    fn join(&mut self, at: usize, new: u32) -> Option<(Option<usize>, Option<usize>)> {
        let right = self.0.get(at)?.behind?;
        let swallowed = self.0.get_mut(right)?;
        swallowed.gone = true;
        let behind = swallowed.behind;
        if let Some(next) = behind.and_then(|behind| self.0.get_mut(behind)) {
            next.before = Some(at);
        }
        let part = self.0.get_mut(at)?;
        part.id = new;
        part.behind = behind;
        Some((part.before, behind))
    }
}
