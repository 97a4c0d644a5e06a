//! Anonymous memory files, which processes map to share memory.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Bytes of a memory page.
pub(super) const PAGE: usize = 4096;

/// A new memory file of `len` bytes.
pub(super) fn make_file(name: &CStr, len: usize) -> io::Result<File> {
    // SAFETY: `name` is a C string; the flags are valid.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len as u64)?;
    Ok(file)
}

/// Seals a memory file for good: its size stays, and no new mapping can write it.
pub(super) fn seal(file: &File) -> io::Result<()> {
    let seals =
        libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
    // SAFETY: `fcntl` with integer arguments on an open descriptor.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
