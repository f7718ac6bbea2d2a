//! Header maps and their wire form between host and guest.
//!
//! Wire form (proxy-wasm ABI): `u32` count, then `u32 name length, u32 value length` per pair,
//! then `name NUL value NUL` per pair, all little-endian.

use std::fmt;

/// An ordered multimap of header fields; names are kept in lower case, as Envoy keeps them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HeaderMap(Vec<(String, Vec<u8>)>);

// === impl HeaderMap ===

impl HeaderMap {
    /// A map from name and value pairs.
    pub fn of(pairs: &[(&str, &str)]) -> Self {
        let mut map = Self::default();
        for (name, value) in pairs {
            map.add(name, value.as_bytes());
        }
        map
    }

    /// The first value of `name`.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let name = name.to_ascii_lowercase();
        self.0
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, v)| v.as_slice())
    }

    /// The first value of `name` as text; bytes that are not UTF-8 count as absent.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(|v| std::str::from_utf8(v).ok())
    }

    /// Appends a field.
    pub fn add(&mut self, name: &str, value: &[u8]) {
        self.0.push((name.to_ascii_lowercase(), value.to_vec()));
    }

    /// Sets a field: the first occurrence takes the value, others go; a new one is appended.
    pub fn set(&mut self, name: &str, value: &[u8]) {
        let name = name.to_ascii_lowercase();
        let mut found = false;
        self.0.retain_mut(|(n, v)| {
            if *n != name {
                return true;
            }
            if found {
                return false;
            }
            found = true;
            *v = value.to_vec();
            true
        });
        if !found {
            self.0.push((name, value.to_vec()));
        }
    }

    /// Removes every occurrence of `name`.
    pub fn remove(&mut self, name: &str) {
        let name = name.to_ascii_lowercase();
        self.0.retain(|(n, _)| *n != name);
    }

    /// The fields in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(n, v)| (n.as_str(), v.as_slice()))
    }

    /// Number of fields.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no field.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of all names and values, as Envoy's `byteSize`.
    pub fn byte_size(&self) -> usize {
        self.0.iter().map(|(n, v)| n.len() + v.len()).sum()
    }

    /// The wire form; an empty map is no bytes at all, as cpp-host hands it over.
    pub(crate) fn encode(&self) -> Vec<u8> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let mut out = (self.0.len() as u32).to_le_bytes().to_vec();
        for (name, value) in &self.0 {
            out.extend_from_slice(&(name.len() as u32).to_le_bytes());
            out.extend_from_slice(&(value.len() as u32).to_le_bytes());
        }
        for (name, value) in &self.0 {
            out.extend_from_slice(name.as_bytes());
            out.push(0);
            out.extend_from_slice(value);
            out.push(0);
        }
        out
    }

    /// Parses the wire form; malformed input yields an empty map, as cpp-host does.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Self::try_decode(bytes).unwrap_or_default()
    }

    fn try_decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = bytes.get(at..at.checked_add(4)?)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
        };
        let count = word(0)?;
        let mut at = count.checked_mul(8)?.checked_add(4)?;
        let mut map = Self::default();
        for pair in 0..count {
            let (name_len, value_len) = (word(4 + pair * 8)?, word(8 + pair * 8)?);
            let name = bytes.get(at..at.checked_add(name_len)?)?;
            at += name_len + 1;
            let value = bytes.get(at..at.checked_add(value_len)?)?;
            at += value_len + 1;
            map.add(&String::from_utf8_lossy(name), value);
        }
        Some(map)
    }
}

impl fmt::Debug for HeaderMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|(n, v)| (n, String::from_utf8_lossy(v))))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_survives_a_round_trip() {
        let map = HeaderMap::of(&[(":Method", "POST"), ("x-empty", ""), ("x", "1"), ("x", "2")]);
        assert_eq!(HeaderMap::decode(&map.encode()), map);
        assert!(HeaderMap::default().encode().is_empty());
        assert!(HeaderMap::decode(&[0, 0, 0, 0]).is_empty());
    }

    #[test]
    fn a_truncated_wire_form_yields_nothing() {
        let bytes = HeaderMap::of(&[("name", "value")]).encode();
        assert!(HeaderMap::decode(&bytes[..bytes.len() - 3]).is_empty());
        assert!(HeaderMap::decode(&u32::MAX.to_le_bytes()).is_empty());
    }

    #[test]
    fn set_replaces_the_first_and_drops_the_rest() {
        let mut map = HeaderMap::of(&[("a", "1"), ("b", "2"), ("a", "3")]);
        map.set("A", b"9");
        assert_eq!(map, HeaderMap::of(&[("a", "9"), ("b", "2")]));
        map.remove("a");
        assert_eq!(map.len(), 1);
    }
}
