//! A stream without a kernel: two bounded buffers. The program uses [`MemoryStream`]. A simulated
//! kernel and network use [`StreamKernel`] and decide when and in which pieces bytes move.
//!
//! Thread: any; the simulator has one.
//! Invariants: it behaves like a non-blocking socket. A write takes only the bytes that fit. The
//! program reads all received bytes before it sees the end or the reset behind them. One read
//! returns the descriptors of one message. A program that waits is woken as long as there is a
//! reason; a [`ReadySet`] reports each change once.
//! Not here: time, order between streams, loss (`sim`).

use super::ready::{Readiness, ReadySet, ReadySource};
use crate::sys::event::WaitInterest;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The program's end; closed when dropped.
#[derive(Debug)]
pub struct MemoryStream(SharedSocket);

/// The kernel's side of the same stream.
#[derive(Clone, Debug)]
pub struct StreamKernel(SharedSocket);

/// The state of a stream, for both sides and for the ready set.
type SharedSocket = Arc<Mutex<Socket>>;

/// Bytes on their way, and the descriptors that travel with the first of them.
#[derive(Debug, Default)]
pub struct Segment {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
}

#[derive(Debug)]
struct Socket {
    state: State,
    /// Written by the program, not sent yet.
    written: Queue,
    /// Capacity of `written` in bytes.
    room: usize,
    /// The program writes nothing more.
    shut: bool,
    /// Received from the peer, not read yet.
    received: Queue,
    /// The peer sends nothing more behind `received`.
    ended: bool,
    /// The program has dropped its end.
    closed: bool,
    /// The interest of the program's wait set; `None` before the stream is in a wait set.
    awaited: Option<WaitInterest>,
    /// The program's ready set, and its token for this stream.
    registered: Option<(usize, ReadySet)>,
    /// Whether a change is in the ready set.
    reported: bool,
    /// The network resets the stream after its peer's host was silent for this time.
    silence_max: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Connecting,
    Open,
    /// The connection failed with this error.
    Failed(ErrorKind),
}

/// Bytes in order, and the descriptors that travel with some of them.
#[derive(Debug, Default)]
struct Queue {
    bytes: VecDeque<u8>,
    /// Bytes that were ever taken out.
    taken: u64,
    /// Descriptors by the place of their first byte, counted from the stream's beginning.
    descriptors: VecDeque<(u64, Vec<OwnedFd>)>,
}

impl Queue {
    fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Attaches descriptors to the next byte.
    fn attach(&mut self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() {
            self.descriptors.push_back((self.taken + self.bytes.len() as u64, descriptors));
        }
    }

    /// Takes the descriptors of the first byte.
    fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        let taken = self.taken;
        let first = self.descriptors.pop_front_if(|(place, _)| *place == taken);
        first.map(|(_, descriptors)| descriptors).unwrap_or_default()
    }

    /// How many of `most` bytes can go together: the bytes before the next descriptors.
    fn together(&self, most: usize) -> usize {
        let next = self.descriptors.iter().map(|(place, _)| place - self.taken).find(|&at| at > 0);
        let until = next.map_or(usize::MAX, |at| at as usize);
        most.min(until).min(self.bytes.len())
    }

    fn drop_first(&mut self, count: usize) {
        self.bytes.drain(..count);
        self.taken += count as u64;
    }
}

