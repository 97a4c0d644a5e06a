//! What a lane runs over: a socket, or a stream whose kernel is whoever simulates one.
//!
//! Thread: `move`; `ctl` makes them. An enum, so that a socket is called as before. All calls are non-blocking.
//! Not here: dialling and accepting (`front::lanes`), what is sent and when (`source`, `destination`).

use super::memory::MemoryStream;
use crate::kv::region::Region;
use crate::sys::event::{Interest, WaitSet};
use crate::transfer::plan::Piece;
use crate::transfer::transport::vectored;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;

/// A stream of bytes to a peer.
#[derive(Debug)]
pub enum Stream {
    /// Of the kernel's.
    Socket(TcpStream),
    /// Of memory.
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
    /// From now on `set` is woken for it.
    pub(super) fn adopt(&self, set: &WaitSet, interest: Interest) -> io::Result<()> {
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

    /// Changes what `set` is woken for.
    pub(super) fn change(&self, set: &WaitSet, interest: Interest) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => set.change(socket.as_fd(), interest),
            Stream::Memory(stream) => {
                stream.wait_for(interest);
                Ok(())
            }
        }
    }

    /// Has what is written leave at once.
    pub(super) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => socket.set_nodelay(true),
            Stream::Memory(_) => Ok(()),
        }
    }

    /// As [`vectored::send`].
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

    /// As [`vectored::receive`].
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

    /// Reads what is there; 0: the stream has ended.
    #[inline]
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&*socket).read(into),
            Stream::Memory(stream) => stream.read(into),
        }
    }
}
