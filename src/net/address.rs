//! Addresses of listeners and peers.

use std::net::SocketAddr;

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
