//! Rules for reading and editing a body buffer (`exports.cc`, Envoy's `Buffer::copyFrom`).

use super::Status;

/// What a guest may read of `buffer` from `start`, at most `length` bytes.
pub(crate) fn window(buffer: &[u8], start: u32, length: u32) -> &[u8] {
    let start = (start as usize).min(buffer.len());
    let end = start.saturating_add(length as usize).min(buffer.len());
    buffer.get(start..end).unwrap_or_default()
}

/// Edits `buffer`: at `start == 0` the first `length` bytes are replaced by `data` (none: prepend),
/// at or after the end `data` is appended. Hosts without `first_byte_edit` replace all or nothing.
///
/// # Errors
/// `BadArgument` for an edit in the middle, or a partial replace on a host that has none.
pub(crate) fn edit(
    buffer: &mut Vec<u8>,
    start: u32,
    length: u32,
    data: &[u8],
    first_byte_edit: bool,
) -> Result<(), Status> {
    let length = length as usize;
    if start == 0 {
        if length != 0 && length < buffer.len() && !first_byte_edit {
            return Err(Status::BadArgument);
        }
        buffer.splice(..length.min(buffer.len()), data.iter().copied());
        Ok(())
    } else if start as usize >= buffer.len() {
        buffer.extend_from_slice(data);
        Ok(())
    } else {
        Err(Status::BadArgument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(start: u32, length: u32, first_byte_edit: bool) -> Result<Vec<u8>, Status> {
        let mut buffer = b"{\"a\":1}".to_vec();
        edit(&mut buffer, start, length, b"{\"k\":0,", first_byte_edit).map(|()| buffer)
    }

    #[test]
    fn an_edit_replaces_prepends_or_appends() {
        assert_eq!(edited(0, 1, true), Ok(b"{\"k\":0,\"a\":1}".to_vec()));
        assert_eq!(edited(0, 0, true), Ok(b"{\"k\":0,{\"a\":1}".to_vec()));
        assert_eq!(edited(0, u32::MAX, false), Ok(b"{\"k\":0,".to_vec()));
        assert_eq!(edited(7, 0, false), Ok(b"{\"a\":1}{\"k\":0,".to_vec()));
    }

    #[test]
    fn an_edit_in_the_middle_or_a_prefix_on_an_old_host_is_refused() {
        assert_eq!(edited(3, 1, true), Err(Status::BadArgument));
        assert_eq!(edited(0, 1, false), Err(Status::BadArgument));
    }

    #[test]
    fn a_read_is_clamped_to_the_buffer() {
        assert_eq!(window(b"abc", 1, u32::MAX), b"bc");
        assert_eq!(window(b"abc", 9, 1), b"");
    }
}
