//! Pushed tokenizers as the core's counters, timed and weighed.

use crate::host::{clock, memory};
use pd_core::port::{Counted, LoadedTokenizer, TokenCounter, TokenizerLoader};
use pd_tokenizer::Counter;
use pd_wire::tokenizer::TokenizerFile;

/// Builds counters in this VM.
pub struct Loader;

/// A counter that looks at the clock.
#[derive(Debug)]
struct Timed(Counter);

impl TokenizerLoader for Loader {
    fn load(&self, file: &[u8]) -> Result<LoadedTokenizer, String> {
        let (begun, before) = (clock::now_us(), memory::pages());
        let file = TokenizerFile::parse(file).map_err(|error| error.to_string())?;
        let counter = Counter::build(file).map_err(|error| error.to_string())?;
        Ok(LoadedTokenizer {
            counter: Box::new(Timed(counter)),
            micros: clock::now_us().saturating_sub(begun),
            pages: (before, memory::pages()),
        })
    }
}

impl TokenCounter for Timed {
    fn count(&self, text: &str) -> Option<Counted> {
        let begun = clock::now_us();
        let tokens = self.0.count(text)?;
        let micros = clock::now_us().saturating_sub(begun);
        Some(Counted { tokens, micros })
    }
}
