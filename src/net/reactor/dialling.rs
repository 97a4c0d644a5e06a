//! Who is dialled: told of when the connection stands, over TLS when the server has shown who it is.
//!
//! Thread: `ctl`. Invariants: one deadline bounds the connection and the handshake over it; nothing that was queued leaves
//! before both are done.

use super::{Connection, Event, Reactor, State, Stream};
use crate::net::authorities::{Authorities, Distrust};
use crate::net::connection::{CloseReason, ConnId};
use crate::net::stream::Address;
use std::io;
use std::time::Instant;

impl Reactor {
    /// Begins to connect. What comes of it is told by `Connected` or `Closed`, by the deadline at
    /// the latest; bytes may be queued before. Fails only where there are too many connections.
    pub fn connect(&mut self, address: &Address, deadline: Instant) -> Result<ConnId, CloseReason> {
        self.dial(Stream::connect(address), deadline)
    }

    /// The same over TLS, to who must show, vouched for by these, that it is `host`.
    pub fn connect_secured(
        &mut self,
        address: &Address,
        (authorities, host): (&Authorities, &str),
        deadline: Instant,
    ) -> Result<ConnId, CloseReason> {
        self.dial(
            Stream::connect(address).and_then(|stream| stream.greet(authorities, host)),
            deadline,
        )
    }

    fn dial(
        &mut self,
        stream: io::Result<Stream>,
        deadline: Instant,
    ) -> Result<ConnId, CloseReason> {
        if self.table.is_full() {
            return Err(CloseReason::TooMany);
        }
        let id = self.table.insert(Connection::new(None, State::Connecting, None));
        match stream.and_then(|stream| self.attach(id, stream)) {
            Ok(()) => self.set_deadline(id, deadline),
            Err(error) => self.fail(id, error.into()),
        }
        Ok(id)
    }

    /// Goes on with a connection that is on its way, or with the handshake over it.
    pub(super) fn finish_connect(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        let Some(stream) = &mut connection.stream else { return };
        if connection.state == State::Connecting {
            match stream.finish_connect() {
                Ok(false) => return,
                Ok(true) => connection.state = State::Greeting,
                Err(error) => return self.fail(id, error.into()),
            }
        }
        match stream.shake() {
            Ok(false) => {}
            Ok(true) => {
                connection.state = State::Open;
                let is_secured = matches!(stream, Stream::Tls(_));
                if let Some(timer) = connection.timer.take() {
                    self.timers.cancel(timer);
                }
                self.events.push_back(Event::Connected(id));
                if is_secured {
                    // The kernel does not tell again of what came with the end of the handshake.
                    self.line_up(id);
                }
            }
            Err(error) => self.fail(id, error.into()),
        }
    }

    /// Whether the server that was dialled is there, and has yet to show over TLS who it is.
    pub fn is_greeting(&self, id: ConnId) -> bool {
        self.table.get(id).is_some_and(|connection| connection.state == State::Greeting)
    }

    /// It did not stand in time.
    pub(super) fn give_up(&mut self, id: ConnId) {
        let reason = match self.is_greeting(id) {
            true => CloseReason::Tls(Distrust::Slow),
            false => CloseReason::ConnectDeadline,
        };
        self.fail(id, reason);
    }
}

#[cfg(test)]
#[path = "dialling_tests.rs"]
mod tests;
