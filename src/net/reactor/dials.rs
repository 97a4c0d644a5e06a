//! Dialled connections. `Connected` reports a connection that is established; with TLS, the server
//! has also proved its identity.
//!
//! Thread: `ctl`. Invariants: one deadline covers the connection and its handshake. No queued byte
//! is sent before both are done.

use super::{Connection, ConnectionState, Event, Reactor, Stream};
use crate::net::address::Address;
use crate::net::connection::{CloseReason, ConnId};
use crate::net::{Authorities, TlsError};
use crate::sys::stream::ByteStream;
use std::io;
use std::net::SocketAddr;
use std::time::Instant;

impl Reactor {
    /// Begins to connect. `Connected` or `Closed` reports the result, at the deadline at the
    /// latest. Bytes can already be queued before that.
    ///
    /// # Errors
    /// There are too many connections.
    pub fn connect(&mut self, address: &Address, deadline: Instant) -> Result<ConnId, CloseReason> {
        let stream = self.kernel.connect(address);
        self.attempt(stream, deadline)
    }

    /// Like [`Reactor::connect`], over TLS. The server must prove to `authorities` that it is
    /// `host`.
    pub fn connect_secured(
        &mut self,
        address: &Address,
        (authorities, host): (&Authorities, &str),
        deadline: Instant,
    ) -> Result<ConnId, CloseReason> {
        let stream = self.kernel.connect(address);
        self.attempt(stream.and_then(|stream| stream.greet(authorities, host)), deadline)
    }

    /// Begins to connect over TCP, for a thread that polls the stream itself. The first write shows
    /// the result.
    ///
    /// # Errors
    /// As for a socket.
    pub fn dial(&mut self, address: SocketAddr) -> io::Result<ByteStream> {
        self.kernel.dial(address)
    }

    fn attempt(
        &mut self,
        stream: io::Result<Stream>,
        deadline: Instant,
    ) -> Result<ConnId, CloseReason> {
        if self.table.is_full() {
            return Err(CloseReason::TooMany);
        }
        let id = self.table.insert(Connection::new(None, ConnectionState::Connecting, None));
        match stream.and_then(|stream| self.attach(id, stream)) {
            Ok(()) => self.set_deadline(id, deadline),
            Err(error) => self.fail(id, error.into()),
        }
        Ok(id)
    }

    /// Continues the connection attempt, or the TLS handshake after it.
    pub(super) fn finish_connect(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        let Some(stream) = &mut connection.stream else { return };
        if connection.state == ConnectionState::Connecting {
            match stream.finish_connect() {
                Ok(false) => return,
                Ok(true) => connection.state = ConnectionState::ClientHandshake,
                Err(error) => return self.fail(id, error.into()),
            }
        }
        match stream.shake() {
            Ok(false) => {}
            Ok(true) => {
                connection.state = ConnectionState::Open;
                let is_secured = matches!(stream, Stream::Tls(_));
                if let Some(timer) = connection.timer.take() {
                    self.timers.cancel(timer);
                }
                self.events.push_back(Event::Connected(id));
                if is_secured {
                    // Bytes that came with the end of the handshake get no further event from the
                    // kernel.
                    self.line_up(id);
                }
            }
            Err(error) => self.fail(id, error.into()),
        }
    }

    /// Whether the server accepted the connection, but the TLS handshake is not done.
    pub fn is_greeting(&self, id: ConnId) -> bool {
        self.table
            .get(id)
            .is_some_and(|connection| connection.state == ConnectionState::ClientHandshake)
    }

    /// Ends a connection that was not established in time.
    pub(super) fn give_up(&mut self, id: ConnId) {
        let reason = match self.is_greeting(id) {
            true => CloseReason::Tls(TlsError::Slow),
            false => CloseReason::ConnectDeadline,
        };
        self.fail(id, reason);
    }
}

#[cfg(test)]
#[path = "dials_tests.rs"]
mod tests;
