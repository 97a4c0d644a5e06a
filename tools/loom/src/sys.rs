//! In the place of the product's system calls: models play the loops of threads themselves, and sleep where those
//! would wait.

pub mod event {
    use crate::models::sleep::Sleep;
    use std::fmt;
    use std::io::{self, Stdin};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::sync::OnceLock;
    use std::time::Duration;

    #[derive(Debug)]
    pub enum Interest {
        Readable,
    }

    /// A listener sleeps in it.
    pub struct EventCounter(Sleep);

    /// Nobody waits in it.
    #[derive(Debug)]
    pub struct WaitSet;

    impl EventCounter {
        pub fn new() -> io::Result<EventCounter> {
            Ok(EventCounter(Sleep::new()))
        }

        pub fn duplicate(&self) -> io::Result<EventCounter> {
            Ok(EventCounter(self.0.clone()))
        }

        pub fn signal(&self) {
            self.0.wake();
        }

        pub fn clear(&self) {}

        /// Until it is signalled.
        pub fn sleep(&self) {
            self.0.sleep();
        }
    }

    impl AsFd for EventCounter {
        /// Some descriptor.
        fn as_fd(&self) -> BorrowedFd<'_> {
            static STDIN: OnceLock<Stdin> = OnceLock::new();
            STDIN.get_or_init(io::stdin).as_fd()
        }
    }

    impl fmt::Debug for EventCounter {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("EventCounter")
        }
    }

    impl WaitSet {
        pub fn new() -> io::Result<WaitSet> {
            Ok(WaitSet)
        }

        pub fn add(&self, _fd: BorrowedFd<'_>, _interest: Interest) -> io::Result<()> {
            Ok(())
        }

        pub fn wait(&self, _timeout: Duration) {
            unreachable!("models sleep in the counter");
        }
    }
}
