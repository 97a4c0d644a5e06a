//! The reactor: readiness in, events out; edge-triggered, so that a quiet connection costs nothing.
//!
//! Thread: `ctl`.
//! What is sent leaves when the reactor is about to wait again, so that all that one turn has for a peer is one write;
//! a piece that would not fit a buffer leaves at once.
//! Invariants: `poll` is the only call that waits, but for `rest`. What is read in one turn, accepted in one turn,
//! received and not consumed, and queued is bounded. After `close`, after `close_after_flush` and
//! after `Closed`, no event names the connection any more.
//! Cost: an entry is looked up by id on every call; that is an index and a comparison.

mod accepting;
mod dialling;
mod ending;
mod event;
mod sending;

pub use event::{Event, SendError};

use super::buffer::Spare;
use super::connection::{CloseReason, ConnId, Connection, ReadEnd, State};
use super::signals::Signals;
use super::stream::{Address, Listener, Stream};
use super::table::Table;
use super::timer::Timers;
use super::{Credentials, Waker};
use crate::limits;
use mio::{Interest, Token};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Names a listener.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ListenerId(u32);

/// Owns every listener and connection of the process's control side.
#[derive(Debug)]
pub struct Reactor {
    poll: mio::Poll,
    ready: mio::Events,
    /// What `ready` said, copied so that handling it may borrow the rest.
    readiness: Vec<Readiness>,
    table: Table,
    listeners: Vec<Option<Listening>>,
    events: VecDeque<Event>,
    /// Connections to read again without being told by the kernel.
    turns: VecDeque<ConnId>,
    /// Connections with bytes to write before the next wait.
    due: Vec<ConnId>,
    timers: Timers<Deadline>,
    spare: Spare,
    waker: Waker,
    signals: Option<Signals>,
    hangups: Option<Signals>,
    queued_total: usize,
    /// Connections whose handshake may not be done, in the order in which they came, and their peers.
    shaking: VecDeque<(ConnId, Option<SocketAddr>)>,
    /// How long closing connections may at least take.
    flush_until: Option<Instant>,
    /// Given up to accept, and close, one connection when descriptors have run out.
    reserve: Option<File>,
    refused: u64,
}

#[derive(Debug)]
struct Listening {
    listener: Listener,
    /// What it shows to those who connect, where that is TLS.
    credentials: Option<Credentials>,
    /// Connections it has open, and may have.
    open: usize,
    limit: usize,
    /// A timer will have it accept again.
    again: bool,
}

#[derive(Clone, Copy, Debug)]
enum Deadline {
    Connection(ConnId),
    Accept(ListenerId),
}

#[derive(Clone, Copy, Debug)]
struct Readiness {
    token: Token,
    readable: bool,
    writable: bool,
    read_closed: bool,
    /// It is dead, which a read would say that is no longer due where the peer's end has come.
    broken: bool,
}

const WAKER: Token = Token(usize::MAX);
const SIGNALS: Token = Token(usize::MAX - 1);
const HANGUPS: Token = Token(usize::MAX - 2);
/// Listeners have tokens of their own, beyond the generations of connections.
const LISTENERS: usize = usize::MAX - 2 - limits::NET_LISTENERS_MAX;

impl Reactor {
    /// A reactor without listeners or connections.
    pub fn new() -> io::Result<Reactor> {
        let poll = mio::Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        Ok(Reactor {
            poll,
            ready: mio::Events::with_capacity(limits::NET_READY_MAX),
            readiness: Vec::with_capacity(limits::NET_READY_MAX),
            table: Table::new(limits::NET_CONNECTIONS_MAX),
            listeners: Vec::new(),
            events: VecDeque::new(),
            turns: VecDeque::new(),
            due: Vec::new(),
            // A deadline for each connection and each listener.
            timers: Timers::new((limits::NET_CONNECTIONS_MAX + limits::NET_LISTENERS_MAX) as u32),
            spare: Spare::default(),
            waker,
            signals: None,
            hangups: None,
            queued_total: 0,
            shaking: VecDeque::new(),
            flush_until: None,
            reserve: File::open("/dev/null").ok(),
            refused: 0,
        })
    }

