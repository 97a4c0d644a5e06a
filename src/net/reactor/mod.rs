//! The reactor turns readiness into events. It is edge-triggered, so an idle connection takes no
//! time.
//!
//! Thread: `ctl`. Queued bytes are sent when the reactor is about to wait, so one write sends the
//! bytes of a turn for a peer. A piece that does not fit the buffer is sent at once. Invariants:
//! only `poll` and `flush_and_sleep` wait. All of these are bounded: reads and accepts per turn,
//! received and unconsumed bytes, queued bytes. After `close`, `close_after_flush` or `Closed`, no
//! event names the connection. Cost: each call looks up a connection by id, which is an index and a
//! comparison.

mod closes;
mod dials;
mod event;
mod listeners;
mod sends;

pub use event::{Event, SendError};

use super::address::Address;
use super::buffer::BufferPool;
use super::connection::{CloseReason, ConnId, Connection, ConnectionState, ReadEnd};
use super::kernel::{HANGUPS, Kernel, SIGNALS, WAKER};
use super::memory::MemoryKernel;
use super::stream::{Listener, Stream};
use super::table::ConnectionTable;
use super::timer::Timers;
use super::{Credentials, Entropy, Waker};
use crate::limits;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::clock::Clock;
use crate::sys::stream::ByteStream;
use crate::sys::stream::ready::Readiness;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Identifies a listener.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenerId(u32);

/// Owns every listener and connection of the process's control side.
#[derive(Debug)]
pub struct Reactor {
    kernel: Kernel,
    entropy: Entropy,
    ready: Vec<Readiness>,
    table: ConnectionTable,
    listeners: Vec<Option<ListenerEntry>>,
    events: VecDeque<Event>,
    /// Connections to read again without a kernel event.
    turns: VecDeque<ConnId>,
    /// Connections with bytes to write before the next wait.
    due: Vec<ConnId>,
    timers: Timers<TimerKey>,
    spare: BufferPool,
    waker: Waker,
    queued_total: usize,
    /// Connections with an unfinished handshake, in order of arrival, with their peers' addresses.
    /// Finished ones are removed later.
    shaking: VecDeque<(ConnId, Option<SocketAddr>)>,
    /// Closing connections may take at least until this time.
    flush_until: Option<Instant>,
    /// A spare descriptor. If descriptors run out, it is closed to accept and close one connection.
    reserve: Option<File>,
    refused: u64,
}

#[derive(Debug)]
struct ListenerEntry {
    listener: Listener,
    /// The listener's TLS certificate and key; `None` without TLS.
    credentials: Option<Credentials>,
    /// Its open connections; `limit` is their maximum.
    open: usize,
    limit: usize,
    /// Whether a timer will make it accept again.
    again: bool,
}

#[derive(Clone, Copy, Debug)]
enum TimerKey {
    Connection(ConnId),
    Accept(ListenerId),
}

/// Listeners have their own tokens, above the generations of connections.
const LISTENERS: usize = usize::MAX - 2 - limits::NET_LISTENERS_MAX;

impl Reactor {
    /// A reactor without listeners or connections.
    pub fn new() -> io::Result<Reactor> {
        Reactor::over(Kernel::system()?, File::open("/dev/null").ok())
    }

    /// A reactor on an operating system in memory, for the simulator.
    pub fn in_memory(kernel: MemoryKernel) -> io::Result<Reactor> {
        Reactor::over(Kernel::Memory(kernel), None)
    }

    fn over(kernel: Kernel, reserve: Option<File>) -> io::Result<Reactor> {
        let waker = kernel.waker()?;
        Ok(Reactor {
            entropy: kernel.entropy(),
            kernel,
            ready: Vec::with_capacity(limits::NET_READY_MAX),
            table: ConnectionTable::new(limits::NET_CONNECTIONS_MAX),
            listeners: Vec::new(),
            events: VecDeque::new(),
            turns: VecDeque::new(),
            due: Vec::new(),
            // One deadline for each connection and each listener.
            timers: Timers::new((limits::NET_CONNECTIONS_MAX + limits::NET_LISTENERS_MAX) as u32),
            spare: BufferPool::default(),
            waker,
            queued_total: 0,
            shaking: VecDeque::new(),
            flush_until: None,
            reserve,
            refused: 0,
        })
    }

