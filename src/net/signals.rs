//! SIGTERM and SIGINT as bytes in a socket that the reactor watches.
//!
//! Thread: `ctl`. Invariants: the handlers are taken back when the value is dropped.

use mio::net::UnixStream;
use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::{pipe, unregister};
use std::io::{self, Read};
use std::os::unix::net::UnixStream as StdStream;

/// The handlers, and the end of the socket that is read.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) stream: UnixStream,
    handlers: [SigId; 2],
}

impl Signals {
    pub(super) fn install() -> io::Result<Signals> {
        let (read, write) = StdStream::pair()?;
        read.set_nonblocking(true)?;
        let interrupt = pipe::register(SIGINT, write.try_clone()?)?;
        let terminate = pipe::register(SIGTERM, write)?;
        Ok(Signals { stream: UnixStream::from_std(read), handlers: [interrupt, terminate] })
    }

    /// Signals that have come since the last call.
    pub(super) fn take(&mut self) -> usize {
        let mut bytes = [0; 64];
        let mut count = 0;
        while let Ok(read @ 1..) = self.stream.read(&mut bytes) {
            count += read;
        }
        count
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handlers.into_iter().for_each(|handler| {
            unregister(handler);
        });
    }
}