    /// A handle for other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Has SIGTERM and SIGINT come as events from now on, and no longer end the process.
    pub fn watch_signals(&mut self) -> io::Result<()> {
        let mut signals = Signals::install(&[SIGINT, SIGTERM])?;
        self.poll.registry().register(&mut signals.stream, SIGNALS, Interest::READABLE)?;
        self.signals = Some(signals);
        Ok(())
    }

    /// Has SIGHUP come as an event from now on, and no longer end the process.
    pub fn watch_hangups(&mut self) -> io::Result<()> {
        let mut hangups = Signals::install(&[SIGHUP])?;
        self.poll.registry().register(&mut hangups.stream, HANGUPS, Interest::READABLE)?;
        self.hangups = Some(hangups);
        Ok(())
    }

    /// Listens, with at most `limit` accepted connections open at a time; more are closed at once,
    /// so that they do not wait in the backlog.
    pub fn listen(&mut self, address: &Address, limit: usize) -> io::Result<ListenerId> {
        let place = self.listeners.iter().position(Option::is_none).unwrap_or(self.listeners.len());
        if place == limits::NET_LISTENERS_MAX {
            return Err(io::Error::other("too many listeners"));
        }
        let mut listener = Listener::bind(address)?;
        let id = ListenerId(place as u32);
        let token = Token(LISTENERS + place);
        self.poll.registry().register(listener.source(), token, Interest::READABLE)?;
        if place == self.listeners.len() {
            self.listeners.push(None);
        }
        self.listeners[place] =
            Some(Listening { listener, credentials: None, open: 0, limit, again: false });
        Ok(id)
    }

