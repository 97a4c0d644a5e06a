//! Signals as bytes in a socket that the reactor watches.
//!
//! Thread: `ctl`. Invariant: dropping the value removes the handlers.

use mio::net::UnixStream;
use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};
use std::ffi::c_int;
use std::io::{self, Read};
use std::os::unix::net::UnixStream as StdStream;

/// The handlers, and the read end of the socket.
#[derive(Debug)]
pub(super) struct Signals {
    stream: UnixStream,
    handlers: Vec<SigId>,
}

impl Signals {
    /// Installs handlers for these signals.
    pub(super) fn install(signals: &[c_int]) -> io::Result<Signals> {
        let (read, write) = StdStream::pair()?;
        read.set_nonblocking(true)?;
        let mut installed = Signals { stream: UnixStream::from_std(read), handlers: Vec::new() };
        for &signal in signals {
            installed.handlers.push(pipe::register(signal, write.try_clone()?)?);
        }
        Ok(installed)
    }

    /// What the reactor polls.
    pub(super) fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }

    /// Number of signals since the last call.
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
        self.handlers.drain(..).for_each(|handler| {
            unregister(handler);
        });
    }
}
