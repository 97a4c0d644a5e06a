//! A stream without a kernel: two bounded buffers. The program uses [`MemoryStream`]. A simulated
//! kernel and network use [`StreamKernel`] and decide when and in which pieces bytes move.
//!
//! Thread: any; the simulator has one.
//! Invariants: it behaves like a non-blocking socket. A write takes only the bytes that fit. The
//! program reads all received bytes before it sees the end or the reset behind them. A program that
//! waits is woken as long as there is a reason.
//! Not here: time, order between streams, loss (`sim::cluster::lanes`).

use crate::kv::region::Region;
use crate::sys::event::WaitInterest;
use crate::transfer::plan::Piece;
use crate::transfer::transport::vectored;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The program's end; closed when dropped.
#[derive(Debug)]
pub struct MemoryStream(Arc<Mutex<Socket>>);

/// The kernel's side of the same stream.
#[derive(Debug)]
pub struct StreamKernel(Arc<Mutex<Socket>>);

#[derive(Debug)]
struct Socket {
    state: State,
    /// Written by the program, not sent yet.
    written: VecDeque<u8>,
    /// Capacity of `written` in bytes.
    room: usize,
    /// Received from the peer, not read yet.
    received: VecDeque<u8>,
    /// The peer sends nothing more behind `received`.
    ended: bool,
    /// The program has dropped its end.
    closed: bool,
    /// The interest of the program's wait set; `None` before the stream is in a wait set.
    awaited: Option<WaitInterest>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Connecting,
    Open,
    Reset,
}

/// A stream with room for `room` unsent bytes. If `stands` is false, it is still being dialled.
pub fn stream(stands: bool, room: usize) -> (MemoryStream, StreamKernel) {
    let socket = Arc::new(Mutex::new(Socket {
        state: if stands { State::Open } else { State::Connecting },
        written: VecDeque::new(),
        room,
        received: VecDeque::new(),
        ended: false,
        closed: false,
        awaited: None,
    }));
    (MemoryStream(socket.clone()), StreamKernel(socket))
}

fn lock(socket: &Mutex<Socket>) -> MutexGuard<'_, Socket> {
    socket.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Socket {
    /// Bytes that can be written now.
    fn free(&self) -> io::Result<usize> {
        match self.state {
            State::Reset => Err(ErrorKind::BrokenPipe.into()),
            State::Open if self.written.len() < self.room => Ok(self.room - self.written.len()),
            State::Open | State::Connecting => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// The bytes that can be read now in one piece; none at the stream's end.
    fn readable(&self) -> io::Result<&[u8]> {
        match self.received.as_slices().0 {
            [] if self.state == State::Reset => Err(ErrorKind::ConnectionReset.into()),
            [] if !self.ended => Err(ErrorKind::WouldBlock.into()),
            bytes => Ok(bytes),
        }
    }
}

impl MemoryStream {
    pub(super) fn wait_for(&self, interest: WaitInterest) {
        lock(&self.0).awaited = Some(interest);
    }

    pub(super) fn send(
        &self,
        head: &[u8],
        region: &Region,
        pieces: impl Iterator<Item = Piece>,
    ) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        let free = socket.free()?;
        let first = head.len().min(free);
        socket.written.extend(&head[..first]);
        Ok(first + vectored::gather(&mut socket.written, free - first, region, pieces))
    }

    pub(super) fn receive(
        &self,
        region: &Region,
        pieces: impl Iterator<Item = Piece>,
    ) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        let read = match socket.readable()? {
            [] => 0,
            bytes => vectored::fill(bytes, region, pieces),
        };
        socket.received.drain(..read);
        Ok(read)
    }

    /// Reads available bytes; 0: the stream has ended.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is available now; otherwise the errors of a socket.
    pub fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        let bytes = socket.readable()?;
        let read = bytes.len().min(into.len());
        into[..read].copy_from_slice(&bytes[..read]);
        socket.received.drain(..read);
        Ok(read)
    }
}

impl Drop for MemoryStream {
    fn drop(&mut self) {
        lock(&self.0).closed = true;
    }
}

impl StreamKernel {
    /// Notes that the peer's kernel has accepted the connection.
    pub fn connected(&self) {
        let mut socket = lock(&self.0);
        if socket.state == State::Connecting {
            socket.state = State::Open;
        }
    }

