//! SGLang: both legs at once. They meet in a room at the prefill pod's bootstrap server, which
//! both bodies name; nothing of the prefill reply is needed.

use super::limits;
use crate::request::patch::Edit;
use crate::request::{Endpoint, Member, Scan};
use std::borrow::Cow;

/// Rooms below this survive readers that take every JSON number for a double.
const ROOMS: u64 = 1 << 53;

/// Where the legs of one attempt meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// IP of the prefill pod, without brackets.
    pub host: String,
    /// Port of its bootstrap server.
    pub port: u16,
    /// The room; below 2^53 and never used twice.
    pub room: u64,
    /// Id of the request at both engines. Engines abort by prefix, so all ids have one width.
    pub rid: String,
}

impl Meeting {
    /// A meeting at a prefill pod in the room that a random word names.
    #[must_use]
    pub fn new(host: &str, port: u16, word: u64, rid: &str) -> Self {
        Self {
            host: host.to_owned(),
            port,
            room: word % ROOMS,
            rid: rid.to_owned(),
        }
    }

    /// The four members by value.
    fn values(&self) -> [(Member, String); 4] {
        [
            (Member::BootstrapHost, quoted(&self.host)),
            (Member::BootstrapPort, self.port.to_string()),
            (Member::BootstrapRoom, self.room.to_string()),
            (Member::Rid, quoted(&self.rid)),
        ]
    }

    /// Text of the members that the decode leg carries, such as `"bootstrap_host":"10.0.0.1",…`.
    #[must_use]
    pub fn decode_members(&self) -> Vec<u8> {
        let [host, port, room, rid] = self
            .values()
            .map(|(member, value)| format!("\"{}\":{value}", member.name()));
        [host, port, room, rid].join(",").into_bytes()
    }

    /// What turns a client's body into that of the prefill leg.
    #[must_use]
    pub fn prefill_edits(&self, endpoint: Endpoint, scan: &Scan) -> Vec<Edit<'static>> {
        let set =
            |(member, value): (Member, String)| Edit::Set(member, Cow::Owned(value.into_bytes()));
        let mut edits: Vec<Edit<'static>> = self.values().map(set).into();
        let caps: &[Member] = match endpoint {
            Endpoint::Chat => &[Member::MaxTokens, Member::MaxCompletionTokens],
            _ => &[Member::MaxTokens],
        };
        limits::one_token(scan, caps, &mut edits);
        edits
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_is_exact_as_a_double() {
        for word in [u64::MAX, 1 << 53, (1 << 53) - 1, 0] {
            let room = Meeting::new("h", 1, word, "r").room;
            assert_eq!(room as f64 as u64, room);
            assert!(room < 1 << 53);
        }
    }
}
