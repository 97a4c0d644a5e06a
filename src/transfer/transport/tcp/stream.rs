//! The bytes of pages on the stream of a lane.
//!
//! Thread: `move`. All calls are non-blocking.
//! Not here: dialling and accepting (`link::tcp_handshake`), what is sent and when (`source`,
//! `destination`).

use crate::kv::region::Region;
use crate::sys::stream::ByteStream;
use crate::transfer::plan::Piece;
use crate::transfer::transport::vectored_io;
use std::io;
use std::os::fd::AsFd;

/// Like [`vectored_io::send`].
#[inline]
pub(super) fn send(
    stream: &ByteStream,
    head: &[u8],
    region: &Region,
    pieces: impl Iterator<Item = Piece>,
) -> io::Result<usize> {
    match stream {
        ByteStream::Socket(socket) => vectored_io::send(socket.as_fd(), head, region, pieces),
        ByteStream::Memory(stream) => stream.write_with(|written, free| {
            let first = head.len().min(free);
            written.extend(&head[..first]);
            first + vectored_io::gather(written, free - first, region, pieces)
        }),
    }
}

/// Like [`vectored_io::receive`].
#[inline]
pub(super) fn receive(
    stream: &ByteStream,
    region: &Region,
    pieces: impl Iterator<Item = Piece>,
) -> io::Result<usize> {
    match stream {
        ByteStream::Socket(socket) => vectored_io::receive(socket.as_fd(), region, pieces),
        ByteStream::Memory(stream) => {
            stream.read_with(|bytes| vectored_io::fill(bytes, region, pieces))
        }
    }
}
