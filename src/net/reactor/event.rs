//! Events of a reactor, and the errors of a send.

use super::ListenerId;
use crate::net::connection::{CloseReason, ConnId};
use std::fmt;
use std::net::SocketAddr;

/// An event of a listener, a connection, a waker or a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A peer connected.
    Accepted {
        /// The listener that accepted it.
        listener: ListenerId,
        /// The new connection.
        conn: ConnId,
        /// The peer's address, if it is TCP.
        peer: Option<SocketAddr>,
    },
    /// A dialled connection is established.
    Connected(ConnId),
    /// Bytes wait in [`Reactor::received`](super::Reactor::received).
    Received(ConnId),
    /// The peer closed its end. Bytes can still be sent; `Closed` follows if the peer is gone.
    Eof(ConnId),
    /// The kernel has taken all queued bytes, after it had refused more for a while.
    Drained(ConnId),
    /// The connection has ended.
    Closed {
        /// The connection.
        conn: ConnId,
        /// The reason.
        reason: CloseReason,
    },
    /// A [`Waker`](crate::net::Waker) was used.
    Woken,
    /// SIGTERM or SIGINT came.
    Terminate,
    /// SIGHUP came.
    Hangup,
}

/// The reason why bytes were not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendError {
    /// The connection has ended, or its owner closed it.
    Closed,
    /// Too many bytes wait already: the reader is too slow. No byte was taken.
    Full,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SendError::Closed => write!(f, "connection is closed"),
            SendError::Full => write!(f, "peer reads too slowly: too many bytes are queued"),
        }
    }
}

impl std::error::Error for SendError {}
