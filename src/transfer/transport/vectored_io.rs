//! Moves bytes between streams and KV regions without a copy in between.
//!
//! Thread: `move`. It never waits: descriptors are non-blocking.
//! Invariants: pieces come from a plan over checked page numbers. The assertion on each piece is
//! cheap beside a system call, and it stops a bug before it writes.
//! Not here: the right to read or write the pages. The mover calls a transport only under a lease,
//! so these functions are visible to the transports alone.
#![allow(unsafe_code)]

use crate::kv::region::Region;
use crate::transfer::plan::Piece;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most pieces of one system call. The page-major layout needs few pieces. For scattered pieces, a
/// larger number saves little time.
const PIECES_MAX: usize = 64;

/// Sends `head`, then the bytes of `pieces`, as far as the stream takes them. Returns how many
/// bytes.
pub(super) fn send(
    stream: BorrowedFd<'_>,
    head: &[u8],
    region: &Region,
    pieces: impl Iterator<Item = Piece>,
) -> io::Result<usize> {
    let mut vector = Vector::new();
    vector.push(head.as_ptr().cast_mut(), head.len());
    vector.extend(region, pieces);
    let message = vector.message();
    // SAFETY: `head` and the region outlive the call; each entry lies in one of them. The pages are
    // leased to this transfer. If another thread still writes them, only the bytes of this request
    // are wrong.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into `pieces`, which are leased to this transfer. Returns how many bytes came. 0: the
/// stream has ended, or there are no pieces.
pub(super) fn receive(
    stream: BorrowedFd<'_>,
    region: &Region,
    pieces: impl Iterator<Item = Piece>,
) -> io::Result<usize> {
    let mut vector = Vector::new();
    vector.extend(region, pieces);
    let mut message = vector.message();
    // SAFETY: the region outlives the call and each entry lies in it; no reference into it exists.
    let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, 0) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Appends the bytes of `pieces` to `into`, up to `most` bytes. Returns how many.
pub(super) fn gather(
    into: &mut VecDeque<u8>,
    most: usize,
    region: &Region,
    pieces: impl Iterator<Item = Piece>,
) -> usize {
    let mut gathered = 0;
    for piece in pieces {
        let (at, bytes) = within(region, &piece);
        let part = bytes.min(most - gathered);
        // SAFETY: inside the region; leased to this transfer, and no reference into it exists.
        into.extend((0..part).map(|i| unsafe { at.add(i).read() }));
        gathered += part;
        if gathered == most {
            break;
        }
    }
    gathered
}

/// Copies bytes that were received elsewhere into `pieces`. Returns how many fitted.
pub(super) fn fill(bytes: &[u8], region: &Region, pieces: impl Iterator<Item = Piece>) -> usize {
    let mut filled = 0;
    for piece in pieces {
        let (at, room) = within(region, &piece);
        let part = &bytes[filled..bytes.len().min(filled + room)];
        // SAFETY: inside the region, which does not overlap `bytes`; leased to this transfer.
        unsafe { at.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
        filled += part.len();
        if filled == bytes.len() {
            break;
        }
    }
    filled
}

struct Vector {
    entries: [MaybeUninit<libc::iovec>; PIECES_MAX],
    count: usize,
}

impl Vector {
    fn new() -> Vector {
        Vector { entries: [const { MaybeUninit::uninit() }; PIECES_MAX], count: 0 }
    }

    fn push(&mut self, at: *mut u8, bytes: usize) {
        self.entries[self.count].write(libc::iovec { iov_base: at.cast(), iov_len: bytes });
        self.count += 1;
    }

    fn extend(&mut self, region: &Region, pieces: impl Iterator<Item = Piece>) {
        for piece in pieces.take(PIECES_MAX - self.count) {
            let (at, bytes) = within(region, &piece);
            self.push(at, bytes);
        }
    }

    /// Valid as long as the vector does not move.
    fn message(&mut self) -> libc::msghdr {
        // SAFETY: an all-zero message is valid and empty.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.entries.as_mut_ptr().cast();
        message.msg_iovlen = self.count as _;
        message
    }
}

fn within(region: &Region, piece: &Piece) -> (*mut u8, usize) {
    let (at, bytes) = (piece.at as usize, piece.bytes as usize);
    assert!(bytes <= region.len() && at <= region.len() - bytes, "piece outside its region");
    // SAFETY: in bounds of the mapping.
    (unsafe { region.base().as_ptr().add(at) }, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn pieces(count: u64) -> impl Iterator<Item = Piece> {
        (0..count).map(|i| Piece { at: i * 16, bytes: 3 })
    }

    fn bytes(region: &Region) -> Vec<u8> {
        // SAFETY: inside the mapping; no other thread uses it.
        (0..region.len()).map(|i| unsafe { region.base().add(i).read() }).collect()
    }

    #[test]
    fn more_pieces_than_a_call_takes_are_cut_not_lost() {
        let (from, to) = (Region::new(c"from", 4096).unwrap(), Region::new(c"to", 4096).unwrap());
        let pattern: Vec<u8> = (0..4096u32).map(|i| (i * 7) as u8).collect();
        fill(&pattern, &from, [Piece { at: 0, bytes: 4096 }].into_iter());
        let (near, mut far) = UnixStream::pair().unwrap();
        assert_eq!(send(near.as_fd(), b"head", &from, pieces(100)).unwrap(), 4 + 63 * 3);
        let mut came = vec![0; 4 + 63 * 3];
        far.read_exact(&mut came).unwrap();
        assert_eq!(&came[..4], b"head");
        far.write_all(&came[4..]).unwrap();
        assert_eq!(receive(near.as_fd(), &to, pieces(63)).unwrap(), 63 * 3);
        let mut expected = vec![0; 4096];
        for i in (0..63).map(|i| i * 16) {
            expected[i..i + 3].copy_from_slice(&pattern[i..i + 3]);
        }
        assert_eq!(bytes(&to), expected);
        assert_eq!(fill(&pattern[..7], &to, pieces(2)), 6);
    }
}
