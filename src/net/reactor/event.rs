//! What a reactor says: what has happened, and why bytes were not taken.

use super::ListenerId;
use crate::net::connection::{CloseReason, ConnId};
use std::fmt;
use std::net::SocketAddr;

/// What has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A peer has connected.
    Accepted {
        /// To this listener.
        listener: ListenerId,
        /// The new connection.
        conn: ConnId,
        /// The peer's address, over TCP.
        peer: Option<SocketAddr>,
    },
    /// A dialled connection stands.
    Connected(ConnId),
    /// Bytes wait in [`Reactor::received`](super::Reactor::received).
    Received(ConnId),
    /// The peer has closed its end; it may still be sent to, and `Closed` follows where it turns out to be gone.
    Eof(ConnId),
    /// All that was queued has been handed to the kernel, after that took no more for a while.
    Drained(ConnId),
    /// The connection is over.
    Closed {
        /// Which.
        conn: ConnId,
        /// Why.
        reason: CloseReason,
    },
    /// A [`Waker`](crate::net::Waker) was used.
    Woken,
    /// SIGTERM or SIGINT came.
    Terminate,
    /// SIGHUP came.
    Hangup,
}

/// Bytes were not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendError {
    /// The connection is over, or was given up.
    Closed,
    /// Too much waits already: the reader is too slow. Nothing of it was taken.
    Full,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SendError::Closed => write!(f, "connection is closed"),
            SendError::Full => write!(f, "peer reads too slowly, too many bytes wait for it"),
        }
    }
}

impl std::error::Error for SendError {}
