//! TCP, TLS over TCP, and unix sockets behind one interface.

use super::address::Address;
use super::memory::MemoryListener;
use super::tls::TlsStream;
use super::{Authorities, Credentials};
use super::{descriptors, keepalive};
use crate::limits::{NET_CLIENT_SILENCE_MAX, NET_HOST_SILENCE_MAX};
use crate::sys::stream::ByteStream;
use crate::sys::stream::memory::MemoryStream;
use mio::event::Source;
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr as UnixAddr;

#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
    Memory(MemoryListener),
}

impl Listener {
    pub(super) fn bind(address: &Address) -> io::Result<Listener> {
        Ok(match address {
            Address::Tcp(address) => Listener::Tcp(TcpListener::bind(*address)?),
            Address::Abstract(name) => {
                Listener::Unix(UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?)?)
            }
        })
    }

    /// The next connection, and its peer's address over TCP.
    pub(super) fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        Ok(match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept()?;
                // These fail only on a dead connection; its first read reports that.
                let _ = stream.set_nodelay(true);
                let _ = keepalive::probe(stream.as_fd(), NET_CLIENT_SILENCE_MAX);
                (Stream::Tcp(stream), Some(peer))
            }
            Listener::Unix(listener) => (Stream::Unix(listener.accept()?.0), None),
            Listener::Memory(listener) => {
                let (stream, peer) = listener.accept()?;
                stream.limit_silence(NET_CLIENT_SILENCE_MAX);
                (Stream::Memory(stream), peer)
            }
        })
    }

    pub(super) fn local_address(&self) -> io::Result<Option<SocketAddr>> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Some),
            Listener::Unix(_) => Ok(None),
            Listener::Memory(listener) => Ok(listener.address()),
        }
    }

    /// What mio polls; `None` in memory.
    pub(super) fn source(&mut self) -> Option<&mut dyn Source> {
        match self {
            Listener::Tcp(listener) => Some(listener),
            Listener::Unix(listener) => Some(listener),
            Listener::Memory(_) => None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream>),
    Unix(UnixStream),
    /// In the simulator, in place of TCP and unix streams.
    Memory(MemoryStream),
}

impl Stream {
    /// Adds TLS, as a server. No byte may have been read before.
    pub(super) fn secure(self, credentials: &Credentials) -> io::Result<Stream> {
        match self {
            Stream::Tcp(tcp) => Ok(Stream::Tls(Box::new(credentials.accept(tcp)?))),
            Stream::Tls(_) | Stream::Unix(_) | Stream::Memory(_) => {
                Err(io::ErrorKind::Unsupported.into())
            }
        }
    }

    /// Adds TLS, as a client of `host`. The connection need not be established yet.
    pub(super) fn greet(self, authorities: &Authorities, host: &str) -> io::Result<Stream> {
        match self {
            Stream::Tcp(tcp) => Ok(Stream::Tls(Box::new(TlsStream::dial(tcp, authorities, host)?))),
            Stream::Tls(_) | Stream::Unix(_) | Stream::Memory(_) => {
                Err(io::ErrorKind::Unsupported.into())
            }
        }
    }

    /// Continues a handshake, if there is one. Returns whether it is done.
    pub(super) fn shake(&mut self) -> io::Result<bool> {
        match self {
            Stream::Tls(secured) => secured.shake(),
            Stream::Tcp(_) | Stream::Unix(_) | Stream::Memory(_) => Ok(true),
        }
    }

