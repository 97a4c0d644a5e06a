//! Replaces the product's system calls. Models run the threads' loops themselves, and sleep in
//! place of a system call that waits.

#[path = "../../../src/sys/last_resort.rs"]
pub mod last_resort;

pub mod event {
    use crate::models::sleep::Sleep;
    use std::fmt;
    use std::io::{self, Stdin};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::sync::OnceLock;
    use std::time::Duration;

    #[derive(Debug)]
    pub enum WaitInterest {
        Readable,
    }

    /// An eventfd in which a listener sleeps.
    pub struct EventFd(Sleep);

    /// A wait set in which no thread waits.
    #[derive(Debug)]
    pub struct WaitSet;

    impl EventFd {
        pub fn new() -> io::Result<EventFd> {
            Ok(EventFd(Sleep::new()))
        }

        pub fn duplicate(&self) -> io::Result<EventFd> {
            Ok(EventFd(self.0.clone()))
        }

        pub fn signal(&self) {
            self.0.wake();
        }

        pub fn clear(&self) {}

        /// Sleeps until it is signalled.
        pub fn sleep(&self) {
            self.0.sleep();
        }
    }

    impl AsFd for EventFd {
        /// Any valid descriptor.
        fn as_fd(&self) -> BorrowedFd<'_> {
            static STDIN: OnceLock<Stdin> = OnceLock::new();
            STDIN.get_or_init(io::stdin).as_fd()
        }
    }

    impl fmt::Debug for EventFd {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("EventFd")
        }
    }

    impl WaitSet {
        pub fn new() -> io::Result<WaitSet> {
            Ok(WaitSet)
        }

        pub fn add(&self, _fd: BorrowedFd<'_>, _interest: WaitInterest) -> io::Result<()> {
            Ok(())
        }

        pub fn wait(&self, _timeout: Duration) -> bool {
            unreachable!("models sleep in the `EventFd`");
        }
    }
}
