//! TCP keepalive: closes connections to a host that is silent for too long. A host that is down or
//! cut off does not close them itself.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Makes the kernel close a TCP connection after `longest` without an acknowledgement from the
/// peer. This applies to connections with bytes in flight and to idle ones. A peer that accepts no
/// data counts as silent, too.
pub(super) fn limit(socket: BorrowedFd<'_>, longest: Duration) -> io::Result<()> {
    // The kernel sends the first probe after a third of the time, then one each fifth of the time.
    let (idle, interval) = (longest.as_secs() / 3, longest.as_secs() / 5);
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, idle.max(1) as libc::c_int)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, interval.max(1) as libc::c_int)?;
    // This timeout also replaces a maximum number of probes.
    set(socket, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, longest.as_millis() as libc::c_int)
}

/// Makes the kernel close an idle TCP connection after `longest` without an acknowledgement from
/// the peer. A peer that accepts no data is not silent.
pub(super) fn probe(socket: BorrowedFd<'_>, longest: Duration) -> io::Result<()> {
    // The first probe comes after half of the time. The last of three probes has the same time to
    // be answered as the others.
    let (idle, interval) = (longest.as_secs() / 2, longest.as_secs() / 6);
    set(socket, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, idle.max(1) as libc::c_int)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, interval.max(1) as libc::c_int)?;
    set(socket, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3)
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