    /// The time. Under the simulator, it is the simulated time.
    pub fn now(&self) -> Instant {
        self.kernel.now()
    }

    /// The clock, for other threads.
    pub fn clock(&self) -> Clock {
        self.kernel.clock()
    }

    /// The time of day, since 1970-01-01 UTC.
    pub fn since_epoch(&self) -> Duration {
        self.kernel.since_epoch()
    }

    /// Random numbers that a stranger cannot guess.
    pub fn entropy(&mut self) -> &mut Entropy {
        &mut self.entropy
    }

    /// A handle for other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// From now on SIGTERM and SIGINT arrive as events and do not end the process.
    pub fn watch_signals(&mut self) -> io::Result<()> {
        self.kernel.watch_signals()
    }

    /// From now on SIGHUP arrives as an event and does not end the process.
    pub fn watch_hangups(&mut self) -> io::Result<()> {
        self.kernel.watch_hangups()
    }

    /// Listens, with at most `limit` open accepted connections. Further connections are closed at
    /// once and do not wait in the backlog.
    pub fn listen(&mut self, address: &Address, limit: usize) -> io::Result<ListenerId> {
        let place = self.listeners.iter().position(Option::is_none).unwrap_or(self.listeners.len());
        if place == limits::NET_LISTENERS_MAX {
            return Err(io::Error::other("too many listeners"));
        }
        let listener = self.kernel.listen(address, LISTENERS + place)?;
        let id = ListenerId(place as u32);
        if place == self.listeners.len() {
            self.listeners.push(None);
        }
        self.listeners[place] =
            Some(ListenerEntry { listener, credentials: None, open: 0, limit, again: false });
        Ok(id)
    }

