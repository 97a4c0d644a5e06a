//! The stream of a lane: a socket, or a stream with a simulated kernel.
//!
//! Thread: `move`; `ctl` makes them. It is an enum and not a trait object, so that calls to a
//! socket are direct. All calls are non-blocking.
//! Not here: dialling and accepting (`peer::tcp_handshake`), what is sent and when (`source`,
//! `destination`).

use super::memory::MemoryStream;
use crate::kv::region::Region;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::transfer::plan::Piece;
use crate::transfer::transport::vectored;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;

/// A stream of bytes to a peer.
#[derive(Debug)]
pub enum Stream {
    /// A kernel socket.
    Socket(TcpStream),
    /// A stream in memory.
    Memory(MemoryStream),
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Stream {
        Stream::Socket(socket)
    }
}

impl From<MemoryStream> for Stream {
    fn from(stream: MemoryStream) -> Stream {
        Stream::Memory(stream)
    }
}

impl Stream {
    /// Registers the stream with `set`, which it wakes for `interest`.
    pub(super) fn adopt(&self, set: &WaitSet, interest: WaitInterest) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => {
                socket.set_nonblocking(true)?;
                set.add(socket.as_fd(), interest)
            }
            Stream::Memory(stream) => {
                stream.wait_for(interest);
                Ok(())
            }
        }
    }

    /// Changes the interest for which `set` is woken.
    pub(super) fn change(&self, set: &WaitSet, interest: WaitInterest) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => set.change(socket.as_fd(), interest),
            Stream::Memory(stream) => {
                stream.wait_for(interest);
                Ok(())
            }
        }
    }

    /// Sends written bytes at once (TCP_NODELAY).
    pub(super) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => socket.set_nodelay(true),
            Stream::Memory(_) => Ok(()),
        }
    }

    /// Like [`vectored::send`].
    #[inline]
    pub(super) fn send(
        &self,
        head: &[u8],
        region: &Region,
        pieces: impl Iterator<Item = Piece>,
    ) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => vectored::send(socket.as_fd(), head, region, pieces),
            Stream::Memory(stream) => stream.send(head, region, pieces),
        }
    }

    /// Like [`vectored::receive`].
    #[inline]
    pub(super) fn receive(
        &self,
        region: &Region,
        pieces: impl Iterator<Item = Piece>,
    ) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => vectored::receive(socket.as_fd(), region, pieces),
            Stream::Memory(stream) => stream.receive(region, pieces),
        }
    }

    /// Reads available bytes; 0: the stream has ended.
    #[inline]
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&*socket).read(into),
            Stream::Memory(stream) => stream.read(into),
        }
    }
}
