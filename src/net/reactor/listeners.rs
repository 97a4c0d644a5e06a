//! Incoming connections: the reactor accepts and reports them, and refuses them if there are too
//! many.
//!
//! Thread: `ctl`. Invariants: one turn accepts a bounded number. A TLS connection is reported after
//! its handshake, and handshakes are bounded in time and number. After a shortage of descriptors, a
//! listener accepts again.

use super::{Connection, ConnectionState, Event, ListenerId, Reactor, Stream, TimerKey};
use crate::limits;
use crate::net::connection::ConnId;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Instant;

impl Reactor {
    /// Accepts one turn of connections.
    pub(super) fn accept(&mut self, id: ListenerId) {
        for _ in 0..limits::NET_ACCEPT_TURN {
            let Some(Some(listening)) = self.listeners.get(id.0 as usize) else { return };
            match listening.listener.accept() {
                Ok((stream, peer)) => self.admit(id, stream, peer),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_shortage(&error) => {
                    if !self.shed(id) {
                        return self.accept_again(id, self.now() + limits::NET_ACCEPT_RETRY);
                    }
                }
                // This one connection ended while it waited in the backlog.
                Err(_) => {}
            }
        }
        self.accept_again(id, self.now());
    }

    fn admit(&mut self, id: ListenerId, stream: Stream, peer: Option<SocketAddr>) {
        let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize) else { return };
        if listening.open == listening.limit || self.table.is_full() {
            self.refused += 1;
            return;
        }
        listening.open += 1;
        let secured = listening.credentials.clone();
        let state = if secured.is_some() {
            ConnectionState::ServerHandshake
        } else {
            ConnectionState::Open
        };
        let conn = self.table.insert(Connection::new(None, state, Some(id.0)));
        let stream = match &secured {
            Some(credentials) => stream.secure(credentials),
            None => Ok(stream),
        };
        match stream.and_then(|stream| self.attach(conn, stream)) {
            Ok(()) if secured.is_some() => self.greet(conn, peer),
            Ok(()) => self.events.push_back(Event::Accepted { listener: id, conn, peer }),
            Err(_) => {
                self.refused += 1;
                self.release(conn);
            }
        }
    }

    /// Starts the handshake timer of a connection. If too many handshakes are open, the oldest one
    /// ends.
    fn greet(&mut self, conn: ConnId, peer: Option<SocketAddr>) {
        self.set_deadline(conn, self.now() + limits::NET_HANDSHAKE_TIME);
        let table = &self.table;
        let is_shaking = |id: ConnId| {
            table
                .get(id)
                .is_some_and(|connection| connection.state == ConnectionState::ServerHandshake)
        };
        self.shaking.retain(|&(id, _)| is_shaking(id));
        self.shaking.push_back((conn, peer));
        if self.shaking.len() > limits::NET_HANDSHAKES_MAX
            && let Some((oldest, _)) = self.shaking.pop_front()
        {
            self.refused += 1;
            self.release(oldest);
        }
    }

    /// Continues a handshake, and reports the connection after it is done.
    pub(super) fn shake(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        let Some(stream) = &mut connection.stream else { return };
        match stream.shake() {
            Ok(false) => {}
            Ok(true) => {
                connection.state = ConnectionState::Open;
                let listener = ListenerId(connection.listener.unwrap_or_default());
                if let Some(timer) = connection.timer.take() {
                    self.timers.cancel(timer);
                }
                let place = self.shaking.iter().position(|&(conn, _)| conn == id);
                let peer =
                    place.and_then(|place| self.shaking.remove(place)).and_then(|(_, peer)| peer);
                self.events.push_back(Event::Accepted { listener, conn: id, peer });
                // The first bytes can have come with the end of the handshake.
                self.read(id, true);
            }
            Err(_) => self.release(id),
        }
    }

    /// Uses the reserved descriptor to take one connection from the backlog and close it.
    fn shed(&mut self, id: ListenerId) -> bool {
        self.reserve = None;
        let Some(Some(listening)) = self.listeners.get(id.0 as usize) else { return false };
        let shed = listening.listener.accept().is_ok();
        self.refused += u64::from(shed);
        self.reserve = File::open("/dev/null").ok();
        shed
    }

    fn accept_again(&mut self, id: ListenerId, at: Instant) {
        if let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize)
            && !listening.again
        {
            listening.again = self.timers.schedule(at, TimerKey::Accept(id)).is_ok();
        }
    }
}

/// Whether accepting failed because descriptors or memory ran out; a later try can succeed.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| shortages.contains(&code))
}
