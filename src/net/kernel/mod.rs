//! The operating system as a reactor uses it: sockets and their readiness, signals, the clock,
//! random numbers. Production has the real one. The simulator has one in memory for each process.
//!
//! Thread: `ctl`. It is an enum and not a trait object, so that calls of production are direct.
//! Invariants: only [`Kernel::wait`] blocks, and only the real one. Readiness is edge-triggered.
//! TLS lies above ([`Stream::secure`]) and needs real sockets.
//! Not here: what readiness means for a connection (`reactor`).

#[cfg_attr(not(feature = "serve"), path = "no_signals.rs")]
mod signals;
mod system;

use super::address::Address;
use super::entropy::Entropy;
use super::memory::{MemoryKernel, Signal};
use super::stream::{Listener, Stream};
use super::waker::Waker;
use crate::sys::clock::Clock;
use crate::sys::stream::ByteStream;
use crate::sys::stream::ready::Readiness;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use system::SystemKernel;

/// Tokens of sources that are neither listener nor connection.
pub(super) const WAKER: usize = usize::MAX;
pub(super) const SIGNALS: usize = usize::MAX - 1;
pub(super) const HANGUPS: usize = usize::MAX - 2;

#[derive(Debug)]
pub(super) enum Kernel {
    System(Box<SystemKernel>),
    Memory(MemoryKernel),
}

impl Kernel {
    pub(super) fn system() -> io::Result<Kernel> {
        Ok(Kernel::System(Box::new(SystemKernel::new()?)))
    }

    /// The time. It never goes back.
    pub(super) fn now(&self) -> Instant {
        match self {
            Kernel::System(_) => Instant::now(),
            Kernel::Memory(kernel) => kernel.now(),
        }
    }

    /// The time of day, since 1970-01-01 UTC.
    pub(super) fn since_epoch(&self) -> Duration {
        self.clock().since_epoch()
    }

    /// The clock, for other threads.
    pub(super) fn clock(&self) -> Clock {
        match self {
            Kernel::System(_) => Clock::default(),
            Kernel::Memory(kernel) => Clock::simulated(Arc::new(kernel.clone())),
        }
    }

    /// The source of random numbers.
    pub(super) fn entropy(&self) -> Entropy {
        match self {
            Kernel::System(_) => Entropy::System,
            Kernel::Memory(kernel) => kernel.entropy(),
        }
    }

    pub(super) fn waker(&self) -> io::Result<Waker> {
        match self {
            Kernel::System(kernel) => kernel.waker(),
            Kernel::Memory(kernel) => Ok(kernel.waker(WAKER)),
        }
    }

    /// Waits for readiness, at most for `timeout`, and writes it into `ready`. An interrupted wait
    /// finds nothing. A kernel in memory does not wait: its time does not pass here.
    pub(super) fn wait(
        &mut self,
        timeout: Option<Duration>,
        ready: &mut Vec<Readiness>,
    ) -> io::Result<()> {
        ready.clear();
        match self {
            Kernel::System(kernel) => kernel.wait(timeout, ready),
            Kernel::Memory(kernel) => {
                kernel.collect(ready);
                Ok(())
            }
        }
    }

    /// From now on, SIGTERM and SIGINT are readiness of [`SIGNALS`].
    pub(super) fn watch_signals(&mut self) -> io::Result<()> {
        match self {
            Kernel::System(kernel) => kernel.watch_signals(),
            Kernel::Memory(kernel) => {
                kernel.watch(Signal::Terminate, SIGNALS);
                Ok(())
            }
        }
    }

    /// From now on, SIGHUP is readiness of [`HANGUPS`].
    pub(super) fn watch_hangups(&mut self) -> io::Result<()> {
        match self {
            Kernel::System(kernel) => kernel.watch_hangups(),
            Kernel::Memory(kernel) => {
                kernel.watch(Signal::Hangup, HANGUPS);
                Ok(())
            }
        }
    }

    /// The number of signals of this token since the last call.
    pub(super) fn take_signals(&mut self, token: usize) -> usize {
        match self {
            Kernel::System(kernel) => kernel.take_signals(token),
            Kernel::Memory(kernel) => kernel.take_signals(token),
        }
    }

    pub(super) fn listen(&mut self, address: &Address, token: usize) -> io::Result<Listener> {
        match self {
            Kernel::System(kernel) => kernel.listen(address, token),
            Kernel::Memory(kernel) => Ok(Listener::Memory(kernel.listen(address, token)?)),
        }
    }

    /// Begins to connect.
    pub(super) fn connect(&mut self, address: &Address) -> io::Result<Stream> {
        match self {
            Kernel::System(_) => Stream::connect(address),
            Kernel::Memory(kernel) => Ok(Stream::Memory(kernel.connect(address))),
        }
    }

    /// Begins to connect over TCP, for a thread that polls the stream itself. The first write shows
    /// the result.
    pub(super) fn dial(&mut self, address: SocketAddr) -> io::Result<ByteStream> {
        match self {
            Kernel::System(_) => Ok(TcpStream::from(mio::net::TcpStream::connect(address)?).into()),
            Kernel::Memory(kernel) => Ok(kernel.connect(&Address::Tcp(address)).into()),
        }
    }

    /// Removes a stream, which another thread will poll. `None` if it is not TCP.
    pub(super) fn without(&mut self, mut stream: Stream) -> Option<ByteStream> {
        match (self, &mut stream) {
            (Kernel::System(kernel), stream) => kernel.deregister(stream),
            (Kernel::Memory(_), Stream::Memory(stream)) => stream.deregister(),
            (Kernel::Memory(_), _) => {}
        }
        stream.into_bytes()
    }

    pub(super) fn register(&mut self, stream: &mut Stream, token: usize) -> io::Result<()> {
        match (self, stream) {
            (Kernel::Memory(kernel), Stream::Memory(stream)) => {
                stream.register(token, &kernel.ready_set());
                Ok(())
            }
            (Kernel::System(kernel), stream) => kernel.register(stream, token),
            (Kernel::Memory(_), _) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}
