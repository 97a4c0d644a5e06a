//! How connections end: now, once all is sent, or by themselves.
//!
//! Thread: `ctl`. Invariants: each returns what it had taken, once; who closed a connection hears no more of it; no end waits
//! for longer than it was given.

use super::{Event, Reactor, Stream};
use crate::limits;
use crate::net::connection::{CloseReason, ConnId, State};
use std::time::Instant;

impl Reactor {
    /// Ends a connection now; what is queued and the socket does not take is lost.
    pub fn close(&mut self, id: ConnId) {
        self.write_if_due(id);
        if self.owned(id).is_some() {
            self.release(id);
        }
    }

    /// Ends a connection once what is queued has been sent and the peer has closed its end, at the latest
    /// after [`NET_LINGER`](limits::NET_LINGER), or at the time given to [`Reactor::flush_until`] where that
    /// is later. One that is not yet connected ends now.
    pub fn close_after_flush(&mut self, id: ConnId) {
        self.write_if_due(id);
        match self.owned_mut(id) {
            Some(connection) if connection.state == State::Open => {
                connection.state = State::Flushing;
                connection.discard();
                // It may have been paused, and the peer's end is still to be seen.
                self.line_up(id);
                let linger = Instant::now() + limits::NET_LINGER;
                self.set_deadline(id, self.flush_until.map_or(linger, |until| until.max(linger)));
                self.linger_if_flushed(id);
            }
            Some(_) => self.release(id),
            None => {}
        }
    }

    /// Gives closing connections, those that close from now on too, until then to take what is queued for
    /// them, where that is later than they would have.
    pub fn flush_until(&mut self, until: Instant) {
        self.flush_until = Some(until);
        for id in self.table.in_state(State::Flushing) {
            self.set_deadline(id, until.max(Instant::now() + limits::NET_LINGER));
        }
    }

    pub(super) fn linger_if_flushed(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if connection.state != State::Flushing || !connection.is_flushed() {
            return;
        }
        connection.state = State::Lingering;
        let shut = connection.stream.as_mut().map_or(Ok(()), Stream::shutdown_write);
        if connection.eof || shut.is_err() {
            self.release(id);
        } else {
            self.set_deadline(id, Instant::now() + limits::NET_LINGER);
        }
    }

    /// Ends a connection that died, and tells its owner, if it has one.
    pub(super) fn fail(&mut self, id: ConnId, reason: CloseReason) {
        self.detach(id);
        let Some(connection) = self.table.get_mut(id) else { return };
        if connection.is_owned() {
            connection.state = State::Failed;
            self.events.push_back(Event::Closed { conn: id, reason });
        } else {
            self.table.remove(id);
        }
    }

    /// Ends a connection without telling anybody.
    pub(super) fn release(&mut self, id: ConnId) {
        self.detach(id);
        self.table.remove(id);
    }

    /// Closes the socket and returns what the connection had taken. Once.
    fn detach(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        // Closing a socket also takes it out of epoll.
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
