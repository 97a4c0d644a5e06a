//! A work queue as in a NIC: a ring of 64-byte entries in memory, and a doorbell with the end of
//! the valid entries. A request takes one entry, and more if its pieces or inline bytes need them.
//!
//! Thread: one writes, one reads. They share only the doorbell and the read position.
#![allow(unsafe_code)]

use crate::sys::verbs::abi::{self, SendWr, Sge};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The unit that a NIC reads.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Entry([u64; WORDS]);

const WORDS: usize = 8;
/// Words of a request's first entry before its pieces or inline bytes: id; kind, flags, count and
/// immediate; remote address; key and inline bytes.
const HEAD_WORDS: usize = 4;
const PIECE_WORDS: usize = 2;

/// The capacity of a queue.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) requests: u32,
    pub(super) pieces: u32,
    pub(super) inline: u32,
}

/// The ring of entries.
pub(super) struct WorkQueue {
    entries: Box<[UnsafeCell<Entry>]>,
    room: Room,
    /// Entries and requests written. The reader sees those up to the doorbell.
    written: AtomicU64,
    posted: AtomicU64,
    doorbell: AtomicU64,
    doorbells: AtomicU64,
    /// Entries read by the device.
    read: AtomicU64,
    /// Requests read by the device.
    taken: AtomicU64,
    /// Requests for which their own or a later completion was polled. As in a NIC, only that frees
    /// their entries.
    retired: AtomicU64,
}

// SAFETY: the reader reads entries below the doorbell, one writer writes those above it.
unsafe impl Sync for WorkQueue {}

/// A request as the device reads it.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) signalled: bool,
    /// In network order.
    pub(super) immediate: Option<u32>,
    pub(super) remote: u64,
    pub(super) key: u32,
    /// Counted from 0 over the queue's life.
    pub(super) index: u64,
    pieces: u32,
    /// `None`: the bytes lie in the pieces.
    inline: Option<u32>,
    first: u64,
}

impl WorkQueue {
    pub(super) fn new(room: Room) -> WorkQueue {
        let words = HEAD_WORDS
            + (room.pieces as usize * PIECE_WORDS).max((room.inline as usize).div_ceil(8));
        let entries = (room.requests as usize * words.div_ceil(WORDS)).next_power_of_two();
        let zero = || AtomicU64::new(0);
        WorkQueue {
            entries: (0..entries).map(|_| UnsafeCell::new(Entry([0; WORDS]))).collect(),
            room,
            written: zero(),
            posted: zero(),
            doorbell: zero(),
            doorbells: zero(),
            read: zero(),
            taken: zero(),
            retired: zero(),
        }
    }

