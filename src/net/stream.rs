//! TCP, TLS over TCP, and unix sockets behind one interface.

use super::authorities::Authorities;
use super::tls::{Credentials, TlsStream};
use super::{descriptors, keepalive};
use crate::limits::NET_HOST_SILENCE_MAX;
use mio::event::Source;
use mio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use mio::{Interest, Registry, Token};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr as UnixAddr;

/// An address to listen on or to connect to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// An IP address and port.
    Tcp(SocketAddr),
    /// An abstract unix socket; its name without the leading zero byte.
    Abstract(Vec<u8>),
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp(address)
    }
}

#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
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
                // Fails only on a dead connection; its first read reports that.
                let _ = stream.set_nodelay(true);
                (Stream::Tcp(stream), Some(peer))
            }
            Listener::Unix(listener) => (Stream::Unix(listener.accept()?.0), None),
        })
    }

    pub(super) fn local_address(&self) -> io::Result<Option<SocketAddr>> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Some),
            Listener::Unix(_) => Ok(None),
        }
    }

    pub(super) fn source(&mut self) -> &mut dyn Source {
        match self {
            Listener::Tcp(listener) => listener,
            Listener::Unix(listener) => listener,
        }
    }
}

/// Begins to connect, for a thread that polls the stream itself. The first write shows the result.
pub fn dial(address: SocketAddr) -> io::Result<std::net::TcpStream> {
    TcpStream::connect(address).map(std::net::TcpStream::from)
}

#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream>),
    Unix(UnixStream),
}

impl Stream {
    /// Adds TLS, as a server. No byte may have been read before.
    pub(super) fn secure(self, credentials: &Credentials) -> io::Result<Stream> {
        match self {
            Stream::Tcp(tcp) => Ok(Stream::Tls(Box::new(credentials.accept(tcp)?))),
            Stream::Tls(_) | Stream::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Adds TLS, as a client of `host`. The connection need not be established yet.
    pub(super) fn greet(self, authorities: &Authorities, host: &str) -> io::Result<Stream> {
        match self {
            Stream::Tcp(tcp) => Ok(Stream::Tls(Box::new(TlsStream::dial(tcp, authorities, host)?))),
            Stream::Tls(_) | Stream::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Continues a handshake, if there is one. Returns whether it is done.
    pub(super) fn shake(&mut self) -> io::Result<bool> {
        match self {
            Stream::Tls(secured) => secured.shake(),
            Stream::Tcp(_) | Stream::Unix(_) => Ok(true),
        }
    }

    /// Sends bytes that an earlier write has taken but not sent. Returns whether all are sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Stream::Tls(secured) => secured.flush(),
            Stream::Tcp(_) | Stream::Unix(_) => Ok(true),
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
            Stream::Tls(secured) => (secured.tcp.take_error()?, secured.tcp.peer_addr().map(drop)),
            Stream::Unix(stream) => (stream.take_error()?, stream.peer_addr().map(drop)),
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
            Stream::Tls(secured) => Some(&secured.tcp),
            Stream::Unix(_) => None,
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
        }
    }

    pub(super) fn shutdown_write(&mut self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Tls(secured) => secured.shutdown_write(),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    pub(super) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match self {
            Stream::Tcp(stream) => registry.register(stream, token, interest),
            Stream::Tls(secured) => registry.register(&mut secured.tcp, token, interest),
            Stream::Unix(stream) => registry.register(stream, token, interest),
        }
    }
}
