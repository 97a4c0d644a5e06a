//! What is sent: gathered by connection, and written when the reactor is about to wait.
//!
//! Thread: `ctl`. Invariants: what is queued is bounded, on each connection and on all; a piece is taken whole or not at
//! all; who queues more than a buffer keeps has had the socket take what it takes.

use super::{Event, Reactor, SendError, Stream};
use crate::limits;
use crate::net::connection::{ConnId, Connection, State};
use crate::net::descriptors;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

impl Reactor {
    /// Sends bytes before the next wait where the socket takes them, else in their turn. All or nothing.
    pub fn send(&mut self, id: ConnId, bytes: &[u8]) -> Result<(), SendError> {
        let total = self.queued_total;
        let connection = self.sendable(id)?;
        if connection.queued.len() + bytes.len() > limits::NET_QUEUED_MAX
            || total + bytes.len() > limits::NET_QUEUED_TOTAL_MAX
        {
            return Err(SendError::Full);
        }
        let is_large = connection.queued.len() + bytes.len() > limits::NET_BUFFER_KEPT;
        if is_large {
            self.write_if_due(id);
        }
        let connection = self.sendable(id)?;
        let mut sent = 0;
        if is_large && connection.state == State::Open && connection.queued.is_empty() {
            match connection.write(bytes) {
                Ok(count) => sent = count,
                Err(reason) => {
                    self.fail(id, reason);
                    return Err(SendError::Closed);
                }
            }
            connection.blocked = sent < bytes.len() || !connection.is_flushed();
        }
        self.queue(id, &bytes[sent..]);
        Ok(())
    }

    /// Has bytes wait behind those that do.
    fn queue(&mut self, id: ConnId, bytes: &[u8]) {
        let Some(connection) = self.table.get_mut(id).filter(|_| !bytes.is_empty()) else { return };
        self.spare.lend(&mut connection.queued);
        connection.queued.append(bytes);
        self.queued_total += bytes.len();
        connection.blocked |= matches!(connection.state, State::Connecting | State::Greeting);
        if !connection.blocked && !std::mem::replace(&mut connection.due, true) {
            self.due.push(id);
        }
    }

    pub(super) fn write_if_due(&mut self, id: ConnId) {
        if self.table.get(id).is_some_and(|connection| connection.due) {
            self.write(id);
        }
    }

    /// Has what was sent in this turn leave now, for who is about to wait for something else than [`poll`](Self::poll).
    pub fn write_due(&mut self) {
        let mut due = std::mem::take(&mut self.due);
        for id in due.drain(..) {
            self.write(id);
        }
        self.due = due;
    }

    /// Looks for nothing for so long; what was sent leaves before.
    pub fn rest(&mut self, time: Duration) {
        self.write_due();
        thread::sleep(time);
    }

    /// Sends bytes, at least one, and with the first of them descriptors, over an open unix stream
    /// that has nothing queued; else they are `Full`.
    pub fn send_descriptors(
        &mut self,
        id: ConnId,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        self.write_if_due(id);
        let connection = self.sendable(id)?;
        let Some(Stream::Unix(stream)) = &connection.stream else { return Err(SendError::Closed) };
        if connection.state != State::Open || !connection.queued.is_empty() {
            return Err(SendError::Full);
        }
        match descriptors::send(stream.as_fd(), bytes, fds) {
            Ok(sent) => self.send(id, &bytes[sent..]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(SendError::Full),
            Err(error) => {
                self.fail(id, error.into());
                Err(SendError::Closed)
            }
        }
    }

    /// Bytes queued and not yet handed to the kernel. Where they are more than
    /// [`NET_BUFFER_KEPT`](limits::NET_BUFFER_KEPT), the socket takes no more now, and `Drained` will come.
    pub fn queued(&self, id: ConnId) -> usize {
        self.owned(id).map_or(0, |connection| connection.queued.len())
    }

    /// Bytes that wait to be sent, on all connections.
    pub fn queued_total(&self) -> usize {
        self.queued_total
    }

    fn sendable(&mut self, id: ConnId) -> Result<&mut Connection, SendError> {
        let connection = self.owned_mut(id).filter(|connection| connection.state != State::Failed);
        connection.ok_or(SendError::Closed)
    }

    pub(super) fn write(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        connection.due = false;
        if matches!(connection.state, State::Connecting | State::Greeting) {
            self.finish_connect(id);
        }
        let Some(connection) = self.table.get_mut(id) else { return };
        if !matches!(connection.state, State::Open | State::Flushing) || connection.is_flushed() {
            return;
        }
        match connection.flush() {
            Ok(count) => {
                self.queued_total -= count;
                self.spare.take_back(&mut connection.queued);
                let is_blocked = !connection.is_flushed();
                let was_blocked = std::mem::replace(&mut connection.blocked, is_blocked);
                if was_blocked && !connection.blocked && connection.state == State::Open {
                    self.events.push_back(Event::Drained(id));
                }
                self.linger_if_flushed(id);
            }
            Err(reason) => self.fail(id, reason),
        }
    }
}
