//! Counts the tokens of a text with a model's own tokenizer.
//!
//! The `tokenizers` crate is the reference implementation, and it panics on much that it does not
//! expect; in the proxy a panic costs the worker all its streams. So nothing is deserialized by
//! it: the checked form of pd-wire is put together here from its parts, and of its pipeline only
//! the steps that produce words are run: added tokens, normalizer, pre-tokenizer. Words are cut
//! into tokens by [`bpe`].

mod bpe;

use bpe::Bpe;
use pd_wire::tokenizer::{self as wire, TokenizerFile};
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers as norm;
use tokenizers::pre_tokenizers as pre;
use tokenizers::{
    AddedToken, AddedVocabulary, NormalizedString, Normalizer as _, NormalizerWrapper,
    OffsetReferential, OffsetType, PreTokenizer as _, PreTokenizerWrapper, SplitDelimiterBehavior,
};

/// Why no counter could be made of a checked file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part}: {problem}")]
pub struct BuildError {
    /// Part of the file.
    pub part: &'static str,
    /// What the library says about it.
    pub problem: String,
}

/// A model's tokenizer, ready to count.
pub struct Counter {
    added: AddedVocabulary,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    model: Bpe,
}

// By hand: a vocabulary of a quarter million entries is nothing to print.
impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counter").finish_non_exhaustive()
    }
}

impl Counter {
    /// Builds a counter; `file` was checked when it was parsed.
    ///
    /// # Errors
    /// A merge of unknown tokens, a regular expression the library cannot compile, added tokens
    /// that cannot be told apart.
    pub fn build(file: TokenizerFile) -> Result<Self, BuildError> {
        let model = Bpe::build(file.model).map_err(|problem| BuildError {
            part: "model",
            problem,
        })?;
        let normalizer = file
            .normalizer
            .map(normalizer)
            .transpose()
            .map_err(failed("normalizer"))?;
        let pre_tokenizer = file
            .pre_tokenizer
            .map(pre_tokenizer)
            .transpose()
            .map_err(failed("pre_tokenizer"))?;
        let added =
            added_tokens(file.added_tokens, normalizer.as_ref()).map_err(failed("added_tokens"))?;
        Ok(Self {
            added,
            normalizer,
            pre_tokenizer,
            model,
        })
    }

    /// Tokens of a text; none added around it. `None` when the pre-tokenizer gives up.
    ///
    /// Takes time and memory in proportion to the text; bounding it is the caller's.
    pub fn count(&self, text: &str) -> Option<u64> {
        let mut words = self
            .added
            .extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words).ok()?;
        }
        let tokens = words
            .get_splits(OffsetReferential::Original, OffsetType::None)
            .iter()
            // Added tokens are tokens already.
            .map(|(word, _, tokens)| match tokens {
                Some(tokens) => tokens.len(),
                None => self.model.count(word),
            })
            .sum::<usize>();
        u64::try_from(tokens).ok()
    }
}

fn failed(part: &'static str) -> impl Fn(tokenizers::Error) -> BuildError {
    move |error| BuildError {
        part,
        problem: error.to_string(),
    }
}

fn added_tokens(
    tokens: Vec<wire::AddedToken>,
    normalizer: Option<&NormalizerWrapper>,
) -> tokenizers::Result<AddedVocabulary> {
    for token in tokens.iter().filter(|token| token.normalized) {
        let mut text = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = normalizer {
            normalizer.normalize(&mut text)?;
        }
        // The library would find it everywhere, also inside characters, and panic.
        if text.is_empty() {
            return Err(format!("nothing is left of {:?} once normalized", token.content).into());
        }
    }
    let tokens = tokens.into_iter().map(|token| AddedToken {
        content: token.content,
        single_word: token.single_word,
        normalized: token.normalized,
        ..AddedToken::default()
    });
    let mut added = AddedVocabulary::new();
    // A model that knows none of them: only their number matters, and numbers have to differ.
    added.add_tokens(tokens, &WordLevel::default(), normalizer)?;
    Ok(added)
}

fn normalizer(step: wire::Normalizer) -> tokenizers::Result<NormalizerWrapper> {
    Ok(match step {
        wire::Normalizer::Sequence { normalizers } => {
            let steps: tokenizers::Result<Vec<_>> =
                normalizers.into_iter().map(normalizer).collect();
            norm::Sequence::new(steps?).into()
        }
        wire::Normalizer::NFC => norm::NFC.into(),
        wire::Normalizer::NFD => norm::NFD.into(),
        wire::Normalizer::NFKC => norm::NFKC.into(),
        wire::Normalizer::NFKD => norm::NFKD.into(),
        wire::Normalizer::Lowercase => norm::Lowercase.into(),
        wire::Normalizer::Prepend { prepend } => norm::Prepend::new(prepend).into(),
        wire::Normalizer::Replace { pattern, content } => {
            let pattern = match pattern {
                wire::Pattern::String(text) => norm::replace::ReplacePattern::String(text),
                wire::Pattern::Regex(text) => norm::replace::ReplacePattern::Regex(text),
            };
            norm::Replace::new(pattern, content)?.into()
        }
    })
}

fn pre_tokenizer(step: wire::PreTokenizer) -> tokenizers::Result<PreTokenizerWrapper> {
    Ok(match step {
        wire::PreTokenizer::Sequence { pretokenizers } => {
            let steps: tokenizers::Result<Vec<_>> =
                pretokenizers.into_iter().map(pre_tokenizer).collect();
            pre::sequence::Sequence::new(steps?).into()
        }
        wire::PreTokenizer::Split {
            pattern,
            behavior,
            invert,
        } => {
            let pattern = match pattern {
                wire::Pattern::String(text) => pre::split::SplitPattern::String(text),
                wire::Pattern::Regex(text) => pre::split::SplitPattern::Regex(text),
            };
            pre::split::Split::new(pattern, delimiter(behavior), invert)?.into()
        }
        wire::PreTokenizer::ByteLevel {
            add_prefix_space,
            use_regex,
        } => pre::byte_level::ByteLevel::new(add_prefix_space, false, use_regex).into(),
        wire::PreTokenizer::Digits { individual_digits } => {
            pre::digits::Digits::new(individual_digits).into()
        }
        wire::PreTokenizer::Punctuation { behavior } => {
            pre::punctuation::Punctuation::new(delimiter(behavior)).into()
        }
        wire::PreTokenizer::Whitespace => pre::whitespace::Whitespace.into(),
        wire::PreTokenizer::WhitespaceSplit => pre::whitespace::WhitespaceSplit.into(),
        wire::PreTokenizer::Metaspace {
            replacement,
            prepend_scheme,
            split,
        } => {
            let scheme = match prepend_scheme {
                wire::PrependScheme::First => pre::metaspace::PrependScheme::First,
                wire::PrependScheme::Never => pre::metaspace::PrependScheme::Never,
                wire::PrependScheme::Always => pre::metaspace::PrependScheme::Always,
            };
            pre::metaspace::Metaspace::new(replacement, scheme, split).into()
        }
    })
}

fn delimiter(behavior: wire::Behavior) -> SplitDelimiterBehavior {
    match behavior {
        wire::Behavior::Removed => SplitDelimiterBehavior::Removed,
        wire::Behavior::Isolated => SplitDelimiterBehavior::Isolated,
        wire::Behavior::MergedWithPrevious => SplitDelimiterBehavior::MergedWithPrevious,
        wire::Behavior::MergedWithNext => SplitDelimiterBehavior::MergedWithNext,
        wire::Behavior::Contiguous => SplitDelimiterBehavior::Contiguous,
    }
}