    /// Sends bytes that an earlier write has taken but not sent. Returns whether all are sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Stream::Tls(secured) => secured.flush(),
            Stream::Tcp(_) | Stream::Unix(_) | Stream::Memory(_) => Ok(true),
        }
    }

    /// Whether an earlier write has taken bytes that are not sent yet.
    pub(super) fn is_pending(&self) -> bool {
        matches!(self, Stream::Tls(secured) if secured.is_pending())
    }

    /// An established TCP connection.
    pub(super) fn adopted(stream: std::net::TcpStream) -> Stream {
        Stream::Tcp(TcpStream::from_std(stream))
    }

    /// Begins to connect.
    pub(super) fn connect(address: &Address) -> io::Result<Stream> {
        Ok(match address {
            Address::Tcp(address) => Stream::Tcp(TcpStream::connect(*address)?),
            Address::Abstract(name) => {
                Stream::Unix(UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?)
            }
        })
    }

    /// Whether the connection is established: an error if it failed, `false` if it is still
    /// connecting.
    pub(super) fn finish_connect(&self) -> io::Result<bool> {
        let (error, peer) = match self {
            Stream::Tcp(stream) => (stream.take_error()?, stream.peer_addr().map(drop)),
            Stream::Tls(secured) => {
                (secured.tcp().take_error()?, secured.tcp().peer_addr().map(drop))
            }
            Stream::Unix(stream) => (stream.take_error()?, stream.peer_addr().map(drop)),
            Stream::Memory(stream) => {
                stream.limit_silence(NET_HOST_SILENCE_MAX);
                return stream.finish_connect();
            }
        };
        if let Some(error) = error {
            return Err(error);
        }
        match peer {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(false),
            other => other?,
        }
        let tcp = match self {
            Stream::Tcp(stream) => Some(stream),
            Stream::Tls(secured) => Some(secured.tcp()),
            Stream::Unix(_) | Stream::Memory(_) => None,
        };
        if let Some(stream) = tcp {
            stream.set_nodelay(true)?;
            keepalive::limit(stream.as_fd(), NET_HOST_SILENCE_MAX)?;
        }
        Ok(true)
    }

    /// Reads bytes, and from a unix stream the descriptors that come with them.
    pub(super) fn read(
        &mut self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(bytes),
            Stream::Tls(secured) => secured.read(bytes),
            Stream::Unix(stream) => descriptors::receive(stream.as_fd(), bytes, descriptors),
            Stream::Memory(stream) => stream.read_message(bytes, descriptors),
        }
    }

    /// Whether it uses TLS.
    pub(super) fn is_secured(&self) -> bool {
        matches!(self, Stream::Tls(_))
    }

    /// Whether a short read proves that the socket is empty. On a unix stream a read stops where
    /// descriptors change, over TLS at the end of a record.
    pub(super) fn short_read_empties(&self) -> bool {
        matches!(self, Stream::Tcp(_))
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Tls(secured) => secured.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Memory(stream) => stream.write(bytes, Vec::new()),
        }
    }

    /// Writes bytes, and descriptors with the first byte. Returns how many bytes the socket took.
    ///
    /// # Errors
    /// `Unsupported` if the stream carries no descriptors.
    pub(super) fn write_descriptors(
        &mut self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => descriptors::send(stream.as_fd(), bytes, descriptors),
            Stream::Memory(stream) => {
                let owned = descriptors.iter().map(|descriptor| descriptor.try_clone_to_owned());
                stream.write(bytes, owned.collect::<io::Result<_>>()?)
            }
            Stream::Tcp(_) | Stream::Tls(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    pub(super) fn shutdown_write(&mut self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Tls(secured) => secured.shutdown_write(),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            Stream::Memory(stream) => stream.shutdown_write(),
        }
    }

    /// What mio polls; `None` in memory.
    pub(super) fn source(&mut self) -> Option<&mut dyn Source> {
        match self {
            Stream::Tcp(stream) => Some(stream),
            Stream::Tls(secured) => Some(secured.tcp_mut()),
            Stream::Unix(stream) => Some(stream),
            Stream::Memory(_) => None,
        }
    }

    /// The stream without TLS and without the reactor, if it is TCP.
    pub(super) fn into_bytes(self) -> Option<ByteStream> {
        match self {
            Stream::Tcp(stream) => Some(std::net::TcpStream::from(stream).into()),
            Stream::Memory(stream) => Some(stream.into()),
            Stream::Tls(_) | Stream::Unix(_) => None,
        }
    }
}