/// A stream with room for `room` unsent bytes. If `stands` is false, it is still being dialled.
pub fn stream(stands: bool, room: usize) -> (MemoryStream, StreamKernel) {
    let socket = Arc::new(Mutex::new(Socket {
        state: if stands { State::Open } else { State::Connecting },
        written: Queue::default(),
        room,
        shut: false,
        received: Queue::default(),
        ended: false,
        closed: false,
        awaited: None,
        registered: None,
        reported: false,
        silence_max: None,
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
            State::Failed(_) => Err(ErrorKind::BrokenPipe.into()),
            State::Open if self.shut => Err(ErrorKind::BrokenPipe.into()),
            State::Open if self.written.len() < self.room => Ok(self.room - self.written.len()),
            State::Open | State::Connecting => Err(ErrorKind::WouldBlock.into()),
        }
    }

    /// Whether bytes can be read; `false` at the stream's end.
    fn has_bytes(&self) -> io::Result<bool> {
        match self.state {
            _ if self.received.len() > 0 => Ok(true),
            State::Failed(error) => Err(error.into()),
            _ if !self.ended => Err(ErrorKind::WouldBlock.into()),
            _ => Ok(false),
        }
    }

    fn is_writable(&self) -> bool {
        self.state == State::Open && self.written.len() < self.room
    }
}

impl ReadySource for Mutex<Socket> {
    fn readiness(&self) -> Option<Readiness> {
        let mut socket = lock(self);
        socket.reported = false;
        let (token, _) = socket.registered.as_ref()?;
        let broken = matches!(socket.state, State::Failed(_));
        Some(Readiness {
            token: *token,
            readable: socket.received.len() > 0 || socket.ended || broken,
            writable: socket.is_writable() || broken,
            read_closed: socket.ended || broken,
            broken,
        })
    }
}

/// Reports a change to the program's ready set.
fn report(shared: &SharedSocket, socket: &mut Socket) {
    if let Some((_, set)) = &socket.registered
        && !socket.reported
    {
        set.push_stream(shared.clone());
        socket.reported = true;
    }
}

impl MemoryStream {
    /// Sets the interest of the program's wait set.
    pub fn wait_for(&self, interest: WaitInterest) {
        lock(&self.0).awaited = Some(interest);
    }

    /// From now on, `set` reports changes of this stream with this token, and first its state now.
    pub fn register(&self, token: usize, set: &ReadySet) {
        let mut socket = lock(&self.0);
        socket.registered = Some((token, set.clone()));
        report(&self.0, &mut socket);
    }

    /// From now on, no ready set reports this stream.
    pub fn deregister(&self) {
        lock(&self.0).registered = None;
    }

    /// Makes the network reset the stream after its peer's host was silent for this time.
    pub fn limit_silence(&self, longest: Duration) {
        lock(&self.0).silence_max = Some(longest);
    }

    /// Whether the connection is established: an error if it failed, `false` if it is still
    /// connecting.
    pub fn finish_connect(&self) -> io::Result<bool> {
        match lock(&self.0).state {
            State::Connecting => Ok(false),
            State::Open => Ok(true),
            State::Failed(error) => Err(error.into()),
        }
    }

    /// Lets `fill` append at most as many bytes as fit, and returns how many it says.
    ///
    /// # Errors
    /// `WouldBlock` if nothing fits now; otherwise the errors of a socket.
    pub fn write_with(
        &self,
        fill: impl FnOnce(&mut VecDeque<u8>, usize) -> usize,
    ) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        let free = socket.free()?;
        let count = fill(&mut socket.written.bytes, free);
        assert!(socket.written.len() <= socket.room, "a write takes only the bytes that fit");
        Ok(count)
    }

    /// Writes the bytes that fit, and returns how many. The descriptors travel with the first.
    ///
    /// # Errors
    /// As [`MemoryStream::write_with`].
    pub fn write(&self, bytes: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        let count = socket.free()?.min(bytes.len());
        socket.written.attach(descriptors);
        socket.written.bytes.extend(&bytes[..count]);
        Ok(count)
    }

    /// Writes nothing more. The peer sees the end after all written bytes.
    pub fn shutdown_write(&self) -> io::Result<()> {
        let mut socket = lock(&self.0);
        match socket.state {
            State::Open => socket.shut = true,
            State::Connecting | State::Failed(_) => return Err(ErrorKind::NotConnected.into()),
        }
        Ok(())
    }

    /// Lets `take` use the first bytes that can be read now in one piece, and returns how many it
    /// says; 0: the stream has ended.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is available now; otherwise the errors of a socket.
    pub fn read_with(&self, take: impl FnOnce(&[u8]) -> usize) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        if !socket.has_bytes()? {
            return Ok(0);
        }
        let count = take(socket.received.bytes.as_slices().0);
        socket.received.drop_first(count);
        Ok(count)
    }

    /// Reads available bytes; 0: the stream has ended.
    ///
    /// # Errors
    /// As [`MemoryStream::read_with`].
    pub fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        self.read_with(|bytes| {
            let read = bytes.len().min(into.len());
            into[..read].copy_from_slice(&bytes[..read]);
            read
        })
    }

    /// Like [`MemoryStream::read`], also for descriptors. Stops before the next descriptors.
    ///
    /// # Errors
    /// As [`MemoryStream::read_with`].
    pub fn read_message(
        &self,
        into: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<usize> {
        let mut socket = lock(&self.0);
        if !socket.has_bytes()? {
            return Ok(0);
        }
        descriptors.append(&mut socket.received.take_descriptors());
        let read = socket.received.together(into.len());
        let (first, second) = socket.received.bytes.as_slices();
        let from_first = first.len().min(read);
        into[..from_first].copy_from_slice(&first[..from_first]);
        into[from_first..read].copy_from_slice(&second[..read - from_first]);
        socket.received.drop_first(read);
        Ok(read)
    }
}

