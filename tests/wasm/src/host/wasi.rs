//! The part of WASI preview 1 that Envoy offers and a `wasm32-wasip1` module pulls in.

use wasmtime::{Caller, Linker};

use super::{Host, LogLevel, Status, memory};

/// WASI error numbers.
mod errno {
    pub(super) const SUCCESS: i32 = 0;
    pub(super) const BADF: i32 = 8;
    pub(super) const FAULT: i32 = 21;
    pub(super) const NOTSUP: i32 = 58;
}

/// Most random bytes given at once.
const MAX_RANDOM: u32 = 1 << 20;

type Guest<'a, 'b> = &'a mut Caller<'b, Host>;

fn errno(done: Result<(), Status>) -> i32 {
    if done.is_ok() {
        errno::SUCCESS
    } else {
        errno::FAULT
    }
}

/// Defines the functions; whatever else a module imports fails its load, as in Envoy.
pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    const WASI: &str = "wasi_snapshot_preview1";
    linker.func_wrap(
        WASI,
        "clock_time_get",
        |mut g: Caller<'_, Host>, id: u32, _: u64, out: u32| clock_time(&mut g, id, out),
    )?;
    linker.func_wrap(
        WASI,
        "random_get",
        |mut g: Caller<'_, Host>, ptr: u32, len: u32| errno(random(&mut g, ptr, len)),
    )?;
    linker.func_wrap(
        WASI,
        "environ_sizes_get",
        |mut g: Caller<'_, Host>, count: u32, size: u32| errno(environ_sizes(&mut g, count, size)),
    )?;
    linker.func_wrap(
        WASI,
        "environ_get",
        |mut g: Caller<'_, Host>, list: u32, text: u32| errno(environ(&mut g, list, text)),
    )?;
    linker.func_wrap(
        WASI,
        "args_sizes_get",
        |mut g: Caller<'_, Host>, count: u32, size: u32| {
            errno(
                memory::write_u32(&mut g, count, 0)
                    .and_then(|()| memory::write_u32(&mut g, size, 0)),
            )
        },
    )?;
    linker.func_wrap(WASI, "args_get", |_: Caller<'_, Host>, _: u32, _: u32| {
        errno::SUCCESS
    })?;
    linker.func_wrap(
        WASI,
        "fd_write",
        |mut g: Caller<'_, Host>, fd: u32, list: u32, count: u32, out: u32| match fd {
            1 | 2 => errno(fd_write(&mut g, fd, list, count, out)),
            _ => errno::BADF,
        },
    )?;
    linker.func_wrap(
        WASI,
        "fd_read",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32| errno::NOTSUP,
    )?;
    linker.func_wrap(
        WASI,
        "fd_seek",
        |_: Caller<'_, Host>, _: u32, _: i64, _: u32, _: u32| errno::NOTSUP,
    )?;
    linker.func_wrap(WASI, "fd_close", |_: Caller<'_, Host>, _: u32| {
        errno::NOTSUP
    })?;
    linker.func_wrap(
        WASI,
        "fd_fdstat_get",
        |mut g: Caller<'_, Host>, fd: u32, out: u32| {
            // A character device that can be written to, for the two log streams only.
            let mut stat = [0_u8; 24];
            stat[0] = 2;
            stat[8] = 64;
            match fd {
                1 | 2 => errno(memory::write(&mut g, out, &stat)),
                _ => errno::BADF,
            }
        },
    )?;
    linker.func_wrap(WASI, "sched_yield", |_: Caller<'_, Host>| errno::SUCCESS)?;
    linker.func_wrap(
        WASI,
        "poll_oneoff",
        |_: Caller<'_, Host>, _: u32, _: u32, _: u32, _: u32| errno::NOTSUP,
    )?;
    linker.func_wrap(
        WASI,
        "proc_exit",
        |_: Caller<'_, Host>, code: u32| -> wasmtime::Result<()> {
            Err(wasmtime::format_err!("the guest called proc_exit({code})"))
        },
    )?;
    Ok(())
}

fn clock_time(guest: Guest<'_, '_>, id: u32, out: u32) -> i32 {
    let now = {
        let clock = &mut guest.data().world.borrow_mut().clock;
        clock.advance_to(clock.monotonic + clock.per_read);
        match id {
            0 => clock.wall,
            1 => clock.monotonic,
            _ => return errno::NOTSUP,
        }
    };
    errno(memory::write(guest, out, &now.to_le_bytes()))
}

fn random(guest: Guest<'_, '_>, ptr: u32, len: u32) -> Result<(), Status> {
    if len > MAX_RANDOM {
        return Err(Status::BadArgument);
    }
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while bytes.len() < len as usize {
        bytes.extend_from_slice(&guest.data_mut().random().to_le_bytes());
    }
    bytes.truncate(len as usize);
    memory::write(guest, ptr, &bytes)
}

fn environ_sizes(guest: Guest<'_, '_>, count: u32, size: u32) -> Result<(), Status> {
    let env = &guest.data().env;
    let (variables, bytes) = (
        env.len(),
        env.iter()
            .map(|(name, value)| name.len() + value.len() + 2)
            .sum::<usize>(),
    );
    memory::write_u32(guest, count, variables as u32)?;
    memory::write_u32(guest, size, bytes as u32)
}

fn environ(guest: Guest<'_, '_>, mut list: u32, mut text: u32) -> Result<(), Status> {
    for (name, value) in guest.data().env.clone() {
        let line = format!("{name}={value}\0");
        memory::write_u32(guest, list, text)?;
        memory::write(guest, text, line.as_bytes())?;
        list += 4;
        text += line.len() as u32;
    }
    Ok(())
}

fn fd_write(guest: Guest<'_, '_>, fd: u32, list: u32, count: u32, out: u32) -> Result<(), Status> {
    let word = |bytes: &[u8]| {
        bytes
            .try_into()
            .map(u32::from_le_bytes)
            .map_err(|_| Status::InvalidMemoryAccess)
    };
    let mut text = Vec::new();
    for slice in memory::read(guest, list, count.saturating_mul(8))?.chunks_exact(8) {
        let (ptr, len) = slice.split_at(4);
        text.extend(memory::read(guest, word(ptr)?, word(len)?)?);
    }
    let level = if fd == 1 {
        LogLevel::Info
    } else {
        LogLevel::Error
    };
    let line = String::from_utf8_lossy(&text).trim_end().to_owned();
    if !line.is_empty() {
        guest.data().log(level, line);
    }
    memory::write_u32(guest, out, text.len() as u32)
}
