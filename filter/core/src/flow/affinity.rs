//! What ties a request to a pod under `session-affinity`.
//!
//! `x-session-id` is the gateway's: it names the pod that answered before, as the base64 form
//! (RFC 4648, padded) of its `ip:port`. AIBrix issues the same, so clients keep their sessions when
//! they move over. It is only ever compared with the pods of the snapshot and never becomes an
//! address. `x-aibrix-session-key` is the caller's own: the same key prefers the same pod, in every
//! worker and replica, and it is neither echoed nor logged.

use super::Head;
use crate::fleet::ModelFleet;
use crate::select::Strategy;
use crate::session::SessionKey;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// What the request's headers ask for.
pub(super) fn strategy(head: &Head, fleet: &ModelFleet) -> Strategy {
    let pod = head.session_id.as_deref().and_then(|id| {
        let named = |address: &str| encode(address.as_bytes()).eq(id.bytes());
        let mut pods = (0_u16..).zip(fleet.pods.iter());
        pods.find(|(_, pod)| named(&pod.address)).map(|(at, _)| at)
    });
    let key = match head.session {
        Some(SessionKey::Hash(key)) => Some(key),
        Some(SessionKey::TooLong) | None => None,
    };
    Strategy::Affinity { pod, key }
}

/// The `x-session-id` that names the pod at this `ip:port`.
pub(super) fn session_id(address: &str) -> String {
    encode(address.as_bytes()).map(char::from).collect()
}

/// Base64, made as it is read: most comparisons end at the first letters.
fn encode(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.chunks(3).flat_map(|chunk| {
        let byte = |at: usize| chunk.get(at).copied().unwrap_or(0);
        let bits = u32::from_be_bytes([0, byte(0), byte(1), byte(2)]);
        [18, 12, 6, 0]
            .into_iter()
            .enumerate()
            .map(move |(at, shift)| {
                let sextet = usize::try_from((bits >> shift) & 63).unwrap_or(0);
                if at <= chunk.len() {
                    ALPHABET.get(sextet).copied().unwrap_or(b'=')
                } else {
                    b'='
                }
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Endpoint;
    use crate::testkit::{model, pod};

    #[test]
    fn ids_equal_the_vectors_of_rfc_4648() {
        for (text, id) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
            ("10.0.0.1:8000", "MTAuMC4wLjE6ODAwMA=="),
            ("[fd00::1]:8000", "W2ZkMDA6OjFdOjgwMDA="),
        ] {
            assert_eq!(session_id(text), id);
        }
    }

    #[test]
    fn an_id_names_a_pod_of_the_snapshot_or_nothing() {
        let fleet = model("m")
            .pod(pod("ns/a").address("10.0.0.1:8000"))
            .pod(pod("ns/b").address("10.0.0.1:80"))
            .fleet();
        let named = |id: &str| {
            let headers = [("x-session-id", id.as_bytes())];
            let head = Head::read("/x", Endpoint::Chat, headers.into_iter());
            strategy(&head, &fleet)
        };
        let pod = |pod| Strategy::Affinity { pod, key: None };
        assert_eq!(named(&session_id("10.0.0.1:8000")), pod(Some(0)));
        assert_eq!(named(&session_id("10.0.0.1:80")), pod(Some(1)));
        let long = session_id(&"x".repeat(100_000));
        let elsewhere = session_id("169.254.169.254:80");
        for id in ["", "10.0.0.1:80", "MTAuMC4wLjE6ODA", "=", &long, &elsewhere] {
            assert_eq!(named(id), pod(None), "{id:.40}");
        }
    }
}
