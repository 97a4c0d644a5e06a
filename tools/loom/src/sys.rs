//! In the place of the product's system calls: models play the mover's thread themselves, so none is made.

pub mod event {
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::time::Duration;

    #[derive(Debug)]
    pub enum Interest {
        Readable,
    }

    #[derive(Debug)]
    pub enum EventCounter {}

    #[derive(Debug)]
    pub enum WaitSet {}

    impl EventCounter {
        pub fn new() -> io::Result<EventCounter> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub fn duplicate(&self) -> io::Result<EventCounter> {
            match *self {}
        }

        pub fn signal(&self) {
            match *self {}
        }

        pub fn clear(&self) {
            match *self {}
        }
    }

    impl AsFd for EventCounter {
        fn as_fd(&self) -> BorrowedFd<'_> {
            match *self {}
        }
    }

    impl WaitSet {
        pub fn new() -> io::Result<WaitSet> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub fn add(&self, _fd: BorrowedFd<'_>, _interest: Interest) -> io::Result<()> {
            match *self {}
        }

        pub fn wait(&self, _timeout: Duration) {
            match *self {}
        }
    }
}
