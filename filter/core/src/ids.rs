//! Random words and request ids, from a seed that the host gives once.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// A stream of random words. Not for secrets: request ids only have to be unique.
#[derive(Clone, Debug)]
pub struct Ids {
    random: Xoshiro256PlusPlus,
}

impl Ids {
    /// From 32 random bytes; VMs with different seeds never share ids.
    #[must_use]
    pub fn new(seed: [u8; 32]) -> Self {
        Self {
            random: Xoshiro256PlusPlus::from_seed(seed),
        }
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.random.next_u64()
    }

    /// A fresh UUID (version 4), hyphenated.
    pub fn request_id(&mut self) -> String {
        let mut bytes = [0; 16];
        self.random.fill_bytes(&mut bytes);
        uuid::Builder::from_random_bytes(bytes)
            .into_uuid()
            .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_fresh_version_4_uuids() {
        let mut ids = Ids::new([7; 32]);
        let (one, two) = (ids.request_id(), ids.request_id());
        assert_ne!(one, two);
        assert_eq!((one.len(), one.as_bytes()[14]), (36, b'4'));
    }
}
