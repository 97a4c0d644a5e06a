//! A stream of bytes to a peer: a TCP socket, or a stream with a simulated kernel.
//!
//! Thread: any; one owner at a time. It is an enum and not a trait object, so that calls to a
//! socket are direct. All calls are non-blocking.
//! Not here: dialling and accepting (`net`), what is sent and when.

pub mod memory;
pub mod ready;

use crate::sys::event::{WaitInterest, WaitSet};
use memory::MemoryStream;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;

/// A stream of bytes to a peer.
#[derive(Debug)]
pub enum ByteStream {
    /// A socket of the kernel.
    Socket(TcpStream),
    /// A stream in memory.
    Memory(MemoryStream),
}

impl From<TcpStream> for ByteStream {
    fn from(socket: TcpStream) -> ByteStream {
        ByteStream::Socket(socket)
    }
}

impl From<MemoryStream> for ByteStream {
    fn from(stream: MemoryStream) -> ByteStream {
        ByteStream::Memory(stream)
    }
}

impl ByteStream {
    /// Registers the stream with `set`, which it wakes for `interest`.
    pub fn adopt(&self, set: &WaitSet, interest: WaitInterest) -> io::Result<()> {
        match self {
            ByteStream::Socket(socket) => {
                socket.set_nonblocking(true)?;
                set.add(socket.as_fd(), interest)
            }
            ByteStream::Memory(stream) => {
                stream.wait_for(interest);
                Ok(())
            }
        }
    }

    /// Changes the interest for which `set` is woken.
    pub fn change(&self, set: &WaitSet, interest: WaitInterest) -> io::Result<()> {
        match self {
            ByteStream::Socket(socket) => set.change(socket.as_fd(), interest),
            ByteStream::Memory(stream) => {
                stream.wait_for(interest);
                Ok(())
            }
        }
    }

    /// Sends written bytes at once (TCP_NODELAY).
    pub fn set_nodelay(&self) -> io::Result<()> {
        match self {
            ByteStream::Socket(socket) => socket.set_nodelay(true),
            ByteStream::Memory(_) => Ok(()),
        }
    }

    /// Reads available bytes; 0: the stream has ended.
    #[inline]
    pub fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ByteStream::Socket(socket) => (&*socket).read(into),
            ByteStream::Memory(stream) => stream.read(into),
        }
    }
}