    /// Takes up to `most` of the bytes that the program has written.
    pub fn take(&self, most: usize) -> Vec<u8> {
        let mut socket = lock(&self.0);
        let count = socket.written.len().min(most);
        socket.written.drain(..count).collect()
    }

    /// Bytes that were written and not taken.
    pub fn unsent(&self) -> usize {
        let socket = lock(&self.0);
        if socket.state == State::Open { socket.written.len() } else { 0 }
    }

    /// Bytes that were received and not read.
    pub fn unread(&self) -> usize {
        lock(&self.0).received.len()
    }

    /// Delivers bytes to the program.
    pub fn receive(&self, bytes: &[u8]) {
        lock(&self.0).received.extend(bytes);
    }

    /// Notes that the peer sends nothing more.
    pub fn end(&self) {
        lock(&self.0).ended = true;
    }

    /// Resets the connection; received bytes can still be read.
    pub fn reset(&self) {
        let mut socket = lock(&self.0);
        socket.state = State::Reset;
        socket.written.clear();
    }

    /// Whether the connection was reset.
    pub fn is_reset(&self) -> bool {
        lock(&self.0).state == State::Reset
    }

    /// Whether the program has dropped its end.
    pub fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// Whether the stream is in a wait set.
    pub fn is_adopted(&self) -> bool {
        lock(&self.0).awaited.is_some()
    }

    /// Whether there is a reason to wake the program now.
    pub fn is_ready(&self) -> bool {
        let socket = lock(&self.0);
        let readable = !socket.received.is_empty() || socket.ended || socket.state == State::Reset;
        let writable = socket.state == State::Open && socket.written.len() < socket.room;
        !socket.closed
            && match socket.awaited {
                None => false,
                Some(WaitInterest::Readable) => readable,
                Some(WaitInterest::ReadableOrWritable) => readable || writable,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(result: io::Result<usize>) -> Result<usize, ErrorKind> {
        result.map_err(|error| error.kind())
    }

    #[test]
    fn a_stream_takes_what_fits_and_gives_what_has_come() {
        let region = Region::new(c"stream", 4096).unwrap();
        let pieces = || [Piece { at: 0, bytes: 3 }, Piece { at: 16, bytes: 3 }].into_iter();
        let (stream, kernel) = stream(false, 7);
        stream.wait_for(WaitInterest::ReadableOrWritable);
        assert_eq!(kind(stream.send(b"head", &region, pieces())), Err(ErrorKind::WouldBlock));
        assert!(!kernel.is_ready(), "it is being dialled");
        kernel.connected();
        assert!(kernel.is_ready());
        kernel.receive(b"abcdef");
        assert_eq!(kind(stream.receive(&region, pieces())), Ok(6));
        assert_eq!(kind(stream.send(b"head", &region, pieces())), Ok(7), "no more fits");
        assert_eq!(kind(stream.send(b"head", &region, pieces())), Err(ErrorKind::WouldBlock));
        assert!(!kernel.is_ready(), "it is full, and nothing has come");
        assert_eq!((kernel.take(5), kernel.unsent()), (b"heada".to_vec(), 2));
        assert_eq!(kind(stream.send(b"", &region, pieces().skip(1))), Ok(3));
        assert_eq!(kernel.take(9), b"bcdef");
    }

    #[test]
    fn what_has_come_is_read_before_the_end() {
        let mut byte = [0];
        for broken in [false, true] {
            let (stream, kernel) = stream(true, 1);
            assert_eq!(kind(stream.read(&mut byte)), Err(ErrorKind::WouldBlock));
            kernel.receive(b"x");
            if broken {
                kernel.reset()
            } else {
                kernel.end()
            }
            stream.wait_for(WaitInterest::Readable);
            assert_eq!((kind(stream.read(&mut byte)), byte), (Ok(1), *b"x"));
            let over = if broken { Err(ErrorKind::ConnectionReset) } else { Ok(0) };
            assert_eq!(kind(stream.read(&mut byte)), over);
            assert!(kernel.is_ready(), "its reader is woken until it drops the stream");
            drop(stream);
            assert!(kernel.is_closed() && !kernel.is_ready());
        }
    }
}
