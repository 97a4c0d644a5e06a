//! Sending: bytes are gathered per connection and written when the reactor is about to wait.
//!
//! Thread: `ctl`. Invariants: queued bytes are bounded, per connection and in total. A call takes
//! the whole piece or nothing. If more is queued than a buffer keeps, the socket takes no more now.

use super::{Event, Reactor, SendError};
use crate::limits;
use crate::net::connection::{ConnId, Connection, ConnectionState};
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

impl Reactor {
    /// Queues bytes. They are sent before the next wait if the socket takes them, otherwise later.
    /// On an error no byte is queued.
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
        if is_large && connection.state == ConnectionState::Open && connection.queued.is_empty() {
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

    /// Appends bytes to the queue.
    fn queue(&mut self, id: ConnId, bytes: &[u8]) {
        let Some(connection) = self.table.get_mut(id).filter(|_| !bytes.is_empty()) else { return };
        self.spare.lend(&mut connection.queued);
        connection.queued.append(bytes);
        self.queued_total += bytes.len();
        connection.blocked |= matches!(
            connection.state,
            ConnectionState::Connecting | ConnectionState::ClientHandshake
        );
        if !connection.blocked && !std::mem::replace(&mut connection.due, true) {
            self.due.push(id);
        }
    }

    pub(super) fn write_if_due(&mut self, id: ConnId) {
        if self.table.get(id).is_some_and(|connection| connection.due) {
            self.write(id);
        }
    }

    /// Writes the bytes that this turn has queued. Call it before a wait other than
    /// [`poll`](Self::poll).
    pub fn write_due(&mut self) {
        let mut due = std::mem::take(&mut self.due);
        for id in due.drain(..) {
            self.write(id);
        }
        self.due = due;
    }

    /// Writes the queued bytes, then sleeps for `time` without handling events.
    pub fn flush_and_sleep(&mut self, time: Duration) {
        self.write_due();
        thread::sleep(time);
    }

    /// Sends at least one byte over an open unix stream, with descriptors attached to the first
    /// byte.
    ///
    /// # Errors
    /// [`SendError::Full`] if bytes are already queued or the socket takes none.
    pub fn send_descriptors(
        &mut self,
        id: ConnId,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SendError> {
        self.write_if_due(id);
        let connection = self.sendable(id)?;
        let Some(stream) = &mut connection.stream else { return Err(SendError::Closed) };
        if connection.state != ConnectionState::Open || !connection.queued.is_empty() {
            return Err(SendError::Full);
        }
        match stream.write_descriptors(bytes, fds) {
            Ok(sent) => self.send(id, &bytes[sent..]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(SendError::Full),
            Err(error) => {
                self.fail(id, error.into());
                Err(SendError::Closed)
            }
        }
    }

    /// Bytes that are queued and not yet handed to the kernel. Above
    /// [`NET_BUFFER_KEPT`](limits::NET_BUFFER_KEPT), the socket takes no more now, and `Drained`
    /// follows.
    pub fn queued(&self, id: ConnId) -> usize {
        self.owned(id).map_or(0, |connection| connection.queued.len())
    }

    /// Queued bytes on all connections.
    pub fn queued_total(&self) -> usize {
        self.queued_total
    }

    fn sendable(&mut self, id: ConnId) -> Result<&mut Connection, SendError> {
        let connection =
            self.owned_mut(id).filter(|connection| connection.state != ConnectionState::Failed);
        connection.ok_or(SendError::Closed)
    }

    pub(super) fn write(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        connection.due = false;
        if matches!(
            connection.state,
            ConnectionState::Connecting | ConnectionState::ClientHandshake
        ) {
            self.finish_connect(id);
        }
        let Some(connection) = self.table.get_mut(id) else { return };
        if !matches!(connection.state, ConnectionState::Open | ConnectionState::Flushing)
            || connection.is_flushed()
        {
            return;
        }
        match connection.flush() {
            Ok(count) => {
                self.queued_total -= count;
                self.spare.take_back(&mut connection.queued);
                let is_blocked = !connection.is_flushed();
                let was_blocked = std::mem::replace(&mut connection.blocked, is_blocked);
                if was_blocked && !connection.blocked && connection.state == ConnectionState::Open {
                    self.events.push_back(Event::Drained(id));
                }
                self.linger_if_flushed(id);
            }
            Err(reason) => self.fail(id, reason),
        }
    }
}
