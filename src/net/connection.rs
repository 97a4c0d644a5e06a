//! One connection: its socket, what came and waits to be consumed, what waits to be sent.

use super::authorities::Distrust;
use super::buffer::Buffer;
use super::stream::Stream;
use super::timer::TimerId;
use crate::limits::{DESCRIPTORS_MAX, NET_RECEIVED_MAX, NET_TLS_READS_MAX};
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

/// Names a connection; once that is closed, the id does nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl ConnId {
    /// A connection that no reactor has, for what stands in a reactor's place.
    pub const fn outside(index: u32) -> ConnId {
        ConnId { index, generation: 0 }
    }

    /// The number of a connection from [`ConnId::outside`].
    pub const fn number(self) -> u32 {
        self.index
    }
}

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// Why a connection has ended without being asked to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    /// The socket failed so.
    Io(ErrorKind),
    /// Its server is not who it should be, or does not speak TLS as it should.
    Tls(Distrust),
    /// It was not connected by its deadline.
    ConnectDeadline,
    /// The peer passed more descriptors than anybody takes.
    Descriptors,
    /// There are too many connections.
    TooMany,
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseReason::Io(kind) => kind.fmt(f),
            CloseReason::Tls(why) => why.fmt(f),
            CloseReason::ConnectDeadline => write!(f, "not connected by its deadline"),
            CloseReason::Descriptors => {
                write!(f, "more than {DESCRIPTORS_MAX} descriptors were passed")
            }
            CloseReason::TooMany => write!(f, "too many connections"),
        }
    }
}

impl From<io::Error> for CloseReason {
    fn from(error: io::Error) -> CloseReason {
        match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(&why) => CloseReason::Tls(why),
            None => CloseReason::Io(error.kind()),
        }
    }
}

/// Life of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Dialled, not yet there;
    Connecting,
    /// there, and its server has yet to show over TLS who it is;
    Greeting,
    /// accepted, and its peer has yet to prove that it speaks TLS; nobody has heard of it;
    Shaking,
    /// carries bytes both ways;
    Open,
    /// given up by its owner, still sends what was queued;
    Flushing,
    /// has sent everything and waits for the peer's end, so that no reset overtakes the last bytes;
    Lingering,
    /// or has failed, and its owner is about to hear.
    Failed,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// Until it has failed.
    pub(super) stream: Option<Stream>,
    pub(super) state: State,
    pub(super) received: Buffer,
    pub(super) queued: Buffer,
    /// What is queued is written before the reactor waits again.
    pub(super) due: bool,
    /// The socket took no more of what is queued, or does not stand yet: its owner hears when all has left.
    pub(super) blocked: bool,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Of the listener that accepted it.
    pub(super) listener: Option<u32>,
    /// Valid while connecting, greeting, flushing and lingering.
    pub(super) timer: Option<TimerId>,
    /// The peer has closed its end.
    pub(super) eof: bool,
    /// Reading stopped at a full buffer; the kernel will not tell again.
    pub(super) paused: bool,
    /// It is in line to be read, whatever the kernel tells.
    pub(super) lined_up: bool,
}

/// How a turn of reading ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadEnd {
    /// Nothing more for now; the kernel will tell.
    Empty,
    /// The buffer is full.
    Full,
    /// Enough was read, whatever it held: it is others' turn.
    More,
    /// The peer closed its end.
    Eof,
    /// The connection is dead.
    Failed(CloseReason),
}

impl Connection {
    pub(super) fn new(stream: Option<Stream>, state: State, listener: Option<u32>) -> Connection {
        Connection {
            stream,
            state,
            received: Buffer::default(),
            queued: Buffer::default(),
            due: false,
            blocked: false,
            descriptors: Vec::new(),
            listener,
            timer: None,
            eof: false,
            paused: false,
            lined_up: false,
        }
    }

    /// Whether the connection still has an owner who wants to hear of it.
    pub(super) fn is_owned(&self) -> bool {
        !matches!(self.state, State::Shaking | State::Flushing | State::Lingering)
    }

    /// Whether the socket has taken all that was to be sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.queued.is_empty() && !self.stream.as_ref().is_some_and(Stream::is_pending)
    }

    /// Reads until the socket is empty, the buffer full or, over TLS, enough read, which bounds a turn; also says how many
    /// bytes came. `to_the_end` where a short read does not prove
    /// that the socket is empty: the peer's end may already have been told of, once.
    pub(super) fn read_turn(&mut self, to_the_end: bool) -> (usize, ReadEnd) {
        let Some(stream) = &mut self.stream else { return (0, ReadEnd::Empty) };
        let (mut total, mut reads) = (0, 0);
        loop {
            let space = self.received.space(NET_RECEIVED_MAX);
            let room = space.len();
            if room == 0 {
                return (total, ReadEnd::Full);
            }
            match stream.read(space, &mut self.descriptors) {
                Ok(0) => return (total, ReadEnd::Eof),
                Ok(count) => {
                    self.received.filled(count);
                    total += count;
                    if self.descriptors.len() > DESCRIPTORS_MAX {
                        return (total, ReadEnd::Failed(CloseReason::Descriptors));
                    }
                    if count < room && stream.short_read_empties() && !to_the_end {
                        return (total, ReadEnd::Empty);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return (total, ReadEnd::Empty);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return (total, ReadEnd::Failed(error.into())),
            }
            reads += usize::from(stream.is_secured());
            if reads == NET_TLS_READS_MAX {
                return (total, ReadEnd::More);
            }
        }
    }

    /// Writes what the socket takes now; says how much that was.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<usize, CloseReason> {
        let Some(stream) = &mut self.stream else { return Ok(0) };
        let mut total = 0;
        while total < bytes.len() {
            match stream.write(&bytes[total..]) {
                Ok(count) => total += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(total)
    }

    /// Sends from the queue what the socket takes now; says how much that was.
    pub(super) fn flush(&mut self) -> Result<usize, CloseReason> {
        if let Some(stream) = &mut self.stream {
            stream.flush()?;
        }
        let mut queued = std::mem::take(&mut self.queued);
        let result = self.write(queued.data());
        if let Ok(count) = result {
            queued.consume(count);
        }
        self.queued = queued;
        result
    }

    /// Forgets what has come.
    pub(super) fn discard(&mut self) {
        self.received.consume(self.received.len());
        self.descriptors.clear();
    }
}