    /// Who connects to a TCP listener from now on must speak TLS, and is shown this. A connection is told of when its
    /// handshake is done, which has [`NET_HANDSHAKE_TIME`](limits::NET_HANDSHAKE_TIME); of too many that are not, the
    /// oldest ends.
    pub fn secure(&mut self, id: ListenerId, credentials: Credentials) {
        if let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize) {
            listening.credentials = Some(credentials);
        }
    }

    /// Where a TCP listener listens; its port, if 0 was asked for, is the one it was given.
    pub fn local_address(&self, id: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(id.0 as usize)?.as_ref()?.listener.local_address().ok()?
    }

    /// Accepts no more; connections it has accepted live on, but for those that nobody has been told of. Its id may
    /// become another listener's.
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
                .in_state(State::Shaking)
                .into_iter()
                .filter(|&conn| self.table.get(conn).is_some_and(is_of_it)),
        );
        untold.into_iter().for_each(|conn| self.release(conn));
        // What is left counts for nobody who listens there next.
        for connection in
            self.table.iter_mut().filter(|connection| connection.listener == Some(id.0))
        {
            connection.listener = None;
        }
    }

    /// Takes a connection that was opened elsewhere. Fails where there are too many.
    pub fn adopt(&mut self, stream: std::net::TcpStream) -> io::Result<ConnId> {
        if self.table.is_full() {
            return Err(io::Error::other("too many connections"));
        }
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let id = self.table.insert(Connection::new(None, State::Open, None));
        self.attach(id, Stream::adopted(stream)).inspect_err(|_| self.release(id))?;
        Ok(id)
    }

    /// Waits until something happens, at most until `deadline`; then drain
    /// [`next_event`](Self::next_event).
    pub fn poll(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.write_due();
        let deadline = [deadline, self.timers.next_deadline()].into_iter().flatten().min();
        let timeout = if self.events.is_empty() && self.turns.is_empty() {
            deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
        } else {
            Some(Duration::ZERO)
        };
        match self.poll.poll(&mut self.ready, timeout) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            other => other?,
        }
        for _ in 0..self.turns.len() {
            let Some(id) = self.turns.pop_front() else { break };
            if let Some(connection) = self.table.get_mut(id) {
                connection.lined_up = false;
            }
            self.read(id, true);
        }
        self.copy_readiness();
        for index in 0..self.readiness.len() {
            self.handle(self.readiness[index]);
        }
        let now = Instant::now();
        while let Some(deadline) = self.timers.expire(now) {
            self.expire(deadline);
        }
        Ok(())
    }

    /// The next thing that has happened.
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

    /// Bytes that have come and were not consumed, in one piece.
    pub fn received(&self, id: ConnId) -> &[u8] {
        self.owned(id).map_or(&[], |connection| connection.received.data())
    }

    /// The first `count` bytes of [`received`](Self::received) are done with. At
    /// [`NET_RECEIVED_MAX`](limits::NET_RECEIVED_MAX) bytes, reading waits for this.
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

    /// Descriptors that have come over a unix stream with the bytes received so far.
    pub fn take_descriptors(&mut self, id: ConnId) -> Vec<OwnedFd> {
        self.owned_mut(id)
            .map_or_else(Vec::new, |connection| std::mem::take(&mut connection.descriptors))
    }

    /// Gives a TCP connection away, with what it has received and nobody has consumed: another thread goes
    /// on with it. `None` where it is over, is no TCP connection, or still has bytes to send.
    pub fn give_away(&mut self, id: ConnId) -> Option<(std::net::TcpStream, Vec<u8>)> {
        self.write_if_due(id);
        let connection = self.owned_mut(id)?;
        if connection.state != State::Open || !connection.queued.is_empty() {
            return None;
        }
        let received = connection.received.data().to_vec();
        let stream = connection.stream.take();
        let given = match stream {
            Some(Stream::Tcp(mut stream)) => {
                // Fails only where it was not registered; the receiver polls it by itself.
                let _ = self.poll.registry().deregister(&mut stream);
                Some((stream.into(), received))
            }
            _ => None,
        };
        self.release(id);
        given
    }

    /// Connections that are open or on their way.
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

    fn copy_readiness(&mut self) {
        self.readiness.clear();
        self.readiness.extend(self.ready.iter().map(|event| Readiness {
            token: event.token(),
            readable: event.is_readable() || event.is_error(),
            writable: event.is_writable() || event.is_error(),
            read_closed: event.is_read_closed() || event.is_error(),
            broken: event.is_error(),
        }));
    }

    fn handle(&mut self, readiness: Readiness) {
        match readiness.token {
            WAKER => {
                self.waker.clear();
                self.events.push_back(Event::Woken);
            }
            SIGNALS => {
                let count = self.signals.as_mut().map_or(0, Signals::take);
                self.events.extend(std::iter::repeat_n(Event::Terminate, count));
            }
            HANGUPS => {
                if self.hangups.as_mut().is_some_and(|hangups| hangups.take() > 0) {
                    self.events.push_back(Event::Hangup);
                }
            }
            Token(token) if token >= LISTENERS => {
                self.accept(ListenerId((token - LISTENERS) as u32))
            }
            token => {
                let id = id_of(token);
                let state = self.table.get(id).map(|connection| connection.state);
                if state == Some(State::Shaking) {
                    return self.shake(id);
                }
                if readiness.writable || state == Some(State::Greeting) {
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
                State::Connecting | State::Greeting | State::Shaking | State::Failed
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
                    State::Open => self.events.push_back(Event::Eof(id)),
                    State::Lingering => self.release(id),
                    _ => {}
                }
            }
            ReadEnd::Failed(reason) => self.fail(id, reason),
        }
    }

    /// A connection is read with the next poll, once, and not before.
    fn line_up(&mut self, id: ConnId) {
        let Some(connection) = self.table.get_mut(id) else { return };
        if !std::mem::replace(&mut connection.lined_up, true) {
            self.turns.push_back(id);
        }
    }

    fn attach(&mut self, id: ConnId, mut stream: Stream) -> io::Result<()> {
        stream.register(self.poll.registry(), token_of(id))?;
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
        connection.timer = self.timers.schedule(deadline, Deadline::Connection(id)).ok();
    }

    fn expire(&mut self, deadline: Deadline) {
        match deadline {
            Deadline::Accept(id) => {
                if let Some(Some(listening)) = self.listeners.get_mut(id.0 as usize) {
                    listening.again = false;
                }
                self.accept(id);
            }
            Deadline::Connection(id) => self.give_up(id),
        }
    }
}

impl Drop for Reactor {
    /// The last words of a process leave, too.
    fn drop(&mut self) {
        self.write_due();
    }
}

fn token_of(id: ConnId) -> Token {
    Token((id.generation as usize) << 32 | id.index as usize)
}

fn id_of(token: Token) -> ConnId {
    ConnId { index: token.0 as u32, generation: (token.0 >> 32) as u32 }
}

#[cfg(test)]
#[path = "reactor_tests.rs"]
mod tests;
