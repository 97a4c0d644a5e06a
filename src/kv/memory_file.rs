//! Anonymous memory files, which processes map to share memory.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Bytes of a memory page.
pub(super) const PAGE: usize = 4096;

/// A new memory file of `len` bytes.
///
/// # Errors
/// The system refuses, or the process may not have a file of this length: the system would end the
/// process by SIGXFSZ.
pub(super) fn make_file(name: &CStr, len: usize) -> io::Result<File> {
    if len as u64 > longest_file() {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
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

/// Bytes of the longest file that this process may have (`ulimit -f`).
fn longest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is writable. After an error, it is as before: no limit.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
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
