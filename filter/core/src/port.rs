//! What the host must give: a store shared by all workers of the Envoy.

/// Version of a stored value, used by [`SharedStore::swap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cas(pub u32);

/// A value read from the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// Version to swap against.
    pub cas: Cas,
}

/// Why a write did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Somebody else wrote in between: read again.
    #[error("the record changed meanwhile")]
    Raced,
    /// The host refused the call.
    #[error("the host refused the write")]
    Refused,
}

/// Key-value store shared by all VMs of one Envoy. Keys can never be deleted, so the key space
/// must be bounded by the caller.
pub trait SharedStore {
    /// Reads a value; `None` when the key was never written.
    fn get(&self, key: &str) -> Option<Stored>;
    /// Creates a key that was never written.
    ///
    /// # Errors
    /// [`StoreError::Raced`] when another VM created it first.
    fn create(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError>;
    /// Replaces the value read at `cas`.
    ///
    /// # Errors
    /// [`StoreError::Raced`] when the value changed since.
    fn swap(&self, key: &str, bytes: &[u8], cas: Cas) -> Result<(), StoreError>;
    /// Replaces what was read, or creates the key when nothing was there.
    ///
    /// # Errors
    /// [`StoreError::Raced`] when another VM wrote in between.
    fn replace(&self, key: &str, stored: Option<&Stored>, bytes: &[u8]) -> Result<(), StoreError> {
        match stored {
            Some(stored) => self.swap(key, bytes, stored.cas),
            None => self.create(key, bytes),
        }
    }
}

/// Counts the tokens of texts with one model's tokenizer.
pub trait TokenCounter: std::fmt::Debug {
    /// Counts; `None` when the tokenizer gives up.
    fn count(&self, text: &str) -> Option<Counted>;
}

/// A text that was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Its tokens.
    pub tokens: u64,
    /// What counting took, in µs.
    pub micros: u64,
}

/// Makes counters of pushed tokenizers. Takes as long as it takes: for ticks, never for requests.
pub trait TokenizerLoader {
    /// Builds a counter of a file.
    ///
    /// # Errors
    /// What is wrong with the file.
    fn load(&self, file: &[u8]) -> Result<LoadedTokenizer, String>;
}

/// A counter and what it cost.
#[derive(Debug)]
pub struct LoadedTokenizer {
    /// The counter.
    pub counter: Box<dyn TokenCounter>,
    /// Time of loading, in µs.
    pub micros: u64,
    /// Linear memory before and after, in pages of 64 KiB.
    pub pages: (u32, u32),
}