impl Drop for MemoryStream {
    fn drop(&mut self) {
        let mut socket = lock(&self.0);
        socket.closed = true;
        socket.registered = None;
    }
}

impl StreamKernel {
    fn change(&self, change: impl FnOnce(&mut Socket)) {
        let mut socket = lock(&self.0);
        change(&mut socket);
        report(&self.0, &mut socket);
    }

    /// Notes that the peer's kernel has accepted the connection.
    pub fn connected(&self) {
        self.change(|socket| {
            if socket.state == State::Connecting {
                socket.state = State::Open;
            }
        });
    }

    /// Takes up to `most` of the bytes that the program has written, with the descriptors of the
    /// first byte. Stops before the next descriptors.
    pub fn take(&self, most: usize) -> Segment {
        let mut segment = Segment::default();
        let mut socket = lock(&self.0);
        let was_full = !socket.is_writable();
        let count = socket.written.together(most);
        if count > 0 {
            segment.descriptors = socket.written.take_descriptors();
            segment.bytes = socket.written.bytes.iter().take(count).copied().collect();
            socket.written.drop_first(count);
        }
        if was_full && socket.is_writable() {
            report(&self.0, &mut socket);
        }
        segment
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

    /// Delivers a segment to the program. A failed connection receives nothing.
    pub fn receive(&self, segment: Segment) {
        self.change(|socket| {
            if matches!(socket.state, State::Failed(_)) {
                return;
            }
            socket.received.attach(segment.descriptors);
            socket.received.bytes.extend(&segment.bytes);
        });
    }

    /// Notes that the peer sends nothing more.
    pub fn end(&self) {
        self.change(|socket| socket.ended = true);
    }

    /// Takes no more bytes from the program, which dies.
    pub fn freeze(&self) {
        let mut socket = lock(&self.0);
        socket.room = socket.written.len();
    }

    /// Resets the connection; received bytes can still be read.
    pub fn reset(&self) {
        self.fail(ErrorKind::ConnectionReset);
    }

    /// Ends the connection, or the attempt to connect, with this error. Received bytes can still be
    /// read.
    pub fn fail(&self, error: ErrorKind) {
        self.change(|socket| {
            socket.state = State::Failed(error);
            socket.written = Queue::default();
        });
    }

    /// Whether the connection was reset or has failed.
    pub fn is_reset(&self) -> bool {
        matches!(lock(&self.0).state, State::Failed(_))
    }

    /// Whether the program writes nothing more: it has shut its side, or dropped its end.
    pub fn is_shut(&self) -> bool {
        let socket = lock(&self.0);
        socket.shut || socket.closed
    }

    /// Whether the program has dropped its end.
    pub fn is_closed(&self) -> bool {
        lock(&self.0).closed
    }

    /// After this silence of the peer's host, the network must reset the stream.
    pub fn silence_max(&self) -> Option<Duration> {
        lock(&self.0).silence_max
    }

    /// Whether there is a reason to wake the program's wait set now.
    pub fn is_ready(&self) -> bool {
        let socket = lock(&self.0);
        let is_reset = matches!(socket.state, State::Failed(_));
        let readable = socket.received.len() > 0 || socket.ended || is_reset;
        !socket.closed
            && match socket.awaited {
                None => false,
                Some(WaitInterest::Readable) => readable,
                Some(WaitInterest::ReadableOrWritable) => readable || socket.is_writable(),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn kind(result: io::Result<usize>) -> Result<usize, ErrorKind> {
        result.map_err(|error| error.kind())
    }

    fn bytes(bytes: &[u8]) -> Segment {
        Segment { bytes: bytes.to_vec(), ..Segment::default() }
    }

    #[test]
    fn a_stream_takes_the_bytes_that_fit_and_returns_those_received() {
        let (stream, kernel) = stream(false, 7);
        let mut into = [0; 16];
        stream.wait_for(WaitInterest::ReadableOrWritable);
        assert_eq!(kind(stream.write(b"head", vec![])), Err(ErrorKind::WouldBlock));
        assert!(!kernel.is_ready(), "it is being dialled");
        kernel.connected();
        assert!(kernel.is_ready() && stream.finish_connect().unwrap());
        kernel.receive(bytes(b"abcdef"));
        assert_eq!((kind(stream.read(&mut into)), &into[..6]), (Ok(6), &b"abcdef"[..]));
        assert_eq!(kind(stream.write(b"head and body", vec![])), Ok(7), "no more fits");
        assert_eq!(kind(stream.write(b"head", vec![])), Err(ErrorKind::WouldBlock));
        assert!(!kernel.is_ready(), "it is full, and nothing has come");
        assert_eq!((kernel.take(5).bytes, kernel.unsent()), (b"head ".to_vec(), 2));
        let appended = stream.write_with(|written, free| {
            written.extend(&b"xyz"[..3.min(free)]);
            3
        });
        assert_eq!(kind(appended), Ok(3));
        assert_eq!(kernel.take(9).bytes, b"anxyz");
    }

    #[test]
    fn received_bytes_are_read_before_the_end() {
        let mut byte = [0];
        for broken in [false, true] {
            let (stream, kernel) = stream(true, 1);
            assert_eq!(kind(stream.read(&mut byte)), Err(ErrorKind::WouldBlock));
            kernel.receive(bytes(b"x"));
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

    #[test]
    fn descriptors_arrive_with_their_first_byte() {
        let (near, sending) = stream(true, 100);
        let (far, receiving) = stream(true, 100);
        let null = || vec![OwnedFd::from(File::open("/dev/null").unwrap())];
        near.write(b"plain", vec![]).unwrap();
        near.write(b"one", null()).unwrap();
        near.write(b"two", null()).unwrap();
        while sending.unsent() > 0 {
            receiving.receive(sending.take(2));
        }
        let read = || {
            let (mut into, mut descriptors) = ([0; 32], Vec::new());
            let count = far.read_message(&mut into, &mut descriptors).unwrap();
            (into[..count].to_vec(), descriptors.len())
        };
        assert_eq!(read(), (b"plain".to_vec(), 0));
        assert_eq!(read(), (b"one".to_vec(), 1));
        assert_eq!(read(), (b"two".to_vec(), 1));
    }

    #[test]
    fn a_ready_set_reports_each_change_once() {
        let set = ReadySet::default();
        let (stream, kernel) = stream(false, 2);
        stream.register(7, &set);
        let next = || set.next().map(|ready| (ready.token, ready.readable, ready.writable));
        assert_eq!(next(), Some((7, false, false)));
        assert_eq!(next(), None);
        kernel.connected();
        kernel.receive(bytes(b"x"));
        assert_eq!((next(), next()), (Some((7, true, true)), None));
        stream.write(b"xy", vec![]).unwrap();
        kernel.take(1);
        assert_eq!(next(), Some((7, true, true)), "it was full");
        kernel.take(1);
        assert_eq!(next(), None, "it was not full");
        kernel.end();
        drop(stream);
        assert_eq!(next(), None, "the program has closed it");
    }
}
