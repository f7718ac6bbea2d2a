//! Access to a guest's linear memory.

use wasmtime::{Caller, Memory};

use super::{Host, Status};

/// Largest block a guest may ask the host to read at once.
const MAX_READ: u32 = 1 << 30;

fn memory(caller: &Caller<'_, Host>) -> Result<Memory, Status> {
    caller.data().memory.ok_or(Status::InvalidMemoryAccess)
}

/// Copies `len` bytes out of the guest.
pub(crate) fn read(caller: &Caller<'_, Host>, ptr: u32, len: u32) -> Result<Vec<u8>, Status> {
    if len > MAX_READ {
        return Err(Status::InvalidMemoryAccess);
    }
    let start = ptr as usize;
    let bytes = memory(caller)?
        .data(caller)
        .get(start..start.saturating_add(len as usize))
        .ok_or(Status::InvalidMemoryAccess)?;
    Ok(bytes.to_vec())
}

/// Copies text out of the guest; what is not UTF-8 is replaced.
pub(crate) fn read_text(caller: &Caller<'_, Host>, ptr: u32, len: u32) -> Result<String, Status> {
    read(caller, ptr, len).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Copies bytes into the guest.
pub(crate) fn write(caller: &mut Caller<'_, Host>, ptr: u32, bytes: &[u8]) -> Result<(), Status> {
    memory(caller)?
        .write(caller, ptr as usize, bytes)
        .map_err(|_| Status::InvalidMemoryAccess)
}

/// Writes a 32-bit word.
pub(crate) fn write_u32(caller: &mut Caller<'_, Host>, ptr: u32, value: u32) -> Result<(), Status> {
    write(caller, ptr, &value.to_le_bytes())
}

/// Hands bytes to the guest: allocated by the guest itself, pointer and size written where asked.
/// No bytes are a null pointer.
pub(crate) fn give(
    caller: &mut Caller<'_, Host>,
    ptr_ptr: u32,
    size_ptr: u32,
    bytes: &[u8],
) -> Result<(), Status> {
    let mut ptr = 0;
    if !bytes.is_empty() {
        let allocate = caller
            .data()
            .allocate
            .clone()
            .ok_or(Status::InternalFailure)?;
        ptr = allocate
            .call(&mut *caller, bytes.len() as u32)
            .map_err(|_| Status::InvalidMemoryAccess)?;
        write(caller, ptr, bytes)?;
    }
    write_u32(caller, ptr_ptr, ptr)?;
    write_u32(caller, size_ptr, bytes.len() as u32)
}
