//! Who may push: bearer tokens, known by their SHA-256 only.

use sha2::{Digest, Sha256};

/// True when `authorization` carries a token whose SHA-256 (lower-case hexadecimal) is one of
/// `hashes`, or when no token is asked for. Takes the same time for every wrong token.
#[must_use]
pub fn accepted(authorization: &str, hashes: &[String]) -> bool {
    if hashes.is_empty() {
        return true;
    }
    let Some((scheme, token)) = authorization.split_once(' ') else {
        return false;
    };
    if !scheme.eq_ignore_ascii_case("bearer") {
        return false;
    }
    let digest: String = Sha256::digest(token.trim())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    hashes.iter().fold(false, |found, hash| {
        found | same(hash.as_bytes(), digest.as_bytes())
    })
}

/// Compares without stopping at the first difference.
fn same(one: &[u8], two: &[u8]) -> bool {
    one.len() == two.len()
        && one
            .iter()
            .zip(two)
            .fold(0, |differs, (a, b)| differs | (a ^ b))
            == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `secret`.
    const HASH: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    #[test]
    fn any_listed_hash_admits_its_token_and_nothing_else_does() {
        let hashes = ["0".repeat(64), HASH.to_owned()];
        assert!(accepted("Bearer secret", &hashes));
        assert!(accepted("bearer  secret", &hashes));
        assert!(!accepted("Bearer secreT", &hashes));
        assert!(!accepted("Basic secret", &hashes));
        assert!(!accepted("", &hashes));
        assert!(accepted("", &[]));
    }
}
