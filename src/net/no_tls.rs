//! The types of TLS in a build without it. No value of them exists, so no connection uses TLS.

use mio::net::TcpStream;
use std::io;

/// Trusted CA certificates.
#[derive(Clone, Debug)]
pub enum Authorities {}

/// A certificate and its private key.
#[derive(Clone, Debug)]
pub enum Credentials {}

impl Credentials {
    pub(super) fn accept(&self, _: TcpStream) -> io::Result<TlsStream> {
        match *self {}
    }
}

/// A TCP stream and the session over it.
#[derive(Debug)]
pub(super) enum TlsStream {}

impl TlsStream {
    pub(super) fn dial(_: TcpStream, to: &Authorities, _: &str) -> io::Result<TlsStream> {
        match *to {}
    }

    pub(super) fn tcp(&self) -> &TcpStream {
        match *self {}
    }

    pub(super) fn tcp_mut(&mut self) -> &mut TcpStream {
        match *self {}
    }

    pub(super) fn shake(&mut self) -> io::Result<bool> {
        match *self {}
    }

    pub(super) fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match *self {}
    }

    pub(super) fn is_pending(&self) -> bool {
        match *self {}
    }

    pub(super) fn shutdown_write(&mut self) -> io::Result<()> {
        match *self {}
    }
}
