//! One connection: its socket, the received bytes, and the bytes to send.

use super::buffer::Buffer;
use super::stream::Stream;
use super::timer::TimerId;
use super::tls_error::TlsError;
use crate::limits::{DESCRIPTORS_MAX, NET_RECEIVED_MAX, NET_TLS_READS_MAX};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

/// Identifies a connection; after it is closed, the id has no effect.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ConnId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// As one number: maps by connection are read several times for each event.
impl Hash for ConnId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.index) << 32 | u64::from(self.generation));
    }
}

impl ConnId {
    /// The id of a connection outside any reactor, for a test that replaces the reactor.
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

/// The reason why a connection ended although its owner did not close it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CloseReason {
    /// The socket failed with this error.
    Io(ErrorKind),
    /// The server did not prove its identity, or the TLS handshake failed.
    Tls(TlsError),
    /// It was not connected by its deadline.
    ConnectDeadline,
    /// The peer sent more descriptors than allowed.
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

/// State of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ConnectionState {
    /// Dialled, not yet established.
    Connecting,
    /// Established; the TLS server has not yet proved its identity.
    ClientHandshake,
    /// Accepted; its TLS handshake is not done, and no event has reported it.
    ServerHandshake,
    /// Bytes flow in both directions.
    Open,
    /// Closed by its owner; queued bytes are still sent.
    Flushing,
    /// All bytes are sent. It waits until the peer closes its end, because a reset could overtake
    /// the last bytes.
    Lingering,
    /// It has failed, and its owner has not yet seen the event.
    Failed,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// `None` after a failure.
    pub(super) stream: Option<Stream>,
    pub(super) state: ConnectionState,
    pub(super) received: Buffer,
    pub(super) queued: Buffer,
    /// Queued bytes are written before the reactor waits again.
    pub(super) due: bool,
    /// The socket takes no more bytes now, or is not established. After all queued bytes are sent,
    /// the owner gets an event.
    pub(super) blocked: bool,
    pub(super) descriptors: Vec<OwnedFd>,
    /// The listener that accepted it.
    pub(super) listener: Option<u32>,
    /// Set while it connects, shakes hands, flushes or lingers.
    pub(super) timer: Option<TimerId>,
    /// The peer closed its end.
    pub(super) eof: bool,
    /// Reading stopped at a full buffer; the kernel sends no further event for it.
    pub(super) paused: bool,
    /// The reactor reads it in the next poll, even without an event of the kernel.
    pub(super) lined_up: bool,
}

/// How a turn of reading ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadEnd {
    /// No more data for now; the kernel will report more.
    Empty,
    /// The buffer is full.
    Full,
    /// The turn's share was read; other connections come next.
    More,
    /// The peer closed its end.
    Eof,
    /// The connection failed.
    Failed(CloseReason),
}

impl Connection {
    pub(super) fn new(
        stream: Option<Stream>,
        state: ConnectionState,
        listener: Option<u32>,
    ) -> Connection {
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

    /// Whether the connection still has an owner that wants its events.
    pub(super) fn is_owned(&self) -> bool {
        !matches!(
            self.state,
            ConnectionState::ServerHandshake
                | ConnectionState::Flushing
                | ConnectionState::Lingering
        )
    }

    /// Whether the socket has taken all bytes.
    pub(super) fn is_flushed(&self) -> bool {
        self.queued.is_empty() && !self.stream.as_ref().is_some_and(Stream::is_pending)
    }

    /// Reads until the socket is empty, the buffer is full, or (over TLS) the share of a turn was
    /// read. Also returns the number of bytes. With `to_the_end`, a short read is no proof that the
    /// socket is empty, because the kernel can already have reported the peer's end.
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

    /// Writes as many bytes as the socket takes now, and returns their number.
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

    /// Sends as many queued bytes as the socket takes now, and returns their number.
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

    /// Drops received bytes and descriptors.
    pub(super) fn discard(&mut self) {
        self.received.consume(self.received.len());
        self.descriptors.clear();
    }
}
