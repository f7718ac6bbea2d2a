//! Header pairs as the host gives them: one buffer, read in place.

/// All headers of a message, in the ABI's form: count, lengths, NUL-terminated texts.
#[derive(Debug, Default)]
pub struct Headers {
    bytes: Vec<u8>,
}

impl Headers {
    /// From the host's buffer.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Lower-case names and raw values. Names that are no text are left out.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.pairs()
            .filter_map(|(name, value)| Some((std::str::from_utf8(name).ok()?, value)))
    }

    fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let count = self.number(0).unwrap_or(0);
        let mut at = count.saturating_mul(8).saturating_add(4);
        (0..count).filter_map(move |nth| {
            let lengths = nth.saturating_mul(8).saturating_add(4);
            let name = self.text(&mut at, self.number(lengths)?)?;
            let value = self.text(&mut at, self.number(lengths.saturating_add(4))?)?;
            Some((name, value))
        })
    }

    /// First value of a header.
    pub fn value(&self, wanted: &str) -> Option<&[u8]> {
        self.pairs()
            .find(|(name, _)| *name == wanted.as_bytes())
            .map(|(_, value)| value)
    }

    /// First value of a header, if it is text.
    pub fn text_value(&self, wanted: &str) -> Option<&str> {
        std::str::from_utf8(self.value(wanted)?).ok()
    }

    fn number(&self, at: usize) -> Option<usize> {
        let bytes = self.bytes.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    }

    fn text(&self, at: &mut usize, length: usize) -> Option<&[u8]> {
        let end = at.checked_add(length)?;
        let text = self.bytes.get(*at..end)?;
        *at = end.checked_add(1)?;
        Some(text)
    }
}
