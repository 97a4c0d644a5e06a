//! Event counters that work across processes (eventfd), and sets of descriptors to wait on (epoll).
//!
//! Thread: `move`, `post` and `poll` wait; any thread signals.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// A doorbell that can be passed to another process.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new counter at zero.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        // SAFETY: a fresh descriptor without another owner.
        checked(fd).map(|fd| EventFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes over a descriptor received from a peer. It can be another kind of file, so errors of
    /// signals are ignored.
    ///
    /// # Errors
    /// A signal could block.
    pub fn from_descriptor(fd: OwnedFd) -> io::Result<EventFd> {
        // SAFETY: no pointers; the result is checked.
        let flags = checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
        match flags & libc::O_NONBLOCK {
            0 => Err(io::Error::new(io::ErrorKind::InvalidInput, "a doorbell that can block")),
            _ => Ok(EventFd(fd)),
        }
    }

    /// A second handle to the same counter.
    pub fn duplicate(&self) -> io::Result<EventFd> {
        self.0.try_clone().map(EventFd)
    }

    /// Wakes the waiter. A counter at its maximum has already woken it.
    pub fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Waits until the counter is not zero or the time is over. Returns whether it is not zero.
    ///
    /// # Errors
    /// The system cannot wait. A signal only ends the wait early.
    pub fn wait_readable(&self, timeout: Duration) -> io::Result<bool> {
        let mut wanted = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: one descriptor, a readable time, and no signal mask.
        let ready = unsafe { libc::ppoll(&mut wanted, 1, &time, std::ptr::null()) };
        match ready {
            0.. => Ok(ready > 0),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
        }
    }

    /// Sets the counter to zero. Returns whether it was not zero.
    pub fn clear(&self) -> bool {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes.
        let read =
            unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        read > 0
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Descriptors to wait on together.
#[derive(Debug)]
pub struct WaitSet(OwnedFd);

/// What to wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitInterest {
    /// Readable or ended.
    Readable,
    /// Readable, ended, or writable.
    ReadableOrWritable,
}

impl WaitSet {
    /// An empty set.
    pub fn new() -> io::Result<WaitSet> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        // SAFETY: a fresh descriptor without another owner.
        checked(fd).map(|fd| WaitSet(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Adds a descriptor, level-triggered. Closing it removes it.
    pub fn add(&self, fd: BorrowedFd<'_>, interest: WaitInterest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), interest)
    }

    /// Changes the interest in a descriptor.
    pub fn change(&self, fd: BorrowedFd<'_>, interest: WaitInterest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_raw_fd(), interest)
    }

    /// Waits until a descriptor is ready or the time is over. Returns whether one is ready. It does
    /// not say which one: movers check all.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let millis = timeout.as_millis().min(60_000) as libc::c_int;
        // SAFETY: there is room for eight events. An interrupted wait is only shorter.
        unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                ready.as_mut_ptr(),
                ready.len() as libc::c_int,
                millis,
            ) > 0
        }
    }

    fn control(&self, operation: libc::c_int, fd: RawFd, interest: WaitInterest) -> io::Result<()> {
        let events = match interest {
            WaitInterest::Readable => libc::EPOLLIN,
            WaitInterest::ReadableOrWritable => libc::EPOLLIN | libc::EPOLLOUT,
        };
        let mut event = libc::epoll_event { events: events as u32, u64: fd as u64 };
        // SAFETY: `event` outlives the call.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &mut event) }).map(drop)
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_signal_before_the_wait_is_not_lost() {
        let (counter, set) = (EventFd::new().unwrap(), WaitSet::new().unwrap());
        set.add(counter.as_fd(), WaitInterest::Readable).unwrap();
        counter.duplicate().unwrap().signal();
        let begun = Instant::now();
        set.wait(Duration::from_secs(30));
        assert!(begun.elapsed() < Duration::from_secs(30));
        counter.clear();
        set.wait(Duration::ZERO);
    }

    #[test]
    fn a_doorbell_that_can_block_is_refused() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let refused = EventFd::from_descriptor(writer.into()).unwrap_err();
        assert_eq!(refused.to_string(), "a doorbell that can block");
        let own = EventFd::new().unwrap().duplicate().unwrap();
        EventFd::from_descriptor(own.0).unwrap().signal();
    }
}