    /// From now on, clients of this TCP listener must speak TLS. A connection is reported after its
    /// handshake, which has [`NET_HANDSHAKE_TIME`](limits::NET_HANDSHAKE_TIME). If too many
    /// handshakes are open, the oldest one ends.
    pub fn secure(&mut self, id: ListenerId, credentials: Credentials) {
        if let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize) {
            listening.credentials = Some(credentials);
        }
    }

    /// The address of a TCP listener, with the real port if it was bound to port 0.
    pub fn local_address(&self, id: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(id.0 as usize)?.as_ref()?.listener.local_address().ok()?
    }

    /// Stops accepting. The listener's connections stay open, except those that no event has
    /// reported. Another listener can get its id.
    pub fn stop_listening(&mut self, id: ListenerId) {
        if let Some(entry) = self.listeners.get_mut(id.0 as usize) {
            *entry = None;
        }
        let untold = |event: &Event| match *event {
            Event::Accepted { listener, conn, .. } if listener == id => Some(conn),
            _ => None,
        };
        let mut untold: Vec<ConnId> = self.events.iter().filter_map(untold).collect();
        let is_of_it = |connection: &Connection| connection.listener == Some(id.0);
        untold.extend(
            self.table
                .in_state(ConnectionState::ServerHandshake)
                .into_iter()
                .filter(|&conn| self.table.get(conn).is_some_and(is_of_it)),
        );
        untold.into_iter().for_each(|conn| self.release(conn));
        // The remaining connections do not count for the next listener with this id.
        for connection in
            self.table.iter_mut().filter(|connection| connection.listener == Some(id.0))
        {
            connection.listener = None;
        }
    }

    /// Adds a connection that other code has opened.
    ///
    /// # Errors
    /// There are too many connections, or the socket cannot be registered.
    pub fn adopt(&mut self, stream: std::net::TcpStream) -> io::Result<ConnId> {
        if self.table.is_full() {
            return Err(io::Error::other("too many connections"));
        }
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let id = self.table.insert(Connection::new(None, ConnectionState::Open, None));
        self.attach(id, Stream::adopted(stream)).inspect_err(|_| self.release(id))?;
        Ok(id)
    }

    /// Waits for events, at most until `deadline`. Then call [`next_event`](Self::next_event) until
    /// it returns `None`.
    pub fn poll(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let until = self.prepare(deadline);
        self.wait(until)
    }

    /// The second half of [`poll`](Self::poll), after [`prepare`](Self::prepare): waits, and
    /// handles what is ready.
    pub fn wait(&mut self, until: Option<Instant>) -> io::Result<()> {
        let timeout = until.map(|until| until.saturating_duration_since(self.now()));
        self.kernel.wait(timeout, &mut self.ready)?;
        for _ in 0..self.turns.len() {
            let Some(id) = self.turns.pop_front() else { break };
            if let Some(connection) = self.table.get_mut(id) {
                connection.lined_up = false;
            }
            self.read(id, true);
        }
        for index in 0..self.ready.len() {
            self.handle(self.ready[index]);
        }
        let now = self.now();
        while let Some(deadline) = self.timers.expire(now) {
            self.expire(deadline);
        }
        Ok(())
    }

    /// The first half of [`poll`](Self::poll): writes the queued bytes. Returns the end of the
    /// wait: `deadline`, or an earlier time.
    pub fn prepare(&mut self, deadline: Option<Instant>) -> Option<Instant> {
        self.write_due();
        if self.events.is_empty() && self.turns.is_empty() {
            [deadline, self.timers.next_deadline()].into_iter().flatten().min()
        } else {
            Some(self.now())
        }
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let event = self.events.pop_front()?;
            match event {
                Event::Woken | Event::Terminate | Event::Hangup => return Some(event),
                Event::Closed { conn, .. } => {
                    if self.table.remove(conn).is_some() {
                        return Some(event);
                    }
                }
                Event::Accepted { conn, .. }
                | Event::Connected(conn)
                | Event::Received(conn)
                | Event::Eof(conn)
                | Event::Drained(conn) => {
                    if self.owned(conn).is_some() {
                        return Some(event);
                    }
                }
            }
        }
    }

    /// Received bytes that were not consumed, in one piece.
    pub fn received(&self, id: ConnId) -> &[u8] {
        self.owned(id).map_or(&[], |connection| connection.received.data())
    }

    /// Drops the first `count` bytes of [`received`](Self::received). Reading stops at
    /// [`NET_RECEIVED_MAX`](limits::NET_RECEIVED_MAX) unconsumed bytes.
    pub fn consume(&mut self, id: ConnId, count: usize) {
        let Some(connection) = self.table.get_mut(id).filter(|connection| connection.is_owned())
        else {
            return;
        };
        connection.received.consume(count);
        self.spare.take_back(&mut connection.received);
        if count > 0 && std::mem::take(&mut connection.paused) {
            self.line_up(id);
        }
    }

    /// Descriptors that came over a unix stream with the bytes received so far.
    pub fn take_descriptors(&mut self, id: ConnId) -> Vec<OwnedFd> {
        self.owned_mut(id)
            .map_or_else(Vec::new, |connection| std::mem::take(&mut connection.descriptors))
    }

    /// Removes a TCP connection, so that another thread can own it, and returns it with its
    /// unconsumed bytes. Returns `None` if it has ended, is not TCP, or still has bytes to send.
    pub fn take_stream(&mut self, id: ConnId) -> Option<(ByteStream, Vec<u8>)> {
        self.write_if_due(id);
        let connection = self.owned_mut(id)?;
        if connection.state != ConnectionState::Open || !connection.queued.is_empty() {
            return None;
        }
        let received = connection.received.data().to_vec();
        // The new owner polls it itself.
        let stream = connection.stream.take().map(|stream| self.kernel.without(stream));
        self.release(id);
        Some((stream??, received))
    }

    /// Connections that are open, connecting or closing.
    pub fn connections(&self) -> usize {
        self.table.len()
    }

    /// Connections that were closed because a listener was at its limit or descriptors ran out.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    fn owned(&self, id: ConnId) -> Option<&Connection> {
        self.table.get(id).filter(|connection| connection.is_owned())
    }

    fn owned_mut(&mut self, id: ConnId) -> Option<&mut Connection> {
        self.table.get_mut(id).filter(|connection| connection.is_owned())
    }

    fn handle(&mut self, readiness: Readiness) {
        match readiness.token {
            WAKER => {
                self.waker.clear();
                self.events.push_back(Event::Woken);
            }
            SIGNALS => {
                let count = self.kernel.take_signals(SIGNALS);
                self.events.extend(std::iter::repeat_n(Event::Terminate, count));
            }
            HANGUPS => {
                if self.kernel.take_signals(HANGUPS) > 0 {
                    self.events.push_back(Event::Hangup);
                }
            }
            token if token >= LISTENERS => self.accept(ListenerId((token - LISTENERS) as u32)),
            token => {
                let id = id_of(token);
                let state = self.table.get(id).map(|connection| connection.state);
                if state == Some(ConnectionState::ServerHandshake) {
                    return self.shake(id);
                }
                let is_writable =
                    readiness.writable && !is_failpoint_active("full socket is not written again");
                if is_writable || state == Some(ConnectionState::ClientHandshake) {
                    self.write(id);
                }
                if readiness.readable || readiness.read_closed {
                    self.read(id, readiness.read_closed);
                }
                if readiness.broken && self.owned(id).is_some_and(|connection| connection.eof) {
                    self.fail(id, CloseReason::Io(ErrorKind::ConnectionReset));
                }
            }
        }
    }

    fn read(&mut self, id: ConnId, to_the_end: bool) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if connection.eof
            || connection.lined_up
            || matches!(
                connection.state,
                ConnectionState::Connecting
                    | ConnectionState::ClientHandshake
                    | ConnectionState::ServerHandshake
                    | ConnectionState::Failed
            )
        {
            return;
        }
        self.spare.lend(&mut connection.received);
        let (count, end) = connection.read_turn(to_the_end);
        if !connection.is_owned() {
            connection.discard();
        }
        self.spare.take_back(&mut connection.received);
        if connection.is_owned() && count > 0 {
            self.events.push_back(Event::Received(id));
        }
        match end {
            ReadEnd::Empty => {}
            ReadEnd::Full if connection.is_owned() => connection.paused = true,
            ReadEnd::Full | ReadEnd::More => self.line_up(id),
            ReadEnd::Eof => {
                connection.eof = true;
                match connection.state {
                    ConnectionState::Open => self.events.push_back(Event::Eof(id)),
                    ConnectionState::Lingering => self.release(id),
                    _ => {}
                }
            }
            ReadEnd::Failed(reason) => self.fail(id, reason),
        }
    }

    /// Queues this connection, so that the next poll reads it once.
    fn line_up(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if !std::mem::replace(&mut connection.lined_up, true) {
            self.turns.push_back(id);
        }
    }

    fn attach(&mut self, id: ConnId, mut stream: Stream) -> io::Result<()> {
        self.kernel.register(&mut stream, token_of(id))?;
        if let Some(connection) = self.table.get_mut(id) {
            connection.stream = Some(stream);
        }
        Ok(())
    }

    fn set_deadline(&mut self, id: ConnId, deadline: Instant) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if let Some(timer) = connection.timer.take() {
            self.timers.cancel(timer);
        }
        connection.timer = self.timers.schedule(deadline, TimerKey::Connection(id)).ok();
    }

    fn expire(&mut self, deadline: TimerKey) {
        match deadline {
            TimerKey::Accept(id) => {
                if let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize) {
                    listening.again = false;
                }
                self.accept(id);
            }
            TimerKey::Connection(id) => self.give_up(id),
        }
    }
}

impl Drop for Reactor {
    /// Sends the bytes that are still queued.
    fn drop(&mut self) {
        self.write_due();
    }
}

fn token_of(id: ConnId) -> usize {
    (id.generation as usize) << 32 | id.index as usize
}

fn id_of(token: usize) -> ConnId {
    ConnId { index: token as u32, generation: (token >> 32) as u32 }
}

#[cfg(test)]
mod tests;
