//! The end of connections: at once, after all bytes are sent, or because of a failure.
//!
//! Thread: `ctl`. Invariants: each connection returns its resources exactly once. After its owner
//! closed it, no event names it. No end waits longer than its deadline.

use super::{Event, Reactor, Stream};
use crate::limits;
use crate::net::connection::{CloseReason, ConnId, ConnectionState};
use std::time::Instant;

impl Reactor {
    /// Ends a connection now. Queued bytes that the socket does not take are lost.
    pub fn close(&mut self, id: ConnId) {
        self.write_if_due(id);
        if self.owned(id).is_some() {
            self.release(id);
        }
    }

    /// Ends a connection after its queued bytes are sent and the peer has closed its end. The limit
    /// is [`NET_LINGER`](limits::NET_LINGER), or the time of [`Reactor::flush_until`] if that is
    /// later. A connection that is not yet established ends at once.
    pub fn close_after_flush(&mut self, id: ConnId) {
        self.write_if_due(id);
        match self.owned_mut(id) {
            Some(connection) if connection.state == ConnectionState::Open => {
                connection.state = ConnectionState::Flushing;
                connection.discard();
                // Reading can be paused, but the peer's close must still be read.
                self.line_up(id);
                let linger = self.now() + limits::NET_LINGER;
                self.set_deadline(id, self.flush_until.map_or(linger, |until| until.max(linger)));
                self.linger_if_flushed(id);
            }
            Some(_) => self.release(id),
            None => {}
        }
    }

    /// Extends the deadline of all closing connections, including later ones, to `until`. It never
    /// shortens one.
    pub fn flush_until(&mut self, until: Instant) {
        self.flush_until = Some(until);
        for id in self.table.in_state(ConnectionState::Flushing) {
            self.set_deadline(id, until.max(self.now() + limits::NET_LINGER));
        }
    }

    pub(super) fn linger_if_flushed(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if connection.state != ConnectionState::Flushing || !connection.is_flushed() {
            return;
        }
        connection.state = ConnectionState::Lingering;
        let shut = connection.stream.as_mut().map_or(Ok(()), Stream::shutdown_write);
        if connection.eof || shut.is_err() {
            self.release(id);
        } else {
            self.set_deadline(id, self.now() + limits::NET_LINGER);
        }
    }

    /// Ends a connection that failed, and reports it to its owner, if it has one.
    pub(super) fn fail(&mut self, id: ConnId, reason: CloseReason) {
        self.detach(id);
        let Some(connection) = self.table.get_mut(id) else { return };
        if connection.is_owned() {
            connection.state = ConnectionState::Failed;
            self.events.push_back(Event::Closed { conn: id, reason });
        } else {
            self.table.remove(id);
        }
    }

    /// Ends a connection without an event.
    pub(super) fn release(&mut self, id: ConnId) {
        self.detach(id);
        self.table.remove(id);
    }

    /// Closes the socket and returns the connection's resources. A second call does nothing.
    fn detach(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        // Closing a socket also removes it from epoll.
        connection.stream = None;
        let queued = std::mem::take(&mut connection.queued);
        self.queued_total -= queued.len();
        if let Some(timer) = connection.timer.take() {
            self.timers.cancel(timer);
        }
        if let Some(listener) = connection.listener.take()
            && let Some(Some(listening)) = self.listeners.get_mut(listener as usize)
        {
            listening.open -= 1;
        }
    }
}