    /// The numbers of doorbells and posted requests.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.doorbells.load(Ordering::Relaxed), self.posted.load(Ordering::Relaxed))
    }

    /// Writes a chain, then rings the doorbell once. On an error, the requests before the refused
    /// one are posted.
    ///
    /// # Safety
    /// The chain holds valid requests and ends in null. Each has as many pieces as it says,
    /// readable if it is inline. No other thread posts.
    #[inline]
    pub(super) unsafe fn post(&self, mut request: *mut SendWr) -> Result<(), (*mut SendWr, i32)> {
        let mut written = self.written.load(Ordering::Relaxed);
        let mut posted = self.posted.load(Ordering::Relaxed);
        let retired = self.retired.load(Ordering::Acquire);
        let mut result = Ok(());
        // SAFETY: by the caller.
        while let Some(valid) = unsafe { request.as_ref() } {
            if posted - retired >= u64::from(self.room.requests) {
                result = Err((request, libc::ENOMEM));
                break;
            }
            // SAFETY: as above. The queue reserves the maximum size for each request, so there is
            // room.
            match unsafe { self.write(written, valid) } {
                Some(entries) => written += entries,
                None => {
                    result = Err((request, libc::EINVAL));
                    break;
                }
            }
            posted += 1;
            request = valid.next;
        }
        self.written.store(written, Ordering::Relaxed);
        self.posted.store(posted, Ordering::Relaxed);
        self.doorbells.store(self.doorbells.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.doorbell.store(written, Ordering::Release);
        result
    }

    /// Writes a request and returns the number of its entries. `None`: it exceeds the granted
    /// capacity or is not a WRITE.
    ///
    /// # Safety
    /// As for [`WorkQueue::post`].
    #[inline]
    unsafe fn write(&self, first: u64, request: &SendWr) -> Option<u64> {
        let known = matches!(request.opcode, abi::WR_RDMA_WRITE | abi::WR_RDMA_WRITE_WITH_IMM);
        let count = u32::try_from(request.num_sge)
            .ok()
            .filter(|&count| known && count <= self.room.pieces)?;
        // SAFETY: by the caller.
        let pieces = unsafe { std::slice::from_raw_parts(request.sg_list, count as usize) };
        let is_inline = request.send_flags & abi::SEND_INLINE != 0;
        let inline = if is_inline { pieces.iter().map(|piece| piece.length).sum() } else { 0 };
        if inline > self.room.inline {
            return None;
        }
        let kind =
            u64::from(request.opcode) | u64::from(request.send_flags) << 8 | u64::from(count) << 16;
        let head = [
            request.wr_id,
            kind | u64::from(request.imm_data) << 32,
            request.remote_addr,
            u64::from(request.rkey) | u64::from(inline) << 32,
        ];
        if let ([piece], false) = (pieces, is_inline) {
            // The common case: one piece fills one entry.
            let [a, b, c, d] = head;
            let words = [
                a,
                b,
                c,
                d,
                piece.addr,
                u64::from(piece.length) | u64::from(piece.lkey) << 32,
                0,
                0,
            ];
            // SAFETY: above the doorbell, where only the posting thread writes.
            unsafe { *self.entry(first) = Entry(words) };
            return Some(1);
        }
        let mut place = Place { queue: self, entry: first, word: 0 };
        head.into_iter().for_each(|word| place.put(word));
        if is_inline {
            // SAFETY: by the caller.
            unsafe { put_inline(&mut place, pieces) };
        } else {
            for piece in pieces {
                place.put(piece.addr);
                place.put(u64::from(piece.length) | u64::from(piece.lkey) << 32);
            }
        }
        Some(place.entries_from(first))
    }

    /// The oldest unread request before the doorbell.
    #[inline]
    pub(super) fn front(&self) -> Option<Request> {
        let first = self.read.load(Ordering::Relaxed);
        if first == self.doorbell.load(Ordering::Acquire) {
            return None;
        }
        let word = |word| self.word(first, word);
        let (kind, key) = (word(1), word(3));
        let flags = (kind >> 8 & 0xff) as u32;
        let with_immediate = kind & 0xff == u64::from(abi::WR_RDMA_WRITE_WITH_IMM);
        Some(Request {
            id: word(0),
            signalled: flags & abi::SEND_SIGNALED != 0,
            immediate: with_immediate.then_some((kind >> 32) as u32),
            remote: word(2),
            key: key as u32,
            index: self.taken.load(Ordering::Relaxed),
            pieces: (kind >> 16 & 0xffff) as u32,
            inline: (flags & abi::SEND_INLINE != 0).then_some((key >> 32) as u32),
            first,
        })
    }

    /// The bytes of a request: inline bytes, or pieces that are not checked yet.
    pub(super) fn bytes(
        &self,
        request: &Request,
        mut inline: impl FnMut(u8),
        mut piece: impl FnMut(Sge),
    ) {
        match request.inline {
            Some(len) => (0..len as usize).for_each(|at| {
                let word = self.word(request.first, HEAD_WORDS + at / 8);
                inline(word.to_ne_bytes()[at % 8]);
            }),
            None => (0..request.pieces as usize).for_each(|index| {
                let at = HEAD_WORDS + PIECE_WORDS * index;
                let (addr, rest) = (self.word(request.first, at), self.word(request.first, at + 1));
                piece(Sge { addr, length: rest as u32, lkey: (rest >> 32) as u32 });
            }),
        }
    }

    /// Removes the front request.
    #[inline]
    pub(super) fn take(&self, request: &Request) {
        let words = match request.inline {
            Some(len) => HEAD_WORDS + (len as usize).div_ceil(8),
            None => HEAD_WORDS + PIECE_WORDS * request.pieces as usize,
        };
        self.taken.store(request.index + 1, Ordering::Relaxed);
        self.read.store(request.first + words.div_ceil(WORDS) as u64, Ordering::Release);
    }

    /// Records that the completion of the request `index` was polled.
    #[inline]
    pub(super) fn retire(&self, index: u64) {
        self.retired.fetch_max(index + 1, Ordering::Release);
    }

    /// Discards everything posted.
    pub(super) fn reset(&self) {
        self.read.store(self.doorbell.load(Ordering::Acquire), Ordering::Release);
        self.taken.store(self.posted.load(Ordering::Relaxed), Ordering::Relaxed);
        self.retired.store(self.posted.load(Ordering::Relaxed), Ordering::Release);
    }

    #[inline]
    fn entry(&self, index: u64) -> *mut Entry {
        self.entries[index as usize & (self.entries.len() - 1)].get()
    }

    #[inline]
    fn word(&self, first: u64, word: usize) -> u64 {
        // SAFETY: entries below the doorbell are not overwritten until they were read.
        unsafe { (*self.entry(first + (word / WORDS) as u64)).0[word % WORDS] }
    }
}

/// The place of a request's next word.
struct Place<'a> {
    queue: &'a WorkQueue,
    entry: u64,
    word: usize,
}

impl Place<'_> {
    #[inline]
    fn put(&mut self, value: u64) {
        if self.word == WORDS {
            (self.entry, self.word) = (self.entry + 1, 0);
        }
        // SAFETY: above the doorbell, where only the posting thread writes.
        unsafe { (*self.queue.entry(self.entry)).0[self.word] = value };
        self.word += 1;
    }

    #[inline]
    fn entries_from(&self, first: u64) -> u64 {
        self.entry - first + 1
    }
}

/// # Safety
/// The pieces can be read.
unsafe fn put_inline(place: &mut Place<'_>, pieces: &[Sge]) {
    let (mut word, mut filled) = ([0u8; 8], 0);
    for piece in pieces {
        let base = std::ptr::with_exposed_provenance::<u8>(piece.addr as usize);
        for at in 0..piece.length as usize {
            // SAFETY: by the caller; other threads may write the memory at the same time.
            word[filled] = unsafe { base.add(at).read_volatile() };
            filled += 1;
            if filled == word.len() {
                place.put(u64::from_ne_bytes(word));
                filled = 0;
            }
        }
    }
    if filled > 0 {
        place.put(u64::from_ne_bytes(word));
    }
}
