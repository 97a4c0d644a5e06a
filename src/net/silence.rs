//! How long a host may be silent before its connections are closed: one that is gone, or behind a link that is
//! cut, closes nothing itself.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Has the kernel close a TCP connection whose other end acknowledges nothing for so long, whether bytes are
/// under way or the connection is quiet; or takes nothing of what waits for it, which counts as the same.
pub(super) fn limit(socket: BorrowedFd<'_>, longest: Duration) -> io::Result<()> {
    // Asked for the first time after a third of it, then each fifth.
    let (idle, interval) = (longest.as_secs() / 3, longest.as_secs() / 5);
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, idle.max(1) as libc::c_int)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, interval.max(1) as libc::c_int)?;
    // Also in place of a number of questions.
    set(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, longest.as_millis() as libc::c_int)
}

fn set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let size = size_of_val(&value) as libc::socklen_t;
    // SAFETY: an open socket, and an int of that size, which is read before the call returns.
    match unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
